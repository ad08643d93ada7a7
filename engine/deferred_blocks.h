// SPDX-License-Identifier: Apache-2.0
// DeferredBlocks: the KV blocks of a post-copy wake that come back while the engine already runs: which of them all
// ranks have, and what the engine is told of it. The copies are each rank's (engine/deferred_copies.h).
//
// Owner: the operation in progress. Threads: one at a time.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "engine/engine_parts.h"
#include "engine/operation.h"

namespace torpor {

class DeferredBlocks {
 public:
  explicit DeferredBlocks(const EngineParts& engine) : engine_(engine) {}

  bool any() const { return deferred_.has_value(); }
  // Let the engine hold these blocks back, before it runs. If the wake is undone, they stay where the ranks have them.
  Status hold(const std::vector<int32_t>& blocks, size_t ranks, Operation& operation);
  // Ask the ranks what has arrived, and release it to the engine. What the engine has already is in the result also
  // where the rest fails: the next call says why.
  Result<WakeProgress> take(DeferredWait wait, const DeferredWishes& wishes = {});
  // Do that until none is left.
  Status wait();
  // End a wake whose blocks have all come already. What fails is tried again by the next operation.
  void end_if_all_came() noexcept;
  // Wait for the blocks of a wake that cannot be a post-copy one after all. What they came from stays until the wake is
  // over.
  Status wait_before_wake(size_t ranks, Operation& operation);
  // Undo the wake of a new engine: nothing is written into its blocks any more.
  Status forget();

 private:
  struct Block {
    int32_t ranks = 0;  // that have not told of it
    BlockArrival worst = BlockArrival::kArrived;
  };
  struct Deferred {
    std::map<int32_t, Block> left;
    std::vector<uint64_t> seen;  // by rank: so many were told
  };
  Result<bool> take_once(DeferredWait wait, const DeferredWishes& wishes, WakeProgress& progress);

  const EngineParts& engine_;
  std::optional<Deferred> deferred_;  // none: nothing is on its way
};

}  // namespace torpor
