#include "engine/rank_group.h"

#include <algorithm>

namespace torpor {

Result<std::vector<RankReply>> RankGroup::send(const std::string& method, const RankOrder& order) {
  TORPOR_ASSIGN(const std::vector<Bytes> raw, hooks_.call_ranks(method, encode_order(order)));
  if (raw.empty()) return Error{.code = Code::kInternal, .what = "no worker rank answered", .origin = Origin::kEngine};
  std::vector<RankReply> replies;
  for (const Bytes& bytes : raw) {
    if (bytes.empty()) {
      return Error{.code = Code::kResourceExhausted,
                   .what = "a worker rank had no memory for its answer",
                   .next_step = "free some and try again"};
    }
    TORPOR_ASSIGN(RankReply reply, decode_reply(bytes));
    replies.push_back(std::move(reply));
  }
  return replies;
}

Result<std::vector<RankReply>> RankGroup::call(const std::string& method, const RankOrder& order) {
  TORPOR_ASSIGN(std::vector<RankReply> replies, send(method, order));
  for (const RankReply& reply : replies) {
    if (reply.error) return *reply.error;
  }
  return replies;
}

Result<std::vector<RankReply>> RankGroup::undo(const std::string& method, const RankOrder& order) {
  const auto attempt = [&]() -> Result<std::vector<RankReply>> {
    TORPOR_ASSIGN(std::vector<RankReply> replies, send(method, order));
    for (const RankReply& reply : replies) {
      if (reply.error && reply.error->code != Code::kFailedPrecondition) return *reply.error;
    }
    return replies;
  };
  Result<std::vector<RankReply>> undone = catching(attempt);
  if (!undone) undone = catching(attempt);
  return undone;
}

uint64_t total_bytes(const std::vector<RankReply>& replies) {
  uint64_t sum = 0;
  for (const RankReply& reply : replies) sum += reply.bytes;
  return sum;
}

uint64_t tag_bytes(const std::vector<RankReply>& replies, const std::string& tag, uint64_t RankLedger::Tag::*field) {
  uint64_t sum = 0;
  for (const RankReply& reply : replies) {
    if (const auto found = reply.ledger.tags.find(tag); found != reply.ledger.tags.end()) sum += found->second.*field;
  }
  return sum;
}

BlockBytes block_bytes(const std::vector<RankReply>& described) {
  BlockBytes bytes;
  for (const RankReply& reply : described) {
    bytes.all += reply.bytes_per_block;
    bytes.most = std::max(bytes.most, reply.bytes_per_block);
  }
  return bytes;
}

std::vector<RankLedger> ledgers_of(const std::vector<RankReply>& replies) {
  std::vector<RankLedger> ledgers;
  for (const RankReply& reply : replies) ledgers.push_back(reply.ledger);
  return ledgers;
}

}  // namespace torpor
