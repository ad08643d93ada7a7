#include "remote/resp_store.h"

#include <algorithm>

#include <fmt/format.h>

namespace torpor::remote {
namespace {

// What a key has of its own, without a word of itself.
Digest salt_of(const Key* key, bool encrypt) {
  if (key == nullptr) return {};
  const Seal seal(*key, SealId{}, encrypt ? Protection::kEncrypted : Protection::kAuthenticated);
  return digest_of(std::as_bytes(std::span(seal.key_name())));
}

Protection protection_of(const RespStoreOptions& options) {
  if (options.key == nullptr) return Protection::kNone;
  return options.encrypt ? Protection::kEncrypted : Protection::kAuthenticated;
}

}  // namespace

RespStore::RespStore(RespStoreOptions options, RespSettings settings, std::shared_ptr<const TlsTrust> trust,
                     const Clock& clock)
    : options_(std::move(options)),
      traits_{.kind = "remote", .shared = true, .record_bytes = options_.record_bytes},
      nodes_(settings, std::move(trust), clock, options_.breaker),
      name_(settings.name),
      seal_id_(options_.key != nullptr ? random_seal_id() : SealId{}),
      space_salt_(salt_of(options_.key.get(), options_.encrypt)),
      clock_(clock) {
  health_.io = settings.tls ? "tls" : "tcp";
}

Result<std::unique_ptr<RespStore>> RespStore::open(RespStoreOptions options, const Clock& clock) {
  return catching([&]() -> Result<std::unique_ptr<RespStore>> {
    if (options.slots < 1 || options.record_bytes == 0 || options.timeout.count() < 1 || options.attempts < 1) {
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("a remote store of {} slots of {} bytes, with {} ms and {} attempts",
                                       options.slots, options.record_bytes, options.timeout.count(), options.attempts),
                   .next_step = "use 1 or more of each"};
    }
    TORPOR_ASSIGN(RespSettings settings, resp_settings(options.url, options.credentials));
    std::shared_ptr<const TlsTrust> trust;
    if (settings.tls) {
      TORPOR_ASSIGN(trust, TlsTrust::of(options.authorities));
    }
    return std::unique_ptr<RespStore>(new RespStore(std::move(options), std::move(settings), std::move(trust), clock));
  });
}

void RespStore::open_space(uint32_t space, const Digest& digest) {
  StreamingDigest salted;
  salted.update(std::as_bytes(std::span(digest.bytes)));
  salted.update(std::as_bytes(std::span(space_salt_.bytes)));
  const MutexLock lock(mutex_);
  spaces_[space] = options_.key == nullptr ? digest : salted.finish();
}

std::optional<Digest> RespStore::space_of(uint32_t space) const {
  const MutexLock lock(mutex_);
  const auto found = spaces_.find(space);
  return found == spaces_.end() ? std::nullopt : std::optional(found->second);
}

// What the part's block is there. Without a key: the one that was put into its slot.
Status RespStore::describe(StorePart& part, Item& item) const {
  BlockKey key = part.key;
  std::optional<Digest> space;
  if (key.space == 0) {
    const MutexLock lock(mutex_);
    const auto found = known_.find(part.slot);
    if (found == known_.end()) return not_there(part.slot);
    if (!part.bytes.empty() && found->second.record.bytes != part.bytes.size())
      return wrong_size(part, found->second.record.bytes);
    key = found->second.key;
    space = found->second.space;
  } else {
    space = space_of(key.space);
  }
  if (!space) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("key space {} is not open in the remote store", key.space),
                 .next_step = "this is a mistake in the calling code"};
  }
  item.part = &part;
  item.key = block_key_text(name_, *space, options_.rank, key);
  item.expected = {.hash = key.hash,
                   .group = key.group,
                   .rank = options_.rank,
                   .space = *space,
                   .bytes = part.bytes.size(),
                   .stored = part.bytes.size(),
                   .protection = protection_of(options_)};
  return ok();
}

// ---- verbs

Status RespStore::seal(Item& item, std::vector<std::vector<std::byte>>& sealed) {
  item.expected.digest = item.part->record.digest;
  item.body = item.part->bytes;
  if (options_.key != nullptr) {
    const bool encrypts = options_.encrypt;
    if (encrypts) item.expected.digest = {};  // it would say which blocks are equal
    item.expected.seal_id = seal_id_;
    item.expected.seal_number = ++sealed_;
    const Seal with(*options_.key, seal_id_, item.expected.protection);
    std::span<std::byte> out;
    if (encrypts) {
      out = sealed.emplace_back(item.body.size());
      item.body = out;
    }
    const FrameBytes bound = encode_frame(item.expected);
    item.expected.seal = with.seal(
        item.part->bytes, out, {SealPlace::Kind::kChunk, options_.rank, item.expected.seal_number, sealed_part(bound)});
  }
  item.head = encode_frame(item.expected);
  return ok();
}

