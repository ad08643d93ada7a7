// SPDX-License-Identifier: Apache-2.0
// PendingCheckpoint: a checkpoint under construction, from CheckpointManager::begin() to the rename that commits it.
//
// Owner: the sleep or checkpoint that writes it. It holds the lock of the directory. Threads: one at a time. Errors:
// every call may fail with kResourceExhausted for lack of memory, and has changed nothing then.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_system.h"
#include "base/progress.h"
#include "base/status.h"
#include "checkpoint/engine_checkpoint.h"
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

// The destructor removes the checkpoint unless commit() succeeded.
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
  // check_chunk_files(): call it after `ranks` ranks have begun to write.
  Status check_test_files(const std::vector<std::string>& hosts);
  Status check_chunk_files(size_t ranks) const;
  void add_rank(RankSummary rank);  // the result of its write_refs()
  // Replace the fingerprint of write_state(), before commit(): parts of it are known only after the chunks are written.
  void set_fingerprint(Fingerprint fingerprint);
  // Set the owner, before commit(), for an engine that woke from a checkpoint. Default: owner_of() the fingerprint.
  void set_owner(const Digest& owner);
  // Check that each file exists with the recorded length, write and sync MANIFEST, sync the directories, rename. Return
  // the path. The checkpoint is durable only after this returns without error. Older ones stay.
  Result<std::string> commit();
  // Remove the committed checkpoint again, while no other process can rely on it: this object holds the lock of the
  // directory. Does nothing without commit(). A failure is tried again once; after an error the checkpoint may still be
  // there.
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

}  // namespace torpor
