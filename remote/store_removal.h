// SPDX-License-Identifier: Apache-2.0
// Removes from an ObjectStore: checkpoints, and objects that no checkpoint names. The owner's newest checkpoint
// (remote/ownership.h) stays unless `force` is set. No push runs meanwhile (remote/store_leases.h).
//
// An index is removed before its parts: a removal that is interrupted leaves whole checkpoints, and parts for the next
// removal. A concurrent pull of a removed checkpoint fails.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "remote/object_store.h"

namespace torpor::remote {

struct RemovalOptions {
  bool force = false;    // also the owner's newest checkpoint
  bool dry_run = false;  // remove nothing; only report
  int keep = 0;          // remove_unnamed(): keep so many of the newest checkpoints; 0: all
};

// Remove a checkpoint by its name in list_pushed(). Its parts stay. kNotFound: no such checkpoint. kFailedPrecondition:
// it is the owner's newest. kUnavailable: a push or another removal is under way.
Status remove_pushed(ObjectStore& store, const std::string& name, const Clock& clock,
                     const RemovalOptions& options = {});

struct RemovalReport {
  std::vector<std::string> checkpoints;  // removed
  uint64_t left = 0;                     // checkpoints that stay
  uint64_t parts = 0;                    // removed, and files that killed writers left
  uint64_t answers = 0;                  // removed response logs
};
// Remove all parts and response logs that nothing names, and old checkpoints as `keep` says. kCorruption: an index
// cannot be read, so its parts are unknown; nothing is removed. kUnavailable: a push or another removal is under way.
// kTimeout: listing took longer than the lease.
Result<RemovalReport> remove_unnamed(ObjectStore& store, const Clock& clock, const RemovalOptions& options = {});

}  // namespace torpor::remote
