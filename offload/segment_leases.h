// SPDX-License-Identifier: Apache-2.0
// SegmentLeases: keeps segments for checkpoints beyond their store: it makes hard links to them. If the file system
// refuses links, it copies the records, and logs that once.
//
// Owner: SegmentStore. Threads: any. Failure: errors are values; a lease that fails may leave a file behind, which the
// next one for this directory finds.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>

#include "base/file_system.h"
#include "base/mutex.h"
#include "base/seal.h"
#include "base/status.h"
#include "offload/scratch.h"
#include "offload/segment_directory.h"
#include "offload/segment_format.h"

namespace torpor {

class SegmentLeases {
 public:
  using Opener = std::function<Result<std::shared_ptr<File>>()>;  // returns the segment's file

  // `directory` has the segments. It, `scratch` and `key`, which may be null, outlive this object.
  SegmentLeases(SegmentDirectory& directory, ScratchPool& scratch, const Key* key, FileIo io)
      : directory_(directory), scratch_(scratch), key_(key), io_(io) {}

  // Make a segment's records appear in `into`, under leased_name(). A link has all records of the segment; a copy has
  // these, at the same offsets.
  Status keep(const SegmentHeader& segment, std::span<const SegmentRecord> records, Directory& into,
              const Opener& open);
  uint64_t copied_bytes() const;  // as stored

 private:
  Status copy(const File& from, std::span<const SegmentRecord> records, Directory& into, const std::string& name);

  SegmentDirectory& directory_;
  ScratchPool& scratch_;
  const Key* const key_;
  const FileIo io_;
  mutable Mutex mutex_;                                     // not held during calls of the file system
  std::set<std::string> copies_ TORPOR_GUARDED_BY(mutex_);  // files that are not links
  uint64_t copied_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
