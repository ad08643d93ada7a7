// SPDX-License-Identifier: Apache-2.0
// TagSleep: sleep and wake of tags without a controller, for allocators below other programs (memory_saver.h). It has
// no state of its own: make one where it is needed.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/rank_memory.h"

namespace torpor {

// What a sleep or wake of some tags moved, or would move.
struct TagMove {
  uint64_t copied_bytes = 0;    // between device memory and the arena
  uint64_t clean_bytes = 0;     // sleep: the backup from before still holds, not copied again
  uint64_t dropped_bytes = 0;   // sleep: freed without a copy; wake: comes back without content
  uint64_t physical_bytes = 0;  // device memory given back, or taken
  std::string obstacle{};       // of a plan: why it would fail, as far as can be known now; empty: it would not
  std::vector<std::pair<std::string, double>> seconds{};  // of each phase, in their order
};

// When a kept backup counts as that of the present content.
enum class CleanCheck : uint8_t {
  kTrust,  // that of the weights, unless the owner marked them dirty; no other
  kDigest  // of any tag, where the digests of all its bytes are the same
};

class TagSleep {
 public:
  explicit TagSleep(RankMemory& memory) : memory_(memory) {}  // `memory` outlives it

  // `tags` empty: all that are awake, or asleep. What is in `keep` is saved, the rest is freed without a copy. All or
  // nothing; a retry works. Threads: any, one at a time, others wait.
  Result<TagMove> sleep(std::vector<std::string> tags, const std::vector<std::string>& keep,
                        CleanCheck clean = CleanCheck::kTrust);
  Result<TagMove> wake(std::vector<std::string> tags);
  Result<TagMove> plan_sleep(std::vector<std::string> tags, const std::vector<std::string>& keep) const;
  Result<TagMove> plan_wake(std::vector<std::string> tags) const;

 private:
  Result<TagMove> sleep_now(std::vector<std::string> tags, const std::vector<std::string>& keep, CleanCheck clean);
  Result<TagMove> wake_now(std::vector<std::string> tags);
  Result<std::vector<std::string>> select(std::vector<std::string> tags, RegionState wanted) const;
  template <class Order>
  Result<typename Order::Reply> carry_out(const Order& order) TORPOR_REQUIRES(memory_.mutex());

  RankMemory& memory_;
};

}  // namespace torpor
