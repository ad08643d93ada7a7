#include "engine/rank_group.h"

#include <algorithm>

namespace torpor {

Result<std::vector<Bytes>> RankGroup::send_bytes(const Bytes& order) {
  TORPOR_ASSIGN(std::vector<Bytes> answers, hooks_.call_ranks(order));
  if (answers.empty())
    return Error{.code = Code::kInternal, .what = "no worker rank answered", .origin = Origin::kEngine};
  if (std::any_of(answers.begin(), answers.end(), [](const Bytes& answer) { return answer.empty(); })) {
    return Error{.code = Code::kResourceExhausted,
                 .what = "a worker rank had no memory for its answer",
                 .next_step = "free some and try again"};
  }
  return answers;
}

uint64_t tag_bytes(const Described& described, const std::string& tag, uint64_t RankLedger::Tag::*field) {
  uint64_t sum = 0;
  for (const orders::Describe::Reply& reply : described) {
    if (const auto found = reply.ledger.tags.find(tag); found != reply.ledger.tags.end()) sum += found->second.*field;
  }
  return sum;
}

BlockBytes block_bytes(const Described& described) {
  BlockBytes bytes;
  for (const orders::Describe::Reply& reply : described) {
    bytes.all += reply.bytes_per_block;
    bytes.most = std::max(bytes.most, reply.bytes_per_block);
  }
  return bytes;
}

void name_blocks(orders::Save& save, const SchedulerCheckpoint& state, const std::vector<int32_t>& kept) {
  std::vector<std::string> requests;
  if (!state.workers.empty()) requests = state.workers.front().rows;
  for (const auto* queue : {&state.scheduler.running, &state.scheduler.held, &state.scheduler.waiting})
    requests.insert(requests.end(), queue->begin(), queue->end());
  save.blocks = by_need(state.kv, requests, kept);
  save.stamps = stamps_of(state.kv, save.blocks);
  save.steps = state.kv.steps;
}

}  // namespace torpor
