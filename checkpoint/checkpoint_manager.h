// CheckpointManager: a directory of checkpoints, each written once, committed atomically, verified before it is believed.
//
// DIRECTORY/g-000001/{MANIFEST, STATE, chunks-r0, …}; docs/checkpoint-format.md has the bytes. A checkpoint under
// construction is DIRECTORY/s-…; commit syncs files and directories and renames it into place. A kill at any point leaves
// the old generations and the new one either whole or invisible; leftovers go at the next begin().
//
// Owner: the engine's controller (one writer, held by a lock file that dies with its process); readers need no lock.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_system.h"
#include "base/status.h"
#include "checkpoint/engine_checkpoint.h"
#include "checkpoint/manifest.h"

namespace torpor {

struct CheckpointInfo {  // a line of `torpor ls`
  std::string name;      // "g-000001"
  std::string path;
  bool readable = false;  // the manifest is whole
  Error problem;          // meaningful unless readable
  Manifest manifest;      // meaningful if readable
};

struct CheckpointManagerOptions {
  // Committed checkpoints to keep, the newest ones. The last one that was woken from is kept until its successor was.
  int keep = 2;
  const Clock* clock = nullptr;  // null: the system's
};

// A committed checkpoint, opened: its manifest's digest was right.
class Checkpoint {
 public:
  const std::string& path() const;
  const Manifest& manifest() const;
  // Reads and verifies the sections. kCorruption names the section.
  Result<EngineCheckpoint> read_state() const;
  // Reads every chunk of every rank and checks its digest; also decodes and validates the state. Returns all problems.
  Result<std::vector<Error>> verify() const;
  Result<std::unique_ptr<File>> open_chunks(const RankChunks& rank) const;

  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

 private:
  std::unique_ptr<Impl> impl_;
};

// A checkpoint under construction. Destroyed without commit(): removed, the space is given back.
class PendingCheckpoint {
 public:
  // Writes STATE and syncs it: durable before a device byte is touched. Once.
  Status write_state(const EngineCheckpoint& checkpoint);
  // The directory that ranks write their chunk files into (files must be synced by their writer).
  const std::string& staging_path() const;
  void add_rank(RankChunks chunks);
  // Checks that each named chunk file is there with the named length, writes and syncs MANIFEST, syncs the directories,
  // renames. Only after this returns without error is the checkpoint durable. Returns its path.
  Result<std::string> commit();

  struct Impl;
  explicit PendingCheckpoint(std::unique_ptr<Impl> impl);
  PendingCheckpoint(PendingCheckpoint&&) noexcept;
  PendingCheckpoint& operator=(PendingCheckpoint&&) noexcept;
  ~PendingCheckpoint();

 private:
  std::unique_ptr<Impl> impl_;
};

class CheckpointManager {
 public:
  // Makes the directory if need be. Does not lock yet.
  static Result<std::unique_ptr<CheckpointManager>> open(FileSystem& file_system, std::string directory,
                                                         CheckpointManagerOptions options = {});
  ~CheckpointManager();

  // Locks, removes leftovers, checks that `expected_bytes` fit (kResourceExhausted names both numbers).
  // kUnavailable when another process is writing here.
  Result<PendingCheckpoint> begin(uint64_t expected_bytes);
  // Takes back a checkpoint whose sleep failed after its commit.
  Status remove(uint64_t generation);
  // After a wake from `generation`, older ones beyond `keep` may go; before that none goes that is older than it.
  Status woken_from(uint64_t generation);
  Result<std::vector<CheckpointInfo>> list() const;  // oldest first
  Result<Checkpoint> open_latest() const;            // kNotFound if there is none; a damaged newest one is kCorruption

 private:
  struct Impl;
  explicit CheckpointManager(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Opens a checkpoint by its own path, or the latest one of a directory of checkpoints.
Result<Checkpoint> open_checkpoint(FileSystem& file_system, const std::string& path);

}  // namespace torpor
