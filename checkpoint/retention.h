// Which checkpoints of a directory may go: the decision alone, over what list() knows.
#pragma once

#include <vector>

#include "checkpoint/checkpoint_manager.h"

namespace torpor {

// Generations that may go, oldest first. `checkpoints`: oldest first.
std::vector<uint64_t> retired(const std::vector<CheckpointInfo>& checkpoints, const Retention& retention,
                              double now_unix_seconds);

}  // namespace torpor
