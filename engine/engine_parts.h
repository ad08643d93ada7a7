// SPDX-License-Identifier: Apache-2.0
// EngineParts: what the controller of an engine works with. All of it outlives the operations that use it.
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

  // Return kUnsupported, with `otherwise` as what to do, if the state of the engine's requests cannot be preserved.
  Status can_preserve(std::string_view otherwise) const;
  // Let the host store have the slots again that a sleep kept. Where it fails, and is logged, an engine has so much
  // less room to offload to.
  void release_host_slots() const noexcept;
};

}  // namespace torpor
