// SPDX-License-Identifier: Apache-2.0
// SleepController: an early wake, whose engine runs while KV blocks still come back.
#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/text.h"
#include "engine/sleep_controller.h"

namespace torpor {

// Before the engine runs. What is undone after this leaves the blocks where the ranks have them.
Status SleepController::hold_late(const std::vector<int32_t>& blocks, size_t ranks, Operation& operation) {
  Late late{.left = {}, .seen = std::vector<uint64_t>(ranks)};
  for (const int32_t block : blocks) late.left[block].ranks = static_cast<int32_t>(ranks);
  operation.undo_with([this, blocks]() TORPOR_REQUIRES(operation_mutex_) -> Status {
    late_.reset();
    TORPOR_TRY(hooks_.release_blocks({.arrived = blocks}));
    return ok();
  });
  TORPOR_TRY(hooks_.hold_blocks(blocks));
  late_ = std::move(late);
  return ok();
}

Result<WakeProgress> SleepController::continue_wake(LateWait wait, const LateWishes& wishes) {
  return catching([&]() -> Result<WakeProgress> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    return take_late(wait, wishes);
  });
}

// What the engine has already is told also where the rest fails: the next call says why.
Result<WakeProgress> SleepController::take_late(LateWait wait, const LateWishes& wishes) {
  WakeProgress progress;
  while (late_) {
    Result<bool> more =
        catching([&]() TORPOR_REQUIRES(operation_mutex_) { return take_arrivals(wait, wishes, progress); });
    if (!more && progress.arrived + progress.lost + progress.skipped == 0) return std::move(more).error();
    if (!more || !*more) break;
  }
  return progress;
}

// One round; whether there is another. What the ranks tell is taken only when the engine has it: a round that fails has
// changed nothing, and is repeated.
Result<bool> SleepController::take_arrivals(LateWait wait, const LateWishes& wishes, WakeProgress& progress) {
  TORPOR_ASSIGN(const std::vector<orders::Arrivals::Reply> replies,
                ranks_.call(orders::Arrivals{
                    .seen = late_->seen, .wait = wait, .wanted = wishes.wanted, .skipped = wishes.skipped}));
  Late next = *late_;
  ArrivedBlocks ended;
  const auto end = [&](std::map<int32_t, LateBlock>::iterator block) {
    (block->second.worst == BlockArrival::kArrived   ? ended.arrived
     : block->second.worst == BlockArrival::kForgone ? ended.skipped
     : block->second.worst == BlockArrival::kLost    ? ended.lost
                                                     : ended.unproven)
        .push_back(block->first);
    return next.left.erase(block);
  };
  bool all_ended = true;
  std::string why;
  for (size_t rank = 0; rank < replies.size() && rank < next.seen.size(); ++rank) {
    const orders::Arrivals::Reply& reply = replies[rank];
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
  // A rank that has given up its memory has told of none.
  for (auto block = next.left.begin(); all_ended && block != next.left.end();) {
    block->second.worst = std::max(block->second.worst, BlockArrival::kLost);
    block = end(block);
  }
  TORPOR_ASSIGN(std::vector<std::string> recomputed, hooks_.release_blocks(ended));
  // From here on nothing fails: the engine has them.
  late_ = std::move(next);
  const size_t lost = ended.lost.size() + ended.unproven.size();
  progress.arrived += static_cast<int64_t>(ended.arrived.size());
  progress.lost += static_cast<int64_t>(lost);
  progress.skipped += static_cast<int64_t>(ended.skipped.size());
  progress.left = static_cast<int64_t>(late_->left.size());
  (void)catching([&]() -> Status {
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
    late_.reset();
    release_host_slots();
  }
  return late_ && (late_->left.empty() || wait == LateWait::kAll);
}

Status SleepController::wait_for_late() {
  while (late_) TORPOR_TRY(take_late(LateWait::kAll));
  return ok();
}

// Of a wake that cannot be an early one after all: as if nothing had been late. What the blocks came from stays until
// the wake is over.
Status SleepController::all_arrived(size_t ranks, Operation& operation) {
  TORPOR_ASSIGN(const std::vector<orders::Arrivals::Reply> replies,
                ranks_.call(orders::Arrivals{.seen = {}, .wait = LateWait::kAll}));
  Late late{.left = {}, .seen = std::vector<uint64_t>(ranks)};
  for (size_t rank = 0; rank < std::min(ranks, replies.size()); ++rank) {
    const std::vector<LateArrival>& arrivals = replies[rank].arrivals;
    late.seen[rank] = arrivals.size();
    const bool whole = std::all_of(arrivals.begin(), arrivals.end(),
                                   [](const LateArrival& each) { return each.how == BlockArrival::kArrived; });
    if (whole) continue;
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("rank {}: {}", rank, replies[rank].why),
                 .next_step = "call again; if it stays so, wake a checkpoint in a new engine"};
  }
  operation.undo_with([this]() TORPOR_REQUIRES(operation_mutex_) -> Status { return late_.reset(), ok(); });
  late_ = std::move(late);
  return ok();
}

// Of a new engine's wake that is undone: nothing is written into its blocks any more.
Status SleepController::forget_late() {
  const auto arrivals = [&](std::vector<uint64_t> seen) {
    return ranks_.undo(orders::Arrivals{.seen = std::move(seen), .wait = LateWait::kAll, .cancel = true});
  };
  TORPOR_ASSIGN(const std::vector<orders::Arrivals::Reply> told, arrivals({}));
  std::vector<uint64_t> seen;
  for (const orders::Arrivals::Reply& reply : told) seen.push_back(reply.arrivals.size());
  TORPOR_TRY(arrivals(std::move(seen)));
  return ok();
}

}  // namespace torpor
