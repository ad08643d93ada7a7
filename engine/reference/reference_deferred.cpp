// SPDX-License-Identifier: Apache-2.0
// Post-copy wakes of the reference engine: it runs while the content of some blocks is not there yet, and goes on
// without content that never comes.
#include <algorithm>
#include <iterator>

#include "engine/reference/reference_engine.h"

namespace torpor::reference {

Status ReferenceEngine::hold_blocks(const std::vector<int32_t>& blocks) {
  std::vector<BlockRef> kept;
  for (const int32_t id : blocks) {
    std::optional<BlockRef> block = pool_->ref(id);
    if (!block) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = "a block that is to be held is in no index",
                   .next_step = "this is a mistake in the calling code"};
    }
    kept.push_back(std::move(*block));
  }
  deferred_ids_ = {blocks.begin(), blocks.end()};
  deferred_ = std::move(kept);
  return ok();
}

Result<std::vector<std::string>> ReferenceEngine::release_blocks(const ArrivedBlocks& blocks) {
  const auto held = [this](const std::vector<int32_t>& ids) {
    std::set<int32_t> of;
    std::copy_if(ids.begin(), ids.end(), std::inserter(of, of.end()),
                 [this](int32_t id) { return deferred_ids_.contains(id); });
    return of;
  };
  const std::set<int32_t> unproven = held(blocks.unproven);
  std::set<int32_t> gone = held(blocks.lost);
  gone.merge(held(blocks.skipped));
  gone.insert(unproven.begin(), unproven.end());
  std::vector<std::string> recomputed = lose(gone);
  for (BlockRef& block : deferred_) {
    if (!unproven.contains(block.id())) continue;
    block.never_let_go();
    ++unproven_deferred_;
  }
  for (const int32_t id : blocks.arrived) deferred_ids_.erase(id);
  for (const int32_t id : gone) deferred_ids_.erase(id);
  if (!deferred_ids_.empty()) return recomputed;
  // Release the last one first, so that blocks are evicted in the same order as without a sleep.
  while (!deferred_.empty()) deferred_.pop_back();
  return recomputed;
}

// Forget these blocks. Return the requests that had one; they are computed again.
std::vector<std::string> ReferenceEngine::lose(const std::set<int32_t>& gone) {
  std::vector<std::string> recomputed;
  if (gone.empty()) return recomputed;
  for (const BlockRef& block : deferred_) {
    if (gone.contains(block.id())) pool_->discard(block);
  }
  std::vector<Request*> without;
  for (const auto& [id, request] : requests_) {
    const std::vector<int32_t> table = request->table();
    if (std::any_of(table.begin(), table.end(), [&](int32_t block) { return gone.contains(block); }))
      without.push_back(request.get());
  }
  std::vector<Scheduled> none;
  int32_t budget = 0;
  for (Request* const request : without) {
    recomputed.push_back(request->asked.id);
    if (std::find(running_.begin(), running_.end(), request) != running_.end()) {
      preempt(*request, none, budget);
    } else {
      release(*request);
    }
  }
  return recomputed;
}

bool ReferenceEngine::waits_for_blocks(const Request& request) const {
  if (deferred_ids_.empty()) return false;
  const std::vector<int32_t> table = request.table();
  return std::any_of(table.begin(), table.end(), [this](int32_t block) { return deferred_ids_.contains(block); });
}

// Return whether the request's prefix is in blocks that are not there yet: it waits for them instead of computing them.
bool ReferenceEngine::finds_deferred_blocks(const Request& request) const {
  if (deferred_ids_.empty()) return false;
  const std::vector<BlockRef> found = pool_->match(chain_of(request));
  return std::any_of(found.begin(), found.end(),
                     [this](const BlockRef& block) { return deferred_ids_.contains(block.id()); });
}

}  // namespace torpor::reference
