#include "remote/resp_store.h"

#include <algorithm>
#include <random>
#include <thread>

#include <fmt/format.h>

#include "base/log.h"

namespace torpor::remote {
namespace {

constexpr std::chrono::nanoseconds kFullPause = std::chrono::seconds(1);
constexpr double kFirstPauseSeconds = 0.02;
constexpr int kMostMoves = 5;

Error unavailable(std::string what) {
  return {.code = Code::kUnavailable, .what = std::move(what), .next_step = "it is computed instead"};
}
Error missing() {
  return {.code = Code::kNotFound, .what = "the remote store does not have it", .next_step = "compute the block"};
}
Error damaged(std::string_view what) {
  return {.code = Code::kCorruption,
          .what = fmt::format("a KV block of the remote store {}", what),
          .next_step = "it is removed there, and computed"};
}
Error strange(const char* to) {
  return {.code = Code::kCorruption,
          .what = fmt::format("the remote store answers {} with something else", to),
          .next_step = "check that the address is that of a Redis or Valkey server"};
}

void pause_before(int attempt, Deadline until) {
  static thread_local std::minstd_rand random{std::random_device{}()};
  const double longest = kFirstPauseSeconds * static_cast<double>(1 << attempt);
  const std::chrono::duration<double> pause(std::uniform_real_distribution<double>(0, longest)(random));
  std::this_thread::sleep_until(
      std::min(until, std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(pause)));
}

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
      nodes_(settings, std::move(trust)),
      name_(settings.name),
      seal_id_(options_.key != nullptr ? random_seal_id() : SealId{}),
      space_salt_(salt_of(options_.key.get(), options_.encrypt)),
      breaker_(clock, options_.breaker),
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
    return std::unique_ptr<RespStore>(
        new RespStore(std::move(options), std::move(settings), std::move(trust), clock));
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
    item.expected.seal = with.seal(item.part->bytes, out,
                                   {SealPlace::Kind::kChunk, options_.rank, item.expected.seal_number,
                                    sealed_part(bound)});
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

// ---- the server

// Each item ends with a status. Those that are told to ask elsewhere do so at once; what passes is tried again.
void RespStore::exchange(std::span<Item> items, Verb verb) {
  const auto fail = [&](const Error& error) {
    for (Item& item : items) {
      if (!std::exchange(item.over, true)) item.status = error;
    }
  };
  if (items.empty()) return;
  if (!breaker_.may_ask()) return fail(unavailable("the remote store did not answer; it is not asked for a while"));
  const Deadline until = std::chrono::steady_clock::now() + options_.timeout;
  bool answered = false;
  Error last = unavailable("the remote store sends from node to node");
  for (int attempt = 0, moves = 0; attempt < options_.attempts;) {
    std::map<std::string, std::vector<Item*>> by_node;
    for (Item& item : items) {
      if (!item.over) by_node[item.node.empty() ? nodes_.node_of(item.key) : item.node].push_back(&item);
    }
    if (by_node.empty()) break;
    bool moved = false;
    for (auto& [node, asked] : by_node) {
      for (Item* const item : asked) item->node.clear();
      const Status talked = talk(node, asked, verb, until);
      answered = answered || talked;
      if (talked) {
        moved = std::any_of(asked.begin(), asked.end(), [](const Item* item) { return !item->node.empty(); }) || moved;
        continue;
      }
      nodes_.lost(node);
      last = talked.error();
      if (last.code == Code::kCorruption) last.code = Code::kUnavailable;  // of the connection, not of a block
      for (Item* const item : asked) {
        if (item->over) continue;
        item->asking = false;
        item->node.clear();
        item->status = last;
        item->over = last.code == Code::kUnauthenticated || last.code == Code::kResourceExhausted;
      }
    }
    if (moved && ++moves <= kMostMoves) continue;
    for (Item& item : items) item.node.clear();
    if (std::chrono::steady_clock::now() >= until) break;
    if (++attempt < options_.attempts &&
        std::any_of(items.begin(), items.end(), [](const Item& item) { return !item.over; }))
      pause_before(attempt, until);
  }
  for (Item& item : items) {
    if (!std::exchange(item.over, true) && item.status) item.status = last;
  }
  if (answered) {
    if (breaker_.succeeded()) log().info("KV connector: the remote store answers again");
  } else if (breaker_.failed()) {
    log().warn("KV connector: the remote store is not asked for a while: {}", last.to_string());
  }
}

// What cannot be told apart any more ends the connection, and is an error. What each item got is its own.
Status RespStore::talk(const std::string& node, std::span<Item* const> items, Verb verb, Deadline until) {
  TORPOR_ASSIGN(std::unique_ptr<RespConnection> connection, nodes_.take(node, until));
  if (verb == Verb::kPut) {
    TORPOR_TRY(put_to(*connection, node, items, until));
  } else {
    const std::string_view command = verb == Verb::kGet ? "GET" : verb == Verb::kFind ? "EXISTS" : "UNLINK";
    for (const Item* const item : items) {
      if (item->asking) connection->queue({"ASKING"});
      connection->queue({command, item->key});
    }
    TORPOR_TRY(connection->flush(until));
    for (Item* const item : items) TORPOR_TRY(receive(*connection, node, *item, verb, until));
  }
  nodes_.give(node, std::move(connection));
  return ok();
}

// What is there is not sent.
Status RespStore::put_to(RespConnection& connection, const std::string& node, std::span<Item* const> items,
                         Deadline until) {
  for (const Item* const item : items) {
    if (item->asking) connection.queue({"ASKING"});
    connection.queue({"EXISTS", item->key});
  }
  TORPOR_TRY(connection.flush(until));
  std::vector<Item*> absent;
  for (Item* const item : items) {
    const bool asking = item->asking;
    TORPOR_TRY(receive(connection, node, *item, Verb::kFind, until));
    if (!item->over || item->status || item->status.error().code != Code::kNotFound) continue;
    item->over = false;
    item->asking = asking;
    absent.push_back(item);
  }
  for (const Item* const item : absent) {
    if (item->asking) connection.queue({"ASKING"});
    connection.queue_set_new(item->key, item->head, item->body);
  }
  TORPOR_TRY(connection.flush(until));
  for (Item* const item : absent) TORPOR_TRY(receive(connection, node, *item, Verb::kPut, until));
  return ok();
}

Status RespStore::receive(RespConnection& connection, const std::string& node, Item& item, Verb verb, Deadline until) {
  using Kind = RespReply::Kind;
  if (std::exchange(item.asking, false)) {
    TORPOR_ASSIGN(const RespReply reply, connection.reply(until));
    if (reply.kind != Kind::kText) return strange("ASKING");
  }
  TORPOR_ASSIGN(const RespReply reply, connection.reply(until));
  if (reply.kind == Kind::kError) return refused(item, reply.text, node), ok();
  item.over = true;
  item.status = ok();
  switch (verb) {
    case Verb::kPut: return reply.kind == Kind::kText || reply.kind == Kind::kNothing ? ok() : Status(strange("SET"));
    case Verb::kGet:
      if (reply.kind == Kind::kNothing) {
        item.status = missing();
        return ok();
      }
      item.over = false;
      if (reply.kind != Kind::kValue) return strange("GET");
      TORPOR_TRY(receive_value(connection, item, static_cast<uint64_t>(reply.number), until));
      item.over = true;
      return ok();
    case Verb::kFind:
    case Verb::kRemove: break;
  }
  if (reply.kind != Kind::kNumber) return strange("EXISTS");
  if (verb == Verb::kFind && reply.number == 0) item.status = missing();
  return ok();
}

// The whole value is taken, whatever it is: what is behind it is the answer to another request.
Status RespStore::receive_value(RespConnection& connection, Item& item, uint64_t length, Deadline until) {
  if (length < kFrameBytes) {
    item.status = damaged("is too short");
    TORPOR_TRY(connection.skip(length, until));
    return connection.end_value(until);
  }
  FrameBytes head;
  TORPOR_TRY(connection.take(head, until));
  const uint64_t stored = length - kFrameBytes;
  const Result<BlockFrame> frame = decode_frame(head);
  item.status = frame ? verify(*frame, item.expected) : Status(frame.error());
  if (item.status && frame->stored != stored) item.status = damaged("has another length than it says");
  if (!item.status) {
    TORPOR_TRY(connection.skip(stored, until));
    return connection.end_value(until);
  }
  std::vector<std::byte> encoded(frame->codec == Codec::kNone ? 0 : stored);
  const std::span<std::byte> room = frame->codec == Codec::kNone ? item.part->bytes : std::span(encoded);
  TORPOR_TRY(connection.take(room, until));
  TORPOR_TRY(connection.end_value(until));
  item.status = catching([&]() -> Status {
    if (options_.key != nullptr) {
      const Seal with(*options_.key, frame->seal_id, frame->protection);
      TORPOR_TRY(with.open(room, frame->seal,
                           {SealPlace::Kind::kChunk, options_.rank, frame->seal_number, sealed_part(head)}));
    }
    if (frame->codec != Codec::kNone) TORPOR_TRY(decompress(frame->codec, room, item.part->bytes));
    const Digest digest = digest_of(item.part->bytes);
    if (frame->protection != Protection::kEncrypted && digest != frame->digest) return damaged("is damaged");
    item.part->record = {.bytes = frame->bytes, .stored = stored, .digest = digest, .codec = frame->codec};
    return ok();
  });
  return ok();
}

// Whether it says that it is what was asked for.
Status RespStore::verify(const BlockFrame& frame, const BlockFrame& expected) {
  if (frame.hash != expected.hash || frame.group != expected.group || frame.rank != expected.rank ||
      frame.space != expected.space || frame.protection != expected.protection)
    return damaged("is another one than its key says");
  if (frame.bytes != expected.bytes) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("a KV block of the remote store has {} bytes, not {}", frame.bytes, expected.bytes),
                 .next_step = "it is computed instead"};
  }
  const uint64_t most = frame.codec == Codec::kNone ? frame.bytes : compressed_bound(frame.bytes);
  if (frame.stored > most || (frame.codec == Codec::kNone && frame.stored != frame.bytes))
    return damaged("says another length than it can have");
  return ok();
}

// The server's own words. What passes is not over.
void RespStore::refused(Item& item, const std::string& words, const std::string& node) {
  const Error error = error_of(words);
  item.status = error;
  item.over = error.code != Code::kUnavailable;
  if (words.starts_with("MOVED") || words.starts_with("ASK")) {
    item.node = nodes_.moved(words, node);
    item.asking = words.starts_with("ASK ");
  } else if (words.starts_with("READONLY")) {
    nodes_.lost(node);  // another one is the master now
  }
  if (error.code != Code::kResourceExhausted) return;
  const MutexLock lock(mutex_);
  full_until_ = clock_.now() + kFullPause;
}

}  // namespace torpor::remote
