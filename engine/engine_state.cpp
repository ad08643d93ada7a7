// SPDX-License-Identifier: Apache-2.0
#include "engine/engine_state.h"

#include <utility>

#include "base/log.h"
#include "engine/phases.h"

namespace torpor {

EngineState::At EngineState::at() const noexcept {
  const MutexLock lock(mutex_);
  return at_;
}

ControllerState EngineState::view() const {
  const MutexLock lock(mutex_);
  ControllerState state = public_;
  state.engine = kEngineStates[static_cast<size_t>(at_)];
  return state;
}

void EngineState::enter_locked(At at) noexcept {
  if (at_ == at || at_ == At::kUnrecoverable) return;
  const At before = std::exchange(at_, at);
  (void)port_.record(
      {.type = EventType::kEngine, .from = static_cast<uint8_t>(before), .to = static_cast<uint8_t>(at)});
}

void EngineState::enter(At at) noexcept {
  const MutexLock lock(mutex_);
  enter_locked(at);
}

void EngineState::mark_unrecoverable(const Error& error) noexcept {
  enter(At::kUnrecoverable);
  (void)try_catch([&]() -> Status {
    log().critical("the engine is unrecoverable: {}", error);
    return ok();
  });
}

void EngineState::fall_asleep(int level, std::string checkpoint) noexcept {
  const MutexLock lock(mutex_);
  enter_locked(At::kAsleep);
  public_.level = std::max(public_.level, level);
  if (!checkpoint.empty()) public_.checkpoint = std::move(checkpoint);
}

std::string EngineState::wake() noexcept {
  const MutexLock lock(mutex_);
  enter_locked(At::kAwake);
  public_.level = -1;
  return std::exchange(public_.checkpoint, {});
}

}  // namespace torpor
