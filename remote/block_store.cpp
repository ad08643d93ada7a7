// SPDX-License-Identifier: Apache-2.0
#include "remote/block_store.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor::remote {
namespace {

constexpr std::chrono::nanoseconds kFullPause = std::chrono::seconds(1);

// Return a digest that depends on the key and on whether blocks are encrypted, and does not reveal the key. An engine
// that encrypts and one that does not would take each other's blocks for damaged, and remove them.
Digest salt_of(const Key* key, bool encrypt) {
  if (key == nullptr) return {};
  const Seal seal(*key, SealId{}, encrypt ? Protection::kEncrypted : Protection::kAuthenticated);
  StreamingDigest salt;
  salt.update(std::as_bytes(std::span(seal.key_name())));
  if (encrypt) salt.update(std::as_bytes(std::span(std::string_view("encrypted"))));
  return salt.finish();
}

Protection protection_of(const BlockStoreOptions& options) {
  if (options.key == nullptr) return Protection::kNone;
  return options.encrypt ? Protection::kEncrypted : Protection::kAuthenticated;
}

}  // namespace

Status BlockStoreOptions::validate() const {
  if (slots < 1 || record_bytes == 0) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("a remote store of {} slots of {} bytes", slots, record_bytes),
                 .next_step = "use 1 or more of each"};
  }
  return compression.validate();
}

BlockStore::BlockStore(BlockStoreOptions options, const Clock& clock, uint64_t bytes_per_put)
    : clock_(clock),
      options_(std::move(options)),
      traits_{.kind = "remote", .shared = true, .record_bytes = options_.record_bytes, .bytes_per_put = bytes_per_put},
      seal_id_(options_.key != nullptr ? random_seal_id() : SealId{}),
      space_salt_(salt_of(options_.key.get(), options_.encrypt)) {
  health_.io = options_.io;
}

Error BlockStore::unavailable(std::string what) {
  return {.code = Code::kUnavailable, .what = std::move(what), .next_step = "it is computed instead"};
}
Error BlockStore::missing() {
  return {.code = Code::kNotFound, .what = "the remote store does not have it", .next_step = "compute the block"};
}
Error BlockStore::damaged(std::string_view what) {
  return {.code = Code::kCorruption,
          .what = fmt::format("a KV block of the remote store {}", what),
          .next_step = "it is removed there, and computed"};
}

void BlockStore::open_space(uint32_t space, const Digest& digest) {
  StreamingDigest salted;
  salted.update(std::as_bytes(std::span(digest.bytes)));
  salted.update(std::as_bytes(std::span(space_salt_.bytes)));
  const MutexLock lock(mutex_);
  spaces_[space] = options_.key == nullptr ? digest : salted.finish();
}

std::optional<Digest> BlockStore::space_of(uint32_t space) const {
  const MutexLock lock(mutex_);
  const auto found = spaces_.find(space);
  return found == spaces_.end() ? std::nullopt : std::optional(found->second);
}

// Set the item's key and expected frame. A part without a key means the block that was put into its slot.
Status BlockStore::address(RecordPart& part, Item& item) const {
  BlockKey key = key_of(part);
  std::optional<Digest> space;
  if (key.space == 0) {
    const MutexLock lock(mutex_);
    const auto found = known_.find(slot_of(part));
    if (found == known_.end()) return not_there(slot_of(part));
    if (!part.bytes.empty() && found->second.record.bytes != part.bytes.size())
      return wrong_size(part, found->second.record.bytes);
    key = found->second.key;
    space = found->second.space;
  } else {
    space = space_of(key.space);
  }
  if (!space) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("namespace {} is not open in the remote store", key.space),
                 .next_step = "this is a mistake in the calling code"};
  }
  item.part = &part;
  item.key = block_key_text(options_.name, *space, options_.rank, key);
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

