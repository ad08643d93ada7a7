// SPDX-License-Identifier: Apache-2.0
// What goes from an ObjectStore: checkpoints that nobody wants any more, and what no checkpoint names. What the owner
// of the store goes on from (remote/ownership.h) stays unless it is forced, and no push is under way meanwhile
// (remote/store_leases.h). Names go before what they name: whoever dies in the middle leaves checkpoints that are
// whole, and parts for the next removal. Whoever pulls a checkpoint that is removed gets an error.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "remote/object_store.h"

namespace torpor::remote {

struct RemovalOptions {
  bool force = false;    // also what the owner goes on from
  bool dry_run = false;  // only says what would go
  int keep = 0;          // remove_unnamed(): so many of the newest checkpoints; 0: all
};

// The checkpoint that list_pushed() calls so; its parts stay. kNotFound; kFailedPrecondition: it is owned;
// kUnavailable.
Status remove_pushed(ObjectStore& store, const std::string& name, const Clock& clock,
                     const RemovalOptions& options = {});

struct RemovalReport {
  std::vector<std::string> checkpoints;  // that went
  uint64_t left = 0;                     // checkpoints
  uint64_t parts = 0;                    // that went
  uint64_t answers = 0;                  // logs of answers that went
};
// kCorruption: a checkpoint's index cannot be read, so nobody knows what it names; nothing went then. kUnavailable.
Result<RemovalReport> remove_unnamed(ObjectStore& store, const Clock& clock, const RemovalOptions& options = {});

}  // namespace torpor::remote
