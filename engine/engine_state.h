// SPDX-License-Identifier: Apache-2.0
// EngineState: whether an engine is awake, asleep or between the two, and the part of its state that others may read.
//
//   awake ⇄ falling asleep ⇄ asleep ⇄ waking ⇄ awake          from any of them to unrecoverable, for good
//
// A checkpoint is falling asleep and awake again; a deeper sleep is falling asleep from asleep; a new engine wakes a
// checkpoint from awake.
//
// Threads: any.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/event.h"
#include "base/mutex.h"
#include "engine/operation.h"
#include "engine/rank_group.h"
#include "engine/sleep_report.h"

namespace torpor {

class EngineState final : public Operation::Owner {
 public:
  enum class At : uint8_t { kAwake, kFallingAsleep, kAsleep, kWaking, kUnrecoverable };  // as kEngineStates names them

  explicit EngineState(EventPort port) : port_(port) {}

  At at() const noexcept;
  bool is(At at) const noexcept { return this->at() == at; }
  bool unrecoverable() const noexcept override { return is(At::kUnrecoverable); }
  // Return the part of the state that others may read.
  ControllerState view() const;

  // Enter a state and emit its event. The operations keep to the order above; this function ensures only that an
  // unrecoverable engine stays so.
  void enter(At at) noexcept;
  // Mark the engine as unrecoverable, and log why.
  void mark_unrecoverable(const Error& error) noexcept override;
  // Enter kAsleep. If several sleeps are in force, the level is that of the deepest. An empty path keeps the checkpoint
  // of the earlier sleep.
  void fall_asleep(int level, std::string checkpoint) noexcept;
  // Enter kAwake. Return the path of the sleep's checkpoint; empty if there was none.
  std::string wake() noexcept;
  // Take over the states of all tags from the ledgers of all ranks. It allocates only for tags that were not known
  // before, so that the states of known tags are always right.
  template <class Reply>
  void set_tags(const std::vector<Reply>& replies) noexcept {
    const MutexLock lock(mutex_);
    std::erase_if(public_.tags, [&](const auto& known) {
      return std::none_of(replies.begin(), replies.end(),
                          [&](const Reply& reply) { return reply.ledger.tags.contains(known.first); });
    });
    for (auto& [tag, state] : public_.tags) state.clear();
    (void)try_catch([&]() TORPOR_REQUIRES(mutex_) -> Status {
      for (const Reply& reply : replies) {
        for (const auto& [tag, entry] : reply.ledger.tags) {
          std::string& state = public_.tags[tag];
          if (state.empty() || entry.state == "broken") state = entry.state;  // short enough to need no allocation
        }
      }
      return ok();
    });
  }

 private:
  void enter_locked(At at) noexcept TORPOR_REQUIRES(mutex_);

  const EventPort port_;
  mutable Mutex mutex_;  // never held while calling out
  At at_ TORPOR_GUARDED_BY(mutex_) = At::kAwake;
  ControllerState public_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
