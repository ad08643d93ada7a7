// SPDX-License-Identifier: Apache-2.0
// Plans of sleeps, for SleepController::plan_sleep(). Threads: that of the operation in progress.
#pragma once

#include "engine/operation_context.h"

namespace torpor {

// Return what a sleep would move and free, and why it would be refused. Nothing changes. `valid`: the result of
// checking the options. `being_written`: another checkpoint is being written, so whether all ranks see the directory is
// not tried. Precondition: no block of a post-copy wake is left.
Result<SleepPlan> plan_of_sleep(const OperationContext& context, const SleepOptions& options, const Status& valid,
                                bool being_written);

}  // namespace torpor
