// SPDX-License-Identifier: Apache-2.0
#include "engine/deferred_blocks.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/text.h"

namespace torpor {

Status DeferredBlocks::hold(const std::vector<int32_t>& blocks, size_t ranks, Operation& operation) {
  Deferred deferred{.left = {}, .seen = std::vector<uint64_t>(ranks)};
  for (const int32_t block : blocks) deferred.left[block].ranks = static_cast<int32_t>(ranks);
  operation.undo_with([this, blocks]() -> Status {
    deferred_.reset();
    TORPOR_RETURN_IF_ERROR(engine_.hooks.release_blocks({.arrived = blocks}));
    return ok();
  });
  TORPOR_RETURN_IF_ERROR(engine_.hooks.hold_blocks(blocks));
  deferred_ = std::move(deferred);
  return ok();
}

Result<WakeProgress> DeferredBlocks::take(DeferredWait wait, const DeferredWishes& wishes) {
  WakeProgress progress;
  while (deferred_) {
    Result<bool> more = try_catch([&]() { return take_once(wait, wishes, progress); });
    if (!more && progress.arrived + progress.lost + progress.skipped == 0) return std::move(more).error();
    if (!more || !*more) break;
  }
  return progress;
}

// Take one round; return whether there is another. Reports of the ranks count only when the engine has got them: a
// round that fails has changed nothing, and is repeated.
Result<bool> DeferredBlocks::take_once(DeferredWait wait, const DeferredWishes& wishes, WakeProgress& progress) {
  TORPOR_ASSIGN_OR_RETURN(
      const std::vector<orders::PollRestore::Reply> replies,
      engine_.ranks.call(orders::PollRestore{
          .seen = deferred_->seen, .wait = wait, .wanted = wishes.wanted, .skipped = wishes.skipped}));
  Deferred next = *deferred_;
  ArrivedBlocks ended;
  const auto end = [&](std::map<int32_t, Block>::iterator block) {
    (block->second.worst == BlockArrival::kArrived   ? ended.arrived
     : block->second.worst == BlockArrival::kSkipped ? ended.skipped
     : block->second.worst == BlockArrival::kLost    ? ended.lost
                                                     : ended.unproven)
        .push_back(block->first);
    return next.left.erase(block);
  };
  bool all_ended = true;
  std::string why;
  for (size_t rank = 0; rank < replies.size() && rank < next.seen.size(); ++rank) {
    const orders::PollRestore::Reply& reply = replies[rank];
    all_ended = all_ended && reply.ended;
    if (why.empty() && !reply.why.empty()) why = fmt::format("rank {}: {}", rank, reply.why);
    const uint64_t known = next.seen[rank] - std::min(next.seen[rank], reply.first);
    for (uint64_t i = known; i < reply.arrivals.size(); ++i) {
      const auto block = next.left.find(reply.arrivals[i].block);
      if (block == next.left.end()) continue;
      block->second.worst = std::max(block->second.worst, reply.arrivals[i].how);
      if (--block->second.ranks == 0) end(block);
    }
    next.seen[rank] = std::max(next.seen[rank], reply.first + reply.arrivals.size());
  }
  // If all ranks have ended, the blocks that are left are lost: a rank that released its memory has reported none.
  for (auto block = next.left.begin(); all_ended && block != next.left.end();) {
    block->second.worst = std::max(block->second.worst, BlockArrival::kLost);
    block = end(block);
  }
  TORPOR_ASSIGN_OR_RETURN(std::vector<std::string> recomputed, engine_.hooks.release_blocks(ended));
  // Nothing can fail from here on: the engine has the blocks.
  deferred_ = std::move(next);
  const size_t lost = ended.lost.size() + ended.unproven.size();
  progress.arrived += static_cast<int64_t>(ended.arrived.size());
  progress.lost += static_cast<int64_t>(lost);
  progress.skipped += static_cast<int64_t>(ended.skipped.size());
  progress.left = static_cast<int64_t>(deferred_->left.size());
  (void)try_catch([&]() -> Status {
    if (lost > 0) {
      log().error("{} KV blocks did not come back: {}; {} requests are computed again: {}", lost, why,
                  recomputed.size(), joined(recomputed, ", "));
    }
    if (progress.recomputed.empty()) {
      progress.recomputed = std::move(recomputed);
    } else {
      progress.recomputed.insert(progress.recomputed.end(), recomputed.begin(), recomputed.end());
    }
    return ok();
  });
  if (all_ended) {
    deferred_.reset();
    engine_.release_host_slots();
  }
  return deferred_ && (deferred_->left.empty() || wait == DeferredWait::kAll);
}

Status DeferredBlocks::wait() {
  while (deferred_) TORPOR_RETURN_IF_ERROR(take(DeferredWait::kAll));
  return ok();
}

void DeferredBlocks::end_if_all_came() noexcept {
  if (deferred_ && deferred_->left.empty()) (void)try_catch([this] { return wait(); });
}

Status DeferredBlocks::wait_before_wake(size_t ranks, Operation& operation) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::PollRestore::Reply> replies,
                          engine_.ranks.call(orders::PollRestore{.seen = {}, .wait = DeferredWait::kAll}));
  Deferred deferred{.left = {}, .seen = std::vector<uint64_t>(ranks)};
  for (size_t rank = 0; rank < std::min(ranks, replies.size()); ++rank) {
    const std::vector<DeferredArrival>& arrivals = replies[rank].arrivals;
    deferred.seen[rank] = arrivals.size();
    const bool whole = std::all_of(arrivals.begin(), arrivals.end(),
                                   [](const DeferredArrival& each) { return each.how == BlockArrival::kArrived; });
    if (whole) continue;
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("rank {}: {}", rank, replies[rank].why),
                 .next_step = "call again; if it stays so, wake a checkpoint in a new engine"};
  }
  operation.undo_with([this]() -> Status { return deferred_.reset(), ok(); });
  deferred_ = std::move(deferred);
  return ok();
}

Status DeferredBlocks::forget() {
  const auto arrivals = [&](std::vector<uint64_t> seen) {
    return engine_.ranks.undo(orders::PollRestore{.seen = std::move(seen), .wait = DeferredWait::kAll, .cancel = true});
  };
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::PollRestore::Reply> replies, arrivals({}));
  std::vector<uint64_t> seen;
  for (const orders::PollRestore::Reply& reply : replies) seen.push_back(reply.arrivals.size());
  TORPOR_RETURN_IF_ERROR(arrivals(std::move(seen)));
  return ok();
}

}  // namespace torpor
