// SPDX-License-Identifier: Apache-2.0
// EngineParts: what the operations of a controller work with. All of it outlives them.
#pragma once

#include <string_view>

#include "base/clock.h"
#include "base/event.h"
#include "base/file_system.h"
#include "engine/engine_state.h"
#include "engine/guarded_hooks.h"
#include "engine/rank_group.h"
#include "engine/sleep_controller_options.h"

namespace torpor {

struct EngineParts {
  GuardedHooks& hooks;
  RankGroup& ranks;
  FileSystem& file_system;
  const Clock& clock;
  const SleepControllerOptions& options;
  const EventPort port;
  EngineState& state;

  // Return kUnsupported if the state of the engine's requests cannot be preserved. `otherwise`: the error's next step.
  Status can_preserve(std::string_view otherwise) const;
  // The `otherwise` of a checkpoint.
  static constexpr std::string_view kNoCheckpoint = "checkpoint when nothing of this is left, or serve without it";
  // Let the host store use the slots again that a sleep kept. A failure is logged; then the engine has that much less
  // memory to offload to.
  void release_host_slots() const noexcept;
};

}  // namespace torpor
