// SPDX-License-Identifier: Apache-2.0
// Checkpoints on another machine: pushed to an ObjectStore, and pulled from it into a directory of checkpoints.
//
// A checkpoint's files are cut into parts of 16 MiB that are named by their BLAKE2b-256, so that what the store has
// already (linked files, weights that did not change) goes there once, and an interrupted copy goes on where it was.
// The index that names them is created last, in one conditional write: a checkpoint is there whole or not at all, and
// nothing is ever overwritten. What comes back is compared with its name, and then with its own digests and seal.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/file_system.h"
#include "base/progress.h"
#include "base/seal.h"
#include "checkpoint/checkpoint.h"
#include "remote/checkpoint_index.h"
#include "remote/object_store.h"
#include "remote/store_leases.h"

namespace torpor::remote {

struct CopyOptions {
  int threads = 4;                 // each with a part in memory, and a connection
  std::shared_ptr<const Key> key;  // of sealed checkpoints
  ProgressSink progress;           // saying no ends it with kAborted
  // pull(): asked before anything but MANIFEST is fetched; an error ends it.
  std::function<Status(const Manifest&)> accept;
  const Clock* clock = &system_clock();           // push(): of its lease (remote/store_leases.h)
  std::chrono::seconds patience = kPushPatience;  // push(): with a removal that is under way
};

struct CopyReport {
  std::string name;  // of the checkpoint in the store
  std::string path;  // of its directory here
  uint64_t bytes = 0;
  uint64_t moved_bytes = 0;  // the others were there already
  bool was_there = false;    // the whole checkpoint
};

// kUnavailable: a removal is under way.
Result<CopyReport> push(FileSystem& file_system, const Checkpoint& checkpoint, ObjectStore& store,
                        const CopyOptions& options = {});

// `name`: one that list() named; empty: the newest one. Becomes the newest generation of `directory`, which is made if
// need be; a checkpoint that is there already is left as it is. kNotFound; kUnavailable: somebody writes to
// `directory`.
Result<CopyReport> pull(FileSystem& file_system, ObjectStore& store, const std::string& name,
                        const std::string& directory, const CopyOptions& options = {});

struct PushedCheckpoint {
  std::string name;
  bool readable = false;
  CheckpointIndex index;  // if readable
  Error problem;          // otherwise
};
Result<std::vector<PushedCheckpoint>> list_pushed(ObjectStore& store);  // oldest first

// Return what a user attached to a checkpoint of the store. Reads MANIFEST and, if it names such a section, the bytes
// of that section; nothing if the index says that there is none. Both are verified, and unsealed with `key`. Errors:
// those of the store, of decode_manifest() and of Checkpoint::read_metadata().
Result<Metadata> metadata_of(ObjectStore& store, const CheckpointIndex& index, const Key* key = nullptr);

}  // namespace torpor::remote
