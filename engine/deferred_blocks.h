// SPDX-License-Identifier: Apache-2.0
// DeferredBlocks: the KV blocks of a post-copy wake that come back while the engine already runs. It counts which
// blocks all ranks have, and releases them to the engine. Each rank makes its own copies (engine/deferred_copies.h).
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
  // Have the engine hold these blocks back, before it runs. An undone wake leaves them as the ranks have them.
  Status hold(const std::vector<int32_t>& blocks, size_t ranks, Operation& operation);
  // Ask the ranks which blocks have ended, and release those to the engine. If a later part of the call fails, the
  // result still has what was released, and the next call returns the error.
  Result<WakeProgress> take(DeferredWait wait, const DeferredWishes& wishes = {});
  // Call take() until no block is left.
  Status wait();
  // End the wake if all its blocks have already come. If that fails, the next operation tries it again.
  void end_if_all_came() noexcept;
  // Wait for all blocks of a wake that cannot be a post-copy wake after all. Their backup stays until the wake is over.
  Status wait_before_wake(size_t ranks, Operation& operation);
  // Undo the wake of a new engine: when this returns, nothing is written into its blocks any more.
  Status forget();

 private:
  struct Block {
    int32_t ranks = 0;  // number of ranks that have not reported it
    BlockArrival worst = BlockArrival::kArrived;
  };
  struct Deferred {
    std::map<int32_t, Block> left;
    std::vector<uint64_t> seen;  // by rank: number of arrivals that were received
  };
  Result<bool> take_once(DeferredWait wait, const DeferredWishes& wishes, WakeProgress& progress);

  const EngineParts& engine_;
  std::optional<Deferred> deferred_;  // none: no block is deferred
};

}  // namespace torpor