// Compress the item's body if that makes it smaller.
void BlockStore::compress(Item& item, std::vector<std::byte>& scratch, Encoded& encoded) const {
  item.body = item.part->bytes;
  if (options_.compression.codec == Codec::kNone) return;
  scratch.resize(std::max<size_t>(scratch.size(), compressed_bound(item.body.size())));
  const auto [bytes, codec] = encode(item.body, scratch, options_.compression);
  if (codec == Codec::kNone) return;
  item.body = encoded.emplace_back(bytes.begin(), bytes.end());
  item.expected.codec = options_.compression.codec;
  item.expected.stored = bytes.size();
}

void BlockStore::seal(Item& item, Encoded& encoded) {
  item.expected.digest = item.part->chunk->digest;
  if (options_.key != nullptr) {
    const bool encrypts = options_.encrypt;
    if (encrypts) item.expected.digest = {};  // a digest would show which blocks are equal
    item.expected.seal_id = seal_id_;
    item.expected.seal_number = ++sealed_;
    const Seal with(*options_.key, seal_id_, item.expected.protection);
    const std::span<const std::byte> in = item.body;
    std::span<std::byte> out;
    if (encrypts) {
      out = encoded.emplace_back(in.size());
      item.body = out;
    }
    const FrameBytes bound = encode_frame(item.expected);
    item.expected.seal =
        with.seal(in, out, {SealPlace::Kind::kChunk, options_.rank, item.expected.seal_number, sealed_part(bound)});
  }
  item.head = encode_frame(item.expected);
}

void BlockStore::do_put(std::span<RecordPart> parts) {
  std::vector<Item> items;
  Encoded encoded;
  std::vector<std::byte> scratch;
  items.reserve(parts.size());
  bool full = false;
  {
    const MutexLock lock(mutex_);
    full = clock_.now() < full_until_;
  }
  for (RecordPart& part : parts) {
    if (!part.status) continue;
    Item item;
    if (slot_of(part) >= options_.slots || full) {
      part.status =
          Error{.code = Code::kResourceExhausted,
                .what = full ? "the remote store takes nothing for a while" : "no such slot in the remote store",
                .next_step = "it is not stored there"};
    } else if (key_of(part).space == 0) {
      part.status = unsupported("blocks without a key");
    } else {
      part.status = address(part, item);
    }
    if (!part.status) continue;
    compress(item, scratch, encoded);
    seal(item, encoded);
    items.push_back(std::move(item));
  }
  exchange(items, Verb::kPut);
  for (Item& item : items) {
    RecordPart& part = *item.part;
    part.status = std::move(item.status);
    if (!part.status) {
      note(part.status.error(), true);
      continue;
    }
    const StoredRecord record{.bytes = part.bytes.size(),
                              .stored = item.expected.stored,
                              .digest = part.chunk->digest,
                              .codec = item.expected.codec};
    describe(part, record);
    const MutexLock lock(mutex_);
    Known& known = known_[slot_of(part)];
    health_.held_bytes += record.stored - known.record.stored;
    known = {.key = key_of(part), .space = item.expected.space, .record = record};
    health_.put_bytes += record.stored;
    health_.degraded = false;
  }
}

void BlockStore::do_get(std::span<RecordPart> parts) {
  std::vector<Item> items;
  items.reserve(parts.size());
  for (RecordPart& part : parts) {
    if (!part.status) continue;
    Item item;
    part.status = address(part, item);
    if (part.status) items.push_back(std::move(item));
  }
  exchange(items, Verb::kGet);
  for (Item& item : items) {
    item.part->status = item.status;
    if (item.status) {
      const MutexLock lock(mutex_);
      health_.got_bytes += item.part->chunk->stored_bytes;
    } else if (item.status.error().code != Code::kNotFound) {
      note(item.status.error(), false);
    }
  }
  remove_damaged(items);
}

void BlockStore::do_find(std::span<RecordPart> parts) {
  std::vector<Item> items;
  items.reserve(parts.size());
  for (RecordPart& part : parts) {
    Item item;
    part.status = address(part, item);
    if (part.status) items.push_back(std::move(item));
  }
  exchange(items, Verb::kFind);
  for (Item& item : items) {
    item.part->status = std::move(item.status);
    if (!item.part->status && item.part->status.error().code != Code::kNotFound) note(item.part->status.error(), false);
  }
}

