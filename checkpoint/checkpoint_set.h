// SPDX-License-Identifier: Apache-2.0
// Checkpoints of several engines that belong together, one each: data parallel ranks behind one front end. All of them
// are woken, or none.
//
// Each engine writes into a directory of its own, DIRECTORY/rank-0-of-2/. When all have committed, DIRECTORY gets a
// checkpoint without memory, whose one section names theirs by place and id: the set. It is written last, so that what
// a crash leaves incomplete has no set.
//
// Threads: one at a time. Errors: those of CheckpointManager.
#pragma once

#include <string>
#include <vector>

#include "base/file_system.h"
#include "base/status.h"
#include "checkpoint/checkpoint_manager.h"

namespace torpor {

struct SetMember {
  std::string name;  // below the set's directory: "rank-0-of-2/g-000007"
  SealId id{};
  friend bool operator==(const SetMember&, const SetMember&) = default;
};

// Where the engine of this rank writes its checkpoints.
std::string rank_directory(const std::string& directory, int rank, int ranks);

struct CommittedSet {
  PendingCheckpoint pending;  // to withdraw it, or to retire older ones
  std::string path;
};
// `paths`: a committed checkpoint of each rank, in its rank_directory(). kInvalidArgument: it lies elsewhere.
Result<CommittedSet> commit_set(FileSystem& file_system, const std::string& directory, CheckpointManagerOptions options,
                                const std::vector<std::string>& paths);

bool is_set(const Manifest& manifest);  // a set has no state of its own; its members lie beside it

struct CheckpointSet {
  std::string path;
  std::string directory;
  uint64_t generation = 0;
  std::vector<std::string> members;  // paths, by rank
};
// `path`: of a set, or of a directory whose newest checkpoint is one. kNotFound, kIncompatible: a member is missing, or
// is another checkpoint than the one that was written with the others; the error names its rank.
Result<CheckpointSet> open_set(FileSystem& file_system, const std::string& path,
                               std::shared_ptr<const Key> key = nullptr);

// As open_checkpoint(), of one engine: of a set, the checkpoint of this rank. kIncompatible: the set has none.
Result<Checkpoint> open_checkpoint_of(FileSystem& file_system, const std::string& path, int rank,
                                      std::shared_ptr<const Key> key = nullptr);

}  // namespace torpor