void RespStore::do_put(std::span<StorePart> parts) {
  std::vector<Item> items;
  std::vector<std::vector<std::byte>> sealed;
  items.reserve(parts.size());
  sealed.reserve(parts.size());
  bool full = false;
  {
    const MutexLock lock(mutex_);
    full = clock_.now() < full_until_;
  }
  for (StorePart& part : parts) {
    if (!part.status) continue;
    Item item;
    if (part.slot >= options_.slots || full) {
      part.status = Error{.code = Code::kResourceExhausted,
                          .what = full ? "the remote store has no room" : "no such slot in the remote store",
                          .next_step = "it is not stored there"};
    } else if (part.key.space == 0) {
      part.status = unsupported("blocks without a key");
    } else {
      part.status = describe(part, item);
    }
    if (part.status) part.status = seal(item, sealed);
    if (part.status) items.push_back(std::move(item));
  }
  exchange(items, Verb::kPut);
  for (Item& item : items) {
    StorePart& part = *item.part;
    part.status = std::move(item.status);
    if (!part.status) {
      note(part.status.error(), true);
      continue;
    }
    part.record = {.bytes = part.bytes.size(), .stored = part.bytes.size(), .digest = part.record.digest};
    const MutexLock lock(mutex_);
    Known& known = known_[part.slot];
    health_.held_bytes += part.record.stored - known.record.stored;
    known = {.key = part.key, .space = item.expected.space, .record = part.record};
    health_.put_bytes += part.record.stored;
    health_.degraded = false;
  }
}

void RespStore::do_get(std::span<StorePart> parts) {
  std::vector<Item> items;
  items.reserve(parts.size());
  for (StorePart& part : parts) {
    if (!part.status) continue;
    Item item;
    part.status = describe(part, item);
    if (part.status) items.push_back(std::move(item));
  }
  exchange(items, Verb::kGet);
  for (Item& item : items) {
    item.part->status = item.status;
    if (item.status) {
      const MutexLock lock(mutex_);
      health_.got_bytes += item.part->record.stored;
    } else if (item.status.error().code != Code::kNotFound) {
      note(item.status.error(), false);
    }
  }
  remove_damaged(items);
}

void RespStore::do_find(std::span<StorePart> parts) {
  std::vector<Item> items;
  items.reserve(parts.size());
  for (StorePart& part : parts) {
    Item item;
    part.status = describe(part, item);
    if (part.status) items.push_back(std::move(item));
  }
  exchange(items, Verb::kFind);
  for (Item& item : items) {
    item.part->status = std::move(item.status);
    if (!item.part->status && item.part->status.error().code != Code::kNotFound) note(item.part->status.error(), false);
  }
}

// Blocks are created and never changed: one that is damaged would stay for ever.
void RespStore::remove_damaged(std::span<Item> items) {
  std::vector<Item> bad;
  for (const Item& item : items) {
    if (item.status || item.status.error().code != Code::kCorruption) continue;
    Item& removed = bad.emplace_back();
    removed.key = item.key;
  }
  if (!bad.empty()) exchange(bad, Verb::kRemove);
}

void RespStore::drop(std::span<const SlotRange> ranges) {
  (void)catching([&]() -> Status {
    std::vector<Item> items;
    {
      const MutexLock lock(mutex_);
      for (auto at = known_.begin(); at != known_.end();) {
        const bool named = std::any_of(ranges.begin(), ranges.end(), [&](const SlotRange& range) {
          return at->first >= range.first && at->first < int64_t{range.first} + range.count;
        });
        if (!named) {
          ++at;
          continue;
        }
        Item& item = items.emplace_back();
        item.key = block_key_text(name_, at->second.space, options_.rank, at->second.key);
        health_.dropped_bytes += at->second.record.stored;
        health_.held_bytes -= at->second.record.stored;
        at = known_.erase(at);
      }
    }
    if (!items.empty()) exchange(items, Verb::kRemove);
    return ok();
  });
}

StoreHealth RespStore::health() const {
  const MutexLock lock(mutex_);
  return health_;
}

void RespStore::note(const Error& error, bool write) {
  const MutexLock lock(mutex_);
  ++(write ? health_.write_errors : health_.read_errors);
  if (write) health_.degraded = true;
  health_.reason = error.to_string();
}

}  // namespace torpor::remote
