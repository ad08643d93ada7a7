// SPDX-License-Identifier: Apache-2.0
// EngineCheckpoints: the directory where an engine writes its checkpoints, whose they are, and which of them it went on
// from.
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
  Result<std::unique_ptr<CheckpointManager>> open(const std::string& directory) const;
  // Return which generation a checkpoint at this path is there: one that was copied may have another number than where
  // it was made. None: the path is not in a directory of checkpoints.
  static std::optional<Generation> generation_at(const std::string& path);

  // Name the owner in a checkpoint. Precondition: the fingerprint is whole.
  void name_owner(PendingCheckpoint& checkpoint, const Fingerprint& fingerprint);
  // Take over the owner of the checkpoint that the engine went on from.
  void set_owner(const Digest& owner) { owner_ = owner; }
  // Commit a checkpoint, and say in the report where it is and how large. After an error it may be there. Any thread.
  Status commit(PendingCheckpoint& checkpoint, SleepReport& report) const;
  // Mark the checkpoint that a running engine came from; others of its owner may go now. A failure is logged.
  void mark_woken(const Generation& from) noexcept;

  // Return kFailedPrecondition, with the rank and its host, unless all ranks see this directory.
  Status check_seen_by_all(PendingCheckpoint& checkpoint) const;
  // The same of a directory of checkpoints, tried with an empty one that is removed again. One rank is not asked.
  Status check_seen_by_all(const std::string& directory, size_t ranks) const;

 private:
  const EngineParts& engine_;
  std::optional<Digest> owner_;  // none: this engine has neither written a checkpoint nor gone on from one
};

}  // namespace torpor
