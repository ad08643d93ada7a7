// SPDX-License-Identifier: Apache-2.0
#include "remote/mooncake_store.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include <fmt/core.h>

#include "base/log.h"

namespace torpor::remote {
namespace {

constexpr uint64_t kBatch = 8 * kMiB;  // bytes of blocks in one call, or one larger block; a batch of a lane
constexpr int64_t kUnproven = std::numeric_limits<int64_t>::min();  // put returned 0, but the key is missing

BlockStoreOptions block_options(const MooncakeStoreOptions& options) {
  return BlockStoreOptions::of(options, options.name, options.io);
}

uint64_t room_for(uint64_t record_bytes) {
  const uint64_t frames = std::min(kMiB, (kBatch / record_bytes + 1) * kFrameBytes);
  return std::max(kBatch + frames, kFrameBytes + compressed_bound(record_bytes));
}

Error strange(size_t asked, size_t answers) {
  return {.code = Code::kUnavailable,
          .what = fmt::format("the Mooncake store was asked for {} keys and answers {}", asked, answers),
          .next_step = "check the version of Mooncake"};
}

// Return the answers; an error if there is not one for each value.
MooncakeAnswers as_many(MooncakeAnswers answers, size_t asked) {
  if (answers && answers->size() != asked) return strange(asked, answers->size());
  return answers;
}

// Put the values that the store does not have, and look them up afterwards.
MooncakeAnswers put_proven(MooncakeClient& client, std::span<const MooncakeValue> values) {
  TORPOR_ASSIGN_OR_RETURN(std::vector<int64_t> answers, as_many(client.exist(values), values.size()));
  const auto those_with = [&](int64_t answer, std::vector<size_t>& at) {
    std::vector<MooncakeValue> some;
    for (size_t i = 0; i < values.size(); ++i) {
      if (answers[i] != answer) continue;
      at.push_back(i);
      some.push_back(values[i]);
    }
    return some;
  };
  std::vector<size_t> absent;
  const std::vector<MooncakeValue> sent = those_with(0, absent);
  if (sent.empty()) return answers;
  TORPOR_ASSIGN_OR_RETURN(const std::vector<int64_t> put, as_many(client.put(sent), sent.size()));
  for (size_t i = 0; i < sent.size(); ++i) answers[absent[i]] = put[i] > 0 ? 0 : put[i];
  std::vector<size_t> claimed;
  const std::vector<MooncakeValue> asked = those_with(0, claimed);
  if (asked.empty()) return answers;
  TORPOR_ASSIGN_OR_RETURN(const std::vector<int64_t> there, as_many(client.exist(asked), asked.size()));
  for (size_t i = 0; i < asked.size(); ++i) answers[claimed[i]] = there[i] == 0 ? kUnproven : there[i];
  return answers;
}

struct LentDesk {
  MooncakeCalls& calls;
  MooncakeCalls::Desk* desk;
  ~LentDesk() {
    if (desk != nullptr) calls.give(*desk);
  }
};

}  // namespace

MooncakeStore::MooncakeStore(const MooncakeStoreOptions& options, MooncakeConnect connect, const Clock& clock)
    : BlockStore(block_options(options), clock),
      timeout_(options.timeout),
      room_bytes_(room_for(options.record_bytes)),
      breaker_(clock, options.breaker),
      calls_(std::move(connect), options.threads, room_bytes_, options.timeout) {}

Result<std::unique_ptr<MooncakeStore>> MooncakeStore::open(const MooncakeStoreOptions& options, MooncakeConnect connect,
                                                           const Clock& clock) {
  return try_catch([&]() -> Result<std::unique_ptr<MooncakeStore>> {
    if (options.timeout.count() < 1 || options.threads < 1) {
      return Error{
          .code = Code::kInvalidArgument,
          .what = fmt::format("a remote store with {} ms and {} threads", options.timeout.count(), options.threads),
          .next_step = "use 1 or more of each"};
    }
    TORPOR_RETURN_IF_ERROR(block_options(options).validate());
    return std::unique_ptr<MooncakeStore>(new MooncakeStore(options, std::move(connect), clock));
  });
}

void MooncakeStore::exchange(std::span<Item> items, Verb verb) {
  if (items.empty()) return;
  const Deadline until = std::chrono::steady_clock::now() + timeout_;
  if (!breaker_.may_ask()) {
    for (Item& item : items)
      item.status = unavailable("the Mooncake store did not answer; it is not asked for a while");
    return;
  }
  bool answered = false;
  std::optional<Error> failure;
  for (size_t at = 0; at < items.size();) {
    const size_t count = as_many_as_fit(items.subspan(at), verb);
    const Status asked = ask(items.subspan(at, count), verb, until, answered);
    at += count;
    if (asked) continue;
    failure = asked.error();
    for (Item& item : items.subspan(at)) item.status = *failure;
    break;
  }
  for (const Item& item : items) {
    if (!failure && !item.status && item.status.error().code == Code::kUnavailable) failure = item.status.error();
  }
  if (answered) {
    if (breaker_.succeeded()) log().info("KV connector: the Mooncake store answers again");
  } else if (failure && breaker_.failed()) {
    log().warn("KV connector: the Mooncake store is not asked for a while: {}", *failure);
  }
}

size_t MooncakeStore::as_many_as_fit(std::span<const Item> items, Verb verb) const {
  uint64_t bytes = 0;
  size_t count = 0;
  for (const Item& item : items) {
    if (verb == Verb::kPut) bytes += kFrameBytes + item.body.size();
    if (verb == Verb::kGet) bytes += kFrameBytes + item.part->bytes.size();
    if (bytes > room_bytes_) break;
    ++count;
  }
  return count;
}

// Run `verb` for the items. `answered`: set if an answer shows that the store is reachable.
Status MooncakeStore::ask(std::span<Item> items, Verb verb, Deadline until, bool& answered) {
  struct Call {
    Verb verb;
    bool force;
    std::vector<MooncakeValue> values;
    MooncakeAnswers answers;
  };
  const Status status = try_catch([&]() -> Status {
    const auto call = std::make_shared<Call>(Call{verb, items[0].damaged, {}, std::vector<int64_t>{}});
    TORPOR_ASSIGN_OR_RETURN(MooncakeCalls::Desk* const desk, calls_.take(until));
    LentDesk lent{calls_, desk};
    std::span<std::byte> room = calls_.room(*desk);
    for (const Item& item : items) {
      MooncakeValue& value = call->values.emplace_back();
      value.key = item.key;
      if (verb == Verb::kPut) {
        value.bytes = room.first(item.head.size() + item.body.size());
        std::memcpy(value.bytes.data(), item.head.data(), item.head.size());
        std::memcpy(value.bytes.data() + item.head.size(), item.body.data(), item.body.size());
      } else if (verb == Verb::kGet) {
        value.bytes = room.first(kFrameBytes + item.part->bytes.size());
      }
      room = room.subspan(value.bytes.size());
    }
    const auto work = [call](MooncakeClient& client) {
      switch (call->verb) {
        case Verb::kPut: call->answers = put_proven(client, call->values); break;
        case Verb::kGet: call->answers = as_many(client.get(call->values), call->values.size()); break;
        case Verb::kFind: call->answers = as_many(client.exist(call->values), call->values.size()); break;
        case Verb::kRemove: call->answers = as_many(client.remove(call->values, call->force), call->values.size());
      }
    };
    const Status ran = calls_.run(lent.desk, work, until);
    if (lent.desk == nullptr) return ran;  // the abandoned thread still uses `call`
    if (ran && call->answers) {
      for (size_t i = 0; i < items.size(); ++i)
        end(items[i], verb, (*call->answers)[i], call->values[i].bytes, answered);
    }
    return !ran || call->answers ? ran : Status(call->answers.error());
  });
  if (!status) {
    for (Item& item : items) item.status = status;
  }
  return status;
}

void MooncakeStore::end(Item& item, Verb verb, int64_t answer, std::span<std::byte> room, bool& answered) {
  using namespace mooncake;
  answered = answered || answer >= 0 || (answer != kNoMaster && answer != kTransferFailed && answer != -1);
  if (answer >= 0) {
    item.status = verb == Verb::kFind && answer == 0 ? Status(missing()) : ok();
    if (verb == Verb::kGet) end_value(item, answer, room);
    return;
  }
  switch (answer) {
    case kNotThere:
    case kNotReady: item.status = verb == Verb::kRemove ? ok() : Status(missing()); return;
    case kLeased: item.status = verb == Verb::kRemove ? ok() : Status(unavailable("a block is leased")); return;
    case kTooSmall:
      item.status = verb == Verb::kGet ? damaged("is longer than it can be") : unavailable("Mooncake refuses a block");
      return;
    case kNoRoom:
      item.status = Error{.code = Code::kResourceExhausted,
                          .what = "the Mooncake store has no room",
                          .next_step = "it is not stored there"};
      no_room();
      return;
    case kUnproven:
      item.status = unavailable("the Mooncake store says that it stored a block, and does not have it");
      return;
    case kTransferFailed: item.status = unavailable("a transfer of the Mooncake store failed (-800)"); return;
    case kNoMaster: item.status = unavailable("the master of the Mooncake store does not answer (-900)"); return;
    default: item.status = unavailable(fmt::format("the Mooncake store answers with its error {}", answer));
  }
}

void MooncakeStore::end_value(Item& item, int64_t length, std::span<std::byte> room) const {
  const auto bytes = static_cast<uint64_t>(length);
  if (bytes < kFrameBytes) {
    item.status = damaged("is too short");
    return;
  }
  if (bytes > room.size()) {
    item.status = damaged("is longer than it can be");
    return;
  }
  FrameBytes head;
  std::memcpy(head.data(), room.data(), head.size());
  const Result<BlockFrame> frame = frame_of(head, bytes - kFrameBytes, item.expected);
  item.status =
      frame ? open_value(item, *frame, head, room.subspan(kFrameBytes, bytes - kFrameBytes)) : Status(frame.error());
}

}  // namespace torpor::remote
