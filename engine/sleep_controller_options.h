// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/checkpoint_manager.h"

namespace torpor {

struct SleepControllerOptions {
  std::string directory;                    // of checkpoints; empty: sleeping to disk is refused
  std::optional<uint64_t> kv_budget_bytes;  // for cached blocks without a request, per rank; no value: keep all
  CheckpointManagerOptions checkpoints;     // the clock is the controller's; ranks have the key from their own options
  // Weights are read for each checkpoint. Otherwise once, and then only after they were seen to be written.
  bool always_read_weights = false;
  bool own_threads = true;  // off: what is written in the background is, by the thread that asks how far it is
};

}  // namespace torpor
