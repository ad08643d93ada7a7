// SPDX-License-Identifier: Apache-2.0
// Copies of checkpoints on another machine: push to an ObjectStore, pull into a directory of checkpoints.
//
// A checkpoint's files are cut into parts of 16 MiB, named by their BLAKE2b-256. So parts that the store has (linked
// files, unchanged weights) are sent once, and an interrupted copy is resumed. The index, which names the parts, is
// created last in one conditional write: a checkpoint is in the store whole or not at all. Nothing is overwritten.
// Every part that is read is compared with its name; then the checkpoint is verified by its own digests and seal.
//
// Threads: any; each call uses CopyOptions::threads threads. Failure: a failed push leaves parts without a name at
// most; a failed pull leaves the directory unchanged but for a staging directory, which the next pull resumes.
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
  int threads = 4;                 // each with memory for a part, and a connection
  std::shared_ptr<const Key> key;  // for sealed checkpoints
  ProgressSink progress;           // if it returns false, the copy ends with kAborted
  // pull(): called before anything but MANIFEST is fetched; an error ends the pull.
  std::function<Status(const Manifest&)> accept;
  const Clock* clock = &system_clock();           // push(): for its lease (remote/store_leases.h)
  std::chrono::seconds patience = kPushPatience;  // push(): how long to wait for a removal that is under way
};

struct CopyReport {
  std::string name;  // the checkpoint's name in the store
  std::string path;  // its local directory
  uint64_t bytes = 0;
  uint64_t moved_bytes = 0;  // the other bytes were there before
  bool was_there = false;    // the whole checkpoint was there before; push() asks for the sizes of its parts, pull()
                             // does not read the saved memory again
};

// Push a checkpoint; of one that the store has, the parts that are gone from there. kUnavailable: a removal is under
// way. kAborted: the lease or the user ended the push.
Result<CopyReport> push(FileSystem& file_system, const Checkpoint& checkpoint, ObjectStore& store,
                        const CopyOptions& options = {});

// Pull a checkpoint as the newest generation of `directory`, which is created if needed. `name`: from list_pushed();
// empty: the newest. If the directory has the checkpoint already and no file of it is missing, cut or, but for the
// saved memory, damaged, nothing is pulled. kNotFound: no such checkpoint.
// kUnavailable: another process writes to `directory`.
Result<CopyReport> pull(FileSystem& file_system, ObjectStore& store, const std::string& name,
                        const std::string& directory, const CopyOptions& options = {});

struct PushedCheckpoint {
  std::string name;
  bool readable = false;
  CheckpointIndex index;  // if readable
  Error problem;          // otherwise
};
Result<std::vector<PushedCheckpoint>> list_pushed(ObjectStore& store);  // oldest first

// Return the metadata that a user attached to a checkpoint in the store; empty if the index says that there is none.
// Reads MANIFEST and, if it names such a section, the bytes of that section; verifies both, and unseals them with
// `key`. Errors: those of the store, of decode_manifest() and of Checkpoint::read_metadata().
Result<Metadata> metadata_of(ObjectStore& store, const CheckpointIndex& index, const Key* key = nullptr);

}  // namespace torpor::remote
