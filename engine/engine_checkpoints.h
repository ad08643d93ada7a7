// SPDX-License-Identifier: Apache-2.0
// EngineCheckpoints: the directory into which an engine writes its checkpoints, the owner of these checkpoints, and the
// checkpoint from which the engine was woken.
//
// Owner: the operation in progress. Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/checkpoint_manager.h"
#include "engine/engine_parts.h"

namespace torpor {

class EngineCheckpoints {
 public:
  struct Generation {
    std::string directory;
    uint64_t number = 0;
  };

  explicit EngineCheckpoints(const EngineParts& engine) : engine_(engine) {}

  // Return the directory of one of several data parallel engines.
  std::string directory_of(const DataParallel& place) const;
  // Open a directory of checkpoints with the engine's options and clock. Errors: those of CheckpointManager::open().
  Result<std::unique_ptr<CheckpointManager>> open(const std::string& directory) const;
  // Return the generation of the checkpoint at this path. A copied checkpoint may have another number than the
  // original. None: the path is not in a directory of checkpoints.
  static std::optional<Generation> generation_at(const std::string& path);

  // Write the owner into a checkpoint. Precondition: the fingerprint is complete.
  void name_owner(PendingCheckpoint& checkpoint, const Fingerprint& fingerprint);
  // Take over the owner of the checkpoint from which the engine was woken.
  void set_owner(const Digest& owner) { owner_ = owner; }
  // Commit a checkpoint, and write its path and size into the report. After an error it may be committed all the same.
  // Threads: any.
  Status commit(PendingCheckpoint& checkpoint, SleepReport& report) const;
  // Mark the checkpoint from which the running engine was woken, and delete others of its owner. A failure is logged.
  void mark_woken(const Generation& from) noexcept;

  // Return kFailedPrecondition, with the rank and its host, unless all ranks see this directory.
  Status check_seen_by_all(PendingCheckpoint& checkpoint) const;
  // The same for a directory of checkpoints; it writes an empty checkpoint and removes it again. With one rank nothing
  // is tried.
  Status check_seen_by_all(const std::string& directory, size_t ranks) const;

 private:
  const EngineParts& engine_;
  std::optional<Digest> owner_;  // none: this engine has neither written a checkpoint nor woken from one
};

}  // namespace torpor
