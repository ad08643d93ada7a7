// SPDX-License-Identifier: Apache-2.0
// CheckpointManager: a directory of checkpoints. Each is written once, committed atomically, and verified before it is
// used.
//
// DIRECTORY/g-000001/{MANIFEST, STATE, refs-r0, chunks-r0, …}; checkpoint/FORMAT.md has the bytes. A checkpoint under
// construction is DIRECTORY/s-…; commit() syncs files and directories and renames it into place. After a kill or a
// power cut at any point the old generations are intact and the new one is either whole or invisible. The next begin()
// or collect() removes leftovers.
//
// Owner: the engine's controller. There is one writer, which holds a lock file (Directory::lock()); readers need no
// lock. Threads: one at a time. Errors: every call may fail with kResourceExhausted for lack of memory, and has changed
// nothing then.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file_system.h"
#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/engine_checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/pending_checkpoint.h"
#include "checkpoint/rank_writer.h"
#include "checkpoint/retention.h"

namespace torpor {

class CheckpointManager {
 public:
  // Make a manager. begin() makes the directory if it is missing. Takes no lock yet. kInvalidArgument:
  // options.validate().
  static Result<std::unique_ptr<CheckpointManager>> open(FileSystem& file_system, std::string directory,
                                                         CheckpointManagerOptions options = {});
  ~CheckpointManager();

  // Take the lock, remove leftovers, and check that `expected_bytes` fit; an incremental checkpoint skips this check,
  // because it may need far less. kResourceExhausted: they do not fit; the error has both numbers. kUnavailable:
  // another process writes here.
  Result<PendingCheckpoint> begin(uint64_t expected_bytes);
  // Return how the ranks would write now; the id is not set. Changes nothing.
  RankWriting next_writing() const;
  // Remove one checkpoint. kNotFound. `dry_run`: only check whether it exists.
  Status remove(uint64_t generation, bool dry_run = false);
  // Mark `generation` as woken from, then retire older checkpoints of its owner. kUnavailable: another process holds
  // the lock; the mark is there, and nothing was retired. Errors say whether the mark is missing or older ones were
  // kept.
  Status woken_from(uint64_t generation);
  // Remove leftovers and the checkpoints of each owner that the retention no longer keeps. Return their names.
  // `dry_run`: only return the names; write nothing, not even the lock.
  Result<std::vector<std::string>> collect(bool dry_run = false);
  Result<std::vector<CheckpointInfo>> list() const;  // oldest first
  Result<Checkpoint> open_latest() const;            // kNotFound: there is none; kCorruption: the newest is damaged
  Result<Checkpoint> open_generation(uint64_t generation) const;

 private:
  struct Impl;
  explicit CheckpointManager(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace torpor
