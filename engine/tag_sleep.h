// SPDX-License-Identifier: Apache-2.0
// TagSleep: sleep and wake of tags without a controller, for allocators below other programs (memory_saver.h). It has
// no state: make one where it is needed. Threads: any, one call at a time, others wait.
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
  uint64_t clean_bytes = 0;     // sleep: the earlier backup still holds, not copied again
  uint64_t dropped_bytes = 0;   // sleep: released without a copy; wake: came back without content
  uint64_t physical_bytes = 0;  // device memory released, or taken
  std::string obstacle{};       // of a plan: why it would fail, as far as is known; empty: it would not
  std::vector<std::pair<std::string, double>> seconds{};  // of each phase, in their order
};

// When a kept backup counts as the present content.
enum class CleanCheck : uint8_t {
  kTrust,  // the weights' backup, unless the owner marked them dirty; no other
  kDigest  // the backup of any tag whose bytes have the same digests
};

class TagSleep {
 public:
  explicit TagSleep(RankMemory& memory) : memory_(memory) {}  // `memory` outlives this object

  // Put tags to sleep. `tags` empty: all that are awake. `keep`: the tags whose content is saved; the others are
  // released without a copy. All or nothing: after an error a retry works.
  Result<TagMove> sleep(std::vector<std::string> tags, const std::vector<std::string>& keep,
                        CleanCheck clean = CleanCheck::kTrust);
  // Wake tags. `tags` empty: all that are asleep. All or nothing.
  Result<TagMove> wake(std::vector<std::string> tags);
  // Return what sleep() and wake() would move. Nothing changes.
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