Result<BlockFrame> BlockStore::frame_of(const FrameBytes& head, uint64_t stored, const BlockFrame& expected) {
  TORPOR_ASSIGN_OR_RETURN(const BlockFrame frame, decode_frame(head));
  TORPOR_RETURN_IF_ERROR(verify(frame, expected));
  if (frame.stored != stored) return damaged("has another length than it says");
  return frame;
}

Status BlockStore::open_value(const Item& item, const BlockFrame& frame, const FrameBytes& head,
                              std::span<std::byte> room) const {
  return try_catch([&]() -> Status {
    const std::span<std::byte> bytes = item.part->bytes;
    if (options_.key != nullptr) {
      const Seal with(*options_.key, frame.seal_id, frame.protection);
      TORPOR_RETURN_IF_ERROR(
          with.open(room, frame.seal, {SealPlace::Kind::kChunk, options_.rank, frame.seal_number, sealed_part(head)}));
    }
    if (frame.codec != Codec::kNone) {
      TORPOR_RETURN_IF_ERROR(decompress(frame.codec, room, bytes));
    } else if (room.data() != bytes.data()) {
      std::copy(room.begin(), room.end(), bytes.begin());
    }
    const Digest digest = digest_of(bytes);
    if (frame.protection != Protection::kEncrypted && digest != frame.digest) return damaged("is damaged");
    describe(*item.part, {.bytes = frame.bytes, .stored = frame.stored, .digest = digest, .codec = frame.codec});
    return ok();
  });
}

void BlockStore::no_room() {
  const MutexLock lock(mutex_);
  full_until_ = clock_.now() + kFullPause;
}

// Check that the frame is that of the expected block.
Status BlockStore::verify(const BlockFrame& frame, const BlockFrame& expected) {
  if (frame.hash != expected.hash || frame.group != expected.group || frame.rank != expected.rank ||
      frame.space != expected.space || frame.protection != expected.protection)
    return damaged("is another one than its key says");
  if (frame.bytes != expected.bytes) {
    return Error{
        .code = Code::kIncompatible,
        .what = fmt::format("a KV block of the remote store has {} bytes, not {}", frame.bytes, expected.bytes),
        .next_step = "it is computed instead"};
  }
  const uint64_t most = frame.codec == Codec::kNone ? frame.bytes : compressed_bound(frame.bytes);
  if (frame.stored > most || (frame.codec == Codec::kNone && frame.stored != frame.bytes))
    return damaged("says another length than it can have");
  return ok();
}

// Remove damaged blocks from the server: blocks are never overwritten, so they would stay for ever.
void BlockStore::remove_damaged(std::span<Item> items) {
  std::vector<Item> bad;
  for (const Item& item : items) {
    if (item.status || item.status.error().code != Code::kCorruption) continue;
    Item& removed = bad.emplace_back();
    removed.key = item.key;
    removed.damaged = true;
  }
  if (!bad.empty()) exchange(bad, Verb::kRemove);
}

void BlockStore::drop(std::span<const SlotRange> ranges) {
  (void)try_catch([&]() -> Status {
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
        item.key = block_key_text(options_.name, at->second.space, options_.rank, at->second.key);
        health_.dropped_bytes += at->second.record.stored;
        health_.held_bytes -= at->second.record.stored;
        at = known_.erase(at);
      }
    }
    if (!items.empty()) exchange(items, Verb::kRemove);
    return ok();
  });
}

StoreHealth BlockStore::health() const {
  const MutexLock lock(mutex_);
  return health_;
}

void BlockStore::note(const Error& error, bool write) {
  const MutexLock lock(mutex_);
  ++(write ? health_.write_errors : health_.read_errors);
  if (write) health_.degraded = true;
  health_.reason = error.to_string();
}

}  // namespace torpor::remote
