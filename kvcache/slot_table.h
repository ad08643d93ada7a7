// SPDX-License-Identifier: Apache-2.0
// SlotTable: the requests that an engine serves, each with its state (kvcache/slot_state.h), told as events.
//
// Who calls it says what the engine's scheduler did; what did not change costs a comparison and is not told: a decode
// step is no event. How far a request came is told at changes, and every so many tokens. All of it is told anew when
// half of what the ring of the events holds has been told since, so that a reader finds every request there.
//
// Threads: one, the engine scheduler's. Failure: kFailedPrecondition names both where the table has no such transition;
// the slot stays as it was.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/event.h"
#include "base/status.h"
#include "kvcache/slot_state.h"

namespace torpor {

struct SlotInfo {
  std::string id;
  SlotState state = SlotState::kNone;
  int64_t computed_tokens = 0;
  int64_t tokens = 0;         // all that it has
  int32_t device_blocks = 0;  // 0 too where nobody says
  int32_t staged_blocks = 0;  // to be loaded, or on their way
};

class SlotTable {
 public:
  static constexpr int64_t kToldEvery = 64;  // tokens
  explicit SlotTable(EventPort port) : port_(port) {}

  // Its number; one is used again when its slot has ended. kInvalidArgument: no id, no tokens.
  Result<uint32_t> create(std::string id, int64_t tokens);
  // Before it is looked for below and scheduled. False: somebody holds it; leave it where it is and ask again.
  bool may_admit(uint32_t slot) const;
  // `blocks`: those below that are kept for it; 0 gives back what was.
  Status stage(uint32_t slot, int32_t blocks);
  Status onboard(uint32_t slot, int32_t device_blocks);
  Status onboard_failed(uint32_t slot);
  // In this step so many of its tokens are computed; `computed` are already, `tokens` it has in all.
  Status scheduled(uint32_t slot, int64_t computed, int64_t now, int64_t tokens, int32_t device_blocks = 0);
  Status skip(uint32_t slot) { return move(slot, SlotTrigger::kSkip); }
  Status preempt(uint32_t slot);
  // Of its full blocks, from the one with this number on, the first bytes of each.
  Status keys(uint32_t slot, std::span<const std::string_view> keys, size_t first, KeyOf what);
  // `busy`: copies that were committed are under way; end() when they are over.
  Status finish(uint32_t slot, bool busy = false);
  Status end(uint32_t slot) { return finish(slot); }
  // Once a step, at its end: how many run and wait, how many tokens were computed, how long it took.
  void step(int32_t running, int32_t waiting, int64_t tokens, int64_t nanoseconds);

  const SlotInfo& at(uint32_t slot) const { return slots_[slot].info; }
  size_t size() const { return slots_.size() - free_.size(); }

 private:
  struct Slot {
    SlotInfo info;
    int64_t told_tokens = 0;
  };
  Status known(uint32_t slot) const;  // kNotFound
  Status move(uint32_t slot, SlotTrigger trigger);
  void tell(uint32_t slot, SlotState from);
  void tell_all();

  const EventPort port_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  uint64_t told_ = 0;  // events of the ring, when all were told
};

}  // namespace torpor
