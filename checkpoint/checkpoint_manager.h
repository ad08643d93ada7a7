// SPDX-License-Identifier: Apache-2.0
// CheckpointManager: a directory of checkpoints, each written once, committed atomically, verified before it is
// believed.
//
// DIRECTORY/g-000001/{MANIFEST, STATE, refs-r0, chunks-r0, …}; checkpoint/FORMAT.md has the bytes. A checkpoint under
// construction is DIRECTORY/s-…; commit syncs files and directories and renames it into place. A kill or power cut at
// any point leaves the old generations and the new one either whole or invisible; leftovers go at the next begin() or
// collect().
//
// Owner: the engine's controller (one writer, held by a lock file, Directory::lock()); readers need no lock.
// Threads: one at a time. Errors: also kResourceExhausted wherever memory ends; nothing is changed then.
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
  bool encrypt = false;                                   // with a key: encrypted, not only authenticated
  CompressionOptions compression{.codec = Codec::kNone};  // of chunks; sections are always compressed where it pays
  bool incremental = false;      // chunks that the newest checkpoint already has are linked, not written
  ProgressSink progress;         // of what this process writes; saying no ends it with kAborted, the old ones whole
  const Clock* clock = nullptr;  // null: the system's
  Status validate() const;       // kInvalidArgument names what is wrong
};

// A checkpoint under construction. Destroyed without commit(): removed, the space is given back.
class PendingCheckpoint {
 public:
  uint64_t generation() const;
  // Writes STATE and syncs it: durable before a device byte is touched. Once.
  Status write_state(const EngineCheckpoint& checkpoint);
  // The same of any sections.
  Status write_state(const Fingerprint& fingerprint, std::vector<Section> sections);
  // For ranks in other processes: the directory that their RankWriters write into, and how.
  const std::string& staging_path() const;
  const RankWriting& writing() const;
  // The same for a rank of this process.
  Result<std::unique_ptr<RankWriter>> create_rank(int32_t rank, uint64_t expected_bytes = 0);
  // Whether ranks of other processes, perhaps on other hosts, write into it and not into a directory of their own at
  // the same path; else kFailedPrecondition, which names the rank. First before they save: takes away what each rank
  // put there by write_test_file(); `hosts`: of rank 0, 1 …. Then of as many ranks that have begun to write.
  Status check_test_files(const std::vector<std::string>& hosts);
  Status see_chunks(size_t ranks) const;
  void add_rank(RankSummary rank);  // what its write_refs() returned
  // In place of write_state()'s, before commit(): what is known only once the chunks are written.
  void set_fingerprint(Fingerprint fingerprint);
  // Before commit(), of an engine that went on from a checkpoint; else it is owner_of() the fingerprint.
  void set_owner(const Digest& owner);
  // Checks that each file is there with the named length, writes and syncs MANIFEST, syncs the directories,
  // renames. Only after this returns without error is the checkpoint durable. Returns its path. Older ones stay.
  Result<std::string> commit();
  // Takes a committed checkpoint away again, while nobody else can have relied on it: this object holds the lock of its
  // directory. Nothing happens without commit(). After an error it may still be there.
  Status withdraw();
  // Removes what the retention lets go of the same owner, now that the committed checkpoint stays: not before
  // withdraw() is out of the question. A failure is only logged, the next one tries again.
  void retire_older() noexcept;

  // For CheckpointManager::begin(): `store` is locked by `lock`.
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

// How the ranks write the next checkpoint of a directory that has these, but for its id. Its base: the newest one, if
// it can be built on; none is no failure, all is written then.
RankWriting writing_of(const Directory& store, const std::vector<uint64_t>& generations,
                       const CheckpointManagerOptions& options);

class CheckpointManager {
 public:
  // Makes the directory if need be, at begin(). Does not lock yet. kInvalidArgument: options.validate().
  static Result<std::unique_ptr<CheckpointManager>> open(FileSystem& file_system, std::string directory,
                                                         CheckpointManagerOptions options = {});
  ~CheckpointManager();

  // Locks, removes leftovers, checks that `expected_bytes` fit (kResourceExhausted names both numbers), unless it may
  // be incremental: then far less may be needed.
  // kUnavailable when another process is writing here.
  Result<PendingCheckpoint> begin(uint64_t expected_bytes);
  // How the ranks would write now, but for the id. Changes nothing.
  RankWriting next_writing() const;
  // Removes one. kNotFound. `dry_run`: only says whether it could.
  Status remove(uint64_t generation, bool dry_run = false);
  // After a wake from `generation`: marks it, then retires older ones of its owner.
  Status woken_from(uint64_t generation);
  // Removes leftovers and what the retention lets go of each owner; returns the names. `dry_run`: only says what would
  // go, and writes nothing, not even the lock.
  Result<std::vector<std::string>> collect(bool dry_run = false);
  Result<std::vector<CheckpointInfo>> list() const;  // oldest first
  Result<Checkpoint> open_latest() const;            // kNotFound if there is none; a damaged newest one is kCorruption
  Result<Checkpoint> open_generation(uint64_t generation) const;

 private:
  struct Impl;
  explicit CheckpointManager(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace torpor
