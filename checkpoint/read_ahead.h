// SPDX-License-Identifier: Apache-2.0
// ReadAhead: reads the KV blocks of a directory's newest checkpoint into the system's page cache before they are
// needed.
//
// A process uses it to follow the checkpoints that another process writes, until it wakes from the newest of them. The
// wake then takes the bytes from memory (FileIo::kCached) and verifies them there, as ever. ReadAhead remembers which
// bytes it has read: if the next checkpoint links them, it reads only the new ones.
//
// Threads: one at a time; stop() from any. ReadAhead writes no file and takes no lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "base/file_system.h"
#include "base/seal.h"
#include "base/status.h"

namespace torpor {

struct ReadAheadReport {
  std::string checkpoint;    // path of the newest one
  uint64_t bytes = 0;        // of its blocks, as stored
  uint64_t ahead_bytes = 0;  // of those that were read, by this call or before
  uint64_t read_bytes = 0;   // by this call
};

class ReadAhead {
 public:
  // `budget`: most bytes of one checkpoint.
  ReadAhead(FileSystem& file_system, std::string directory, std::shared_ptr<const Key> key, uint64_t budget)
      : file_system_(file_system), directory_(std::move(directory)), key_(std::move(key)), budget_(budget) {}

  // Read the blocks of the newest checkpoint that no earlier call has read. kNotFound: there is none, or it was removed
  // meanwhile. kAborted: stop() was called; the next call begins this checkpoint anew. Other errors: those of
  // open_latest() and of files.
  Result<ReadAheadReport> follow();
  // Let a call of follow() under way, and all later ones, return before the next read.
  void stop() { stopped_ = true; }

 private:
  using Location = std::pair<SealId, uint64_t>;  // the checkpoint that wrote the file, and the offset there

  FileSystem& file_system_;
  const std::string directory_;
  const std::shared_ptr<const Key> key_;
  const uint64_t budget_;
  std::atomic<bool> stopped_ = false;
  SealId newest_{};
  ReadAheadReport last_;
  std::set<Location> ahead_;
};

}  // namespace torpor
