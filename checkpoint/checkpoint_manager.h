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

#include "base/clock.h"
#include "base/file_system.h"
#include "base/progress.h"
#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/engine_checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/rank_writer.h"
#include "checkpoint/retention.h"

namespace torpor {

struct CheckpointManagerOptions {
  Retention retention;
  std::shared_ptr<const Key> key;                         // null: neither authenticated nor encrypted
  bool encrypt = false;                                   // with a key: encrypt, not only authenticate
  CompressionOptions compression{.codec = Codec::kNone};  // of chunks; sections are always compressed if it saves space
  bool incremental = false;      // link chunks that the newest checkpoint already has, instead of writing them
  ProgressSink progress;         // of this process's writes; false ends it with kAborted, older checkpoints stay intact
  const Clock* clock = nullptr;  // null: the system's
  Status validate() const;       // kInvalidArgument: the error names what is wrong
};

// A checkpoint under construction. The destructor removes it unless commit() succeeded.
class PendingCheckpoint {
 public:
  uint64_t generation() const;
  // Write STATE and sync it: it is durable before a byte of device memory is touched. Call it once.
  Status write_state(const EngineCheckpoint& checkpoint);
  // Write STATE with any sections.
  Status write_state(const Fingerprint& fingerprint, std::vector<Section> sections);
  // For ranks in other processes: the directory into which their RankWriters write, and how they write.
  const std::string& staging_path() const;
  const RankWriting& writing() const;
  // Make the RankWriter of a rank of this process.
  Result<std::unique_ptr<RankWriter>> create_rank(int32_t rank, uint64_t expected_bytes = 0);
  // Check that ranks of other processes, perhaps on other hosts, write into this directory and not into another one at
  // the same path. kFailedPrecondition: the error names the rank that does not. check_test_files(): call it before any
  // rank saves; it removes the file that each rank wrote with write_test_file(). `hosts`: of rank 0, 1, ….
  // see_chunks(): call it after `ranks` ranks have begun to write.
  Status check_test_files(const std::vector<std::string>& hosts);
  Status see_chunks(size_t ranks) const;
  void add_rank(RankSummary rank);  // the result of its write_refs()
  // Replace the fingerprint of write_state(), before commit(): parts of it are known only after the chunks are written.
  void set_fingerprint(Fingerprint fingerprint);
  // Set the owner, before commit(), for an engine that woke from a checkpoint. Default: owner_of() the fingerprint.
  void set_owner(const Digest& owner);
  // Check that each file exists with the recorded length, write and sync MANIFEST, sync the directories, rename. Return
  // the path. The checkpoint is durable only after this returns without error. Older ones stay.
  Result<std::string> commit();
  // Remove the committed checkpoint again, while no other process can rely on it: this object holds the lock of the
  // directory. Does nothing without commit(). After an error the checkpoint may still be there.
  Status withdraw();
  // Lock the committed checkpoint for an engine that sleeps on it: until the result is destroyed, or this process ends,
  // nobody removes it.
  Result<std::unique_ptr<File>> hold_asleep();
  // Remove the checkpoints of this owner that the retention no longer keeps. Call it only when withdraw() can no longer
  // be needed. A failure is only logged; the next call tries again.
  void retire_older() noexcept;

  // For CheckpointManager::begin(): `lock` locks `store`.
  static Result<PendingCheckpoint> begin(FileSystem& file_system, std::unique_ptr<Directory> store,
                                         std::unique_ptr<File> lock, CheckpointManagerOptions options,
                                         uint64_t expected_bytes);

  struct Impl;
  explicit PendingCheckpoint(std::unique_ptr<Impl> impl);
  PendingCheckpoint(PendingCheckpoint&&) noexcept;
  PendingCheckpoint& operator=(PendingCheckpoint&&) noexcept;
  ~PendingCheckpoint();

 private:
  std::unique_ptr<Impl> impl_;
};

// Return how the ranks write the next checkpoint of a directory with these generations; the id is not set. The base is
// the newest checkpoint if it can serve as one. Without a base, which is no failure, all chunks are written.
RankWriting writing_of(const Directory& store, const std::vector<uint64_t>& generations,
                       const CheckpointManagerOptions& options);

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
