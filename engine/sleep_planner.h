// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/operation_context.h"

namespace torpor {

// Return what a sleep would move and free, and why it would be refused. Changes nothing. `valid`: whether the options
// are. `being_written`: another checkpoint is, so that it is not tried whether all ranks see the directory.
// Precondition: nothing is left of a post-copy wake.
Result<SleepPlan> plan_of_sleep(const OperationContext& context, const SleepOptions& options, const Status& valid,
                                bool being_written);

}  // namespace torpor
