// SPDX-License-Identifier: Apache-2.0
// A set: the checkpoints of several engines that belong together, one each, as of data parallel ranks behind one front
// end. Either all of them wake, or none.
//
// Each engine writes into its own directory, DIRECTORY/rank-0-of-2/. When all have committed, the set is written into
// DIRECTORY: a checkpoint without memory, with one section that names the members by path and id. Because it comes
// last, members that a crash leaves incomplete have no set.
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

// Return the directory into which the engine of this rank writes its checkpoints.
std::string rank_directory(const std::string& directory, int rank, int ranks);

struct CommittedSet {
  PendingCheckpoint pending;  // to withdraw it, or to retire older ones
  std::string path;
};
// Write the set. `paths`: a committed checkpoint of each rank, in its rank_directory(). kInvalidArgument: one lies
// elsewhere.
Result<CommittedSet> commit_set(FileSystem& file_system, const std::string& directory, CheckpointManagerOptions options,
                                const std::vector<std::string>& paths);

bool is_set(const Manifest& manifest);  // a set has no state of its own; its members lie beside it

struct CheckpointSet {
  std::string path;
  std::string directory;
  uint64_t generation = 0;           // of its name
  std::vector<std::string> members;  // paths, by rank
};
// Open a set. `path`: of the set, or of a directory whose newest checkpoint is one. kNotFound: a member is missing;
// kIncompatible: a member is not the checkpoint that was written with the others. The error names the rank.
Result<CheckpointSet> open_set(FileSystem& file_system, const std::string& path,
                               std::shared_ptr<const Key> key = nullptr);

// Open the checkpoint of one engine like open_checkpoint(); if `path` is a set, open that of `rank`. kIncompatible: the
// set has none.
Result<Checkpoint> open_checkpoint_of(FileSystem& file_system, const std::string& path, int rank,
                                      std::shared_ptr<const Key> key = nullptr);

}  // namespace torpor
