// SPDX-License-Identifier: Apache-2.0
// SlotTable: the requests that an engine serves, each with its state (kvcache/slot_state.h), emitted as events.
//
// The caller reports what the engine's scheduler did. A report that changes nothing costs a comparison and emits
// nothing: a decode step is no event. The number of computed tokens is emitted at changes of state, and every
// kPublishedEvery tokens. When half of the event ring was overwritten since, all requests are emitted again, so that a
// reader finds each of them.
//
// Threads: one, the engine scheduler's. Failure: kNotFound for an unknown slot; kFailedPrecondition names request and
// transition if the state does not allow it. The slot is then unchanged.
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
  int64_t tokens = 0;         // all tokens that it has
  int32_t device_blocks = 0;  // 0 also if unknown
  int32_t staged_blocks = 0;  // to be loaded, or being loaded
};

class SlotTable {
 public:
  static constexpr int64_t kPublishedEvery = 64;  // tokens
  explicit SlotTable(EventPort port) : port_(port) {}

  // Add a request and return its number, which is reused after its end. kInvalidArgument: no id, or no tokens.
  Result<uint32_t> create(std::string id, int64_t tokens);
  // Return false if a breakpoint holds the request: leave it waiting and ask again. Call before looking for its blocks
  // and scheduling it.
  bool may_admit(uint32_t slot) const;
  // `blocks` blocks of lower tiers are kept for the request; 0: none any more.
  Status stage(uint32_t slot, int32_t blocks);
  Status onboard(uint32_t slot, int32_t device_blocks);
  Status onboard_failed(uint32_t slot);
  // This step computes `now` tokens of the request; `computed` are computed already, of `tokens` in all.
  Status scheduled(uint32_t slot, int64_t computed, int64_t now, int64_t tokens, int32_t device_blocks = 0);
  Status skip(uint32_t slot) { return move(slot, SlotTrigger::kSkip); }
  Status preempt(uint32_t slot);
  // Emit the first bytes of the keys of the request's full blocks, from block `first` on.
  Status keys(uint32_t slot, std::span<const std::string_view> keys, size_t first, KeyOf what);
  // End the request. `busy`: committed copies are under way; call end() when they are over.
  Status finish(uint32_t slot, bool busy = false);
  Status end(uint32_t slot) { return finish(slot); }
  // End a step: emit the number of running and waiting requests, the computed tokens, and the duration.
  void step(int32_t running, int32_t waiting, int64_t tokens, int64_t nanoseconds);

  const SlotInfo& at(uint32_t slot) const { return slots_[slot].info; }
  size_t size() const { return slots_.size() - free_.size(); }

 private:
  struct Slot {
    SlotInfo info;
    int64_t published_tokens = 0;
  };
  Status known(uint32_t slot) const;  // kNotFound
  Status move(uint32_t slot, SlotTrigger trigger);
  void publish(uint32_t slot, SlotState from);
  void publish_all();

  const EventPort port_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  uint64_t published_ = 0;  // the ring's last sequence when all requests were emitted
};

}  // namespace torpor
