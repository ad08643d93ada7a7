// SPDX-License-Identifier: Apache-2.0
// Plans of sleeps, for SleepController::plan_sleep(), and what both a plan and a sleep refuse. Threads: that of the
// operation in progress.
#pragma once

#include "engine/operation_context.h"

namespace torpor {

// Return what a sleep would move and free, and why it would be refused. Nothing changes. `valid`: the result of
// checking the options. `being_written`: another checkpoint is being written, so whether all ranks see the directory is
// not tried. Precondition: no block of a post-copy wake is left.
Result<SleepPlan> plan_of_sleep(const OperationContext& context, const SleepOptions& options, const Status& valid,
                                bool being_written);

// Return the error of a sleep to disk while these tags are asleep.
Error cannot_sleep_to_disk(const std::vector<std::string>& asleep);

// Return why an engine cannot sleep to disk, as kFailedPrecondition or kInvalidArgument. `asleep`: it sleeps already.
// `tags`: what the sleep would release.
Status can_sleep_to_disk(const OperationContext& context, bool asleep, bool preserve_state,
                         const std::vector<std::string>& tags, const Described& described);

}  // namespace torpor
