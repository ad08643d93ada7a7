// SPDX-License-Identifier: Apache-2.0
// RankWriter: writes one rank's part of a checkpoint under construction: its chunk file, hard links to files of the
// base checkpoint, and last its refs.
//
// The base is the newest committed checkpoint of the same directory. A record of the base is taken over without writing
// its bytes, in one of two ways:
//   put()        the chunk has the bytes of the base's record (key, size and digest are equal)
//   take_over()  the caller knows that the chunk has not changed; nothing of it is read
// The record's file is then linked, with everything in it. So records of files that are mostly unused must be put
// again: sparse() returns them. Only the manifest and the refs of the base are read.
//
// Owner: the saver of the rank. Threads: several threads at once may call put(); any other call must run alone.
// Failure: after an error the checkpoint under construction is void and the base is unchanged. If the base cannot be
// read, everything is written, and the log says so.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_system.h"
#include "base/progress.h"
#include "checkpoint/rank_base.h"
#include "offload/disk_tier.h"

namespace torpor {

// Write an empty file into `staging`, the directory of a checkpoint under construction, to show that this rank sees the
// directory. Each rank does so before any rank saves; PendingCheckpoint::check_test_files() looks for the files.
// kFailedPrecondition: this rank does not see the directory; the error names its host.
Status write_test_file(FileSystem& file_system, const std::string& staging, int32_t rank);
std::string test_file_name(int32_t rank);  // "write-test-r0"

class RankWriter final : public RecordStore {
 public:
  // Make a writer in the directory `staging`. It links the base's files now; write_refs() removes the links that are
  // not needed. kInvalidArgument: `writing` is sealed and there is no key. kFailedPrecondition: as write_test_file().
  static Result<std::unique_ptr<RankWriter>> create(FileSystem& file_system, const std::string& staging,
                                                    const RankWriting& writing, int32_t rank,
                                                    std::shared_ptr<const Key> key,
                                                    std::shared_ptr<ProgressMeter> progress = nullptr);
  ~RankWriter() override;

  // Return the base's record of this chunk if its file is linked with the right length; null: there is none.
  const SavedChunk* base_record(const ChunkKey& key) const;
  // Take over the base's record of a chunk, for write_refs(). The caller guarantees that the chunk has not changed;
  // this call does not check it. kNotFound: there is no base_record().
  Result<SavedChunk> take_over(const ChunkKey& key);
  // Return the indices of those of `records` (all records of the rank) that must be put again before write_refs(),
  // because their files hold too many unneeded bytes, or are too many. From now on these files have no base_record().
  std::vector<size_t> sparse(const std::vector<SavedChunk>& records);

  const StoreTraits& traits() const override { return own_->traits(); }
  Status prepare(uint64_t bytes, uint64_t chunks) override;
  void put(std::span<RecordPart> parts) override;  // write_refs() makes it durable, finish() does nothing

  // Finish: sync the files, then write and sync the refs. `records`: all records of the rank, put or taken over;
  // afterwards they are as in the refs. The result belongs into the manifest.
  Result<RankSummary> write_refs(std::vector<SavedChunk>& records);

 private:
  struct Base;
  RankWriter(std::unique_ptr<Directory> staging, const RankWriting& writing, int32_t rank,
             std::shared_ptr<ProgressMeter> progress);
  void link_base(FileSystem& file_system);
  Status drop_unused_links(const std::vector<SavedChunk>& records);
  RankRefs refs_of(std::vector<SavedChunk>& records) const;

  const std::unique_ptr<Directory> staging_;
  const RankWriting writing_;
  const int32_t rank_;
  const std::shared_ptr<ProgressMeter> progress_;
  std::shared_ptr<const Seal> seal_;
  std::unique_ptr<DiskTier> own_;
  std::unique_ptr<Base> base_;  // null: none
};

}  // namespace torpor
