// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_group.h"

#include <algorithm>
#include <set>

#include <fmt/core.h>

#include "base/text.h"

namespace torpor {
namespace {

// The requests that run first get at most one of this many blocks, unless the very first needs more.
constexpr size_t kShareOfFirst = 32;

}  // namespace

Result<std::vector<Bytes>> RankGroup::send_bytes(const Bytes& order) {
  TORPOR_ASSIGN_OR_RETURN(std::vector<Bytes> answers, hooks_.call_ranks(order));
  if (answers.empty())
    return Error{.code = Code::kInternal, .what = "no worker rank answered", .origin = Origin::kEngine};
  if (std::any_of(answers.begin(), answers.end(), [](const Bytes& answer) { return answer.empty(); })) {
    return Error{.code = Code::kResourceExhausted,
                 .what = "a worker rank had no memory for its answer",
                 .next_step = "free some and try again"};
  }
  return answers;
}

bool is_tag(const Described& described, const std::string& tag) {
  return std::any_of(described.begin(), described.end(),
                     [&](const orders::Describe::Reply& reply) { return reply.ledger.tags.contains(tag); });
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

int32_t num_blocks(const Described& described) {
  uint32_t fewest = 0;
  for (const orders::Describe::Reply& reply : described) {
    if (reply.num_blocks != 0 && (fewest == 0 || reply.num_blocks < fewest)) fewest = reply.num_blocks;
  }
  return static_cast<int32_t>(std::min<uint32_t>(fewest, INT32_MAX));
}

Result<std::vector<std::string>> select_tags(const std::vector<std::string>& wanted, const Described& described) {
  std::set<std::string> tags;
  for (const orders::Describe::Reply& reply : described) {
    for (const auto& [tag, entry] : reply.ledger.tags) tags.insert(tag);
  }
  std::vector<std::string> selected;
  for (const std::string& tag : tags) {
    if (wanted.empty() || has_tag(wanted, tag)) selected.push_back(tag);
  }
  for (const std::string& tag : wanted) {
    if (has_tag(selected, tag)) continue;
    const std::vector<std::string> known(tags.begin(), tags.end());
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("there is no tag \"{}\"", tag),
                 .next_step = fmt::format("use some of: {}", joined(known, ", "))};
  }
  sort_for_wake(selected);
  return selected;
}

Status has_kv(const std::vector<std::string>& tags, const Described& described) {
  if (has_tag(tags, kKvCacheTag) || !is_tag(described, kKvCacheTag)) return ok();
  return Error{.code = Code::kInvalidArgument,
               .what = "a checkpoint of running requests needs their KV",
               .next_step = "add \"kv_cache\" to tags"};
}

std::vector<std::string> requests_by_need(const CapturedState& state) {
  std::vector<std::string> requests;
  if (!state.workers.empty()) requests = state.workers.front().rows;
  for (const auto* queue : {&state.scheduler.running, &state.scheduler.held, &state.scheduler.waiting})
    requests.insert(requests.end(), queue->begin(), queue->end());
  return requests;
}

std::vector<int32_t> blocks_by_need(const CapturedState& state) {
  std::vector<int32_t> all;
  for (const KvBlock& block : state.kv.blocks) all.push_back(block.id);
  return by_need(state.kv, requests_by_need(state), all);
}

std::vector<int32_t> deferred_blocks_of(const CapturedState& state, const std::vector<int32_t>& blocks,
                                        HoldsBack held) {
  if (held == HoldsBack::kNothing) return {};
  if (held == HoldsBack::kCached) return cached_blocks(state.kv, blocks);
  return deferred_blocks(state.kv, requests_by_need(state), blocks, blocks.size() / kShareOfFirst);
}

void name_blocks(orders::Save& save, const CapturedState& state, const std::vector<int32_t>& kept) {
  save.blocks = by_need(state.kv, requests_by_need(state), kept);
  save.versions = versions_of(state.kv, save.blocks);
  save.steps = state.kv.steps;
}

}  // namespace torpor
