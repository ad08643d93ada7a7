// SPDX-License-Identifier: Apache-2.0
// The settings of a SleepController, which keeps a copy of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/checkpoint_manager.h"

namespace torpor {

struct SleepControllerOptions {
  std::string directory;                    // of checkpoints; empty: a sleep to disk fails
  std::optional<uint64_t> kv_budget_bytes;  // per rank, for cached blocks that no request has; none: save all
  CheckpointManagerOptions checkpoints;     // the controller sets the clock; ranks get the key by their own options
  // Read the weights for each checkpoint. Otherwise they are read once, and again only after a write was seen.
  bool always_read_weights = false;
  bool own_threads = true;  // off: background work is done by the thread that asks how far it is
};

}  // namespace torpor
