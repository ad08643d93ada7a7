// SPDX-License-Identifier: Apache-2.0
// RankWriter: what one rank writes of a checkpoint under construction: its chunk file, hard links to files of the base
// checkpoint, and last of all its refs.
//
// The base is the newest committed checkpoint of the same directory. A record of it is taken over, without its bytes
// being written, in one of two ways:
//   put()        a chunk that has the bytes of the base's record (key, size and digest are equal)
//   take_over()  a chunk of which the caller knows that it has not changed: nothing of it is read at all
// Its file is then linked, and holds all that it holds; so records of files that are mostly unused are put again:
// sparse() says which. Nothing of the base is ever read but its manifest and refs.
//
// Owner: who saves the rank. Threads: put() from several at once; all else from one at a time, and no put() meanwhile.
// Failure: after an error the checkpoint under construction is void, the base is as it was. A base that cannot be read
// is none: everything is written then, which the log says.
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
  // In the directory `staging`; the base's files are linked now, those that are not needed go in write_refs().
  // kInvalidArgument: `writing` is sealed and there is no key. kFailedPrecondition: as write_test_file().
  static Result<std::unique_ptr<RankWriter>> create(FileSystem& file_system, const std::string& staging,
                                                    const RankWriting& writing, int32_t rank,
                                                    std::shared_ptr<const Key> key,
                                                    std::shared_ptr<ProgressMeter> progress = nullptr);
  ~RankWriter() override;

  // What the base has of this chunk, in a file that could be linked and has its length; null: nothing.
  const SavedChunk* base_record(const ChunkKey& key) const;
  // The record for write_refs() of a chunk that is as base_record() says: nobody looks whether it is. kNotFound: there
  // is no base_record().
  Result<SavedChunk> take_over(const ChunkKey& key);
  // Of `records`, all that the rank has, those that are to be put again before write_refs(): the files that have them
  // hold too much that nobody needs any more, or are too many. From now on these files have no base_record().
  std::vector<size_t> sparse(const std::vector<SavedChunk>& records);

  const StoreTraits& traits() const override { return own_->traits(); }
  Status prepare(uint64_t bytes, uint64_t chunks) override;
  void put(std::span<RecordPart> parts) override;  // write_refs() makes it safe, finish() does nothing

  // Ends the writing: syncs the files, then writes and syncs the refs. `records`: all that the rank has, put or taken
  // over; they are as the refs have them then. What it returns belongs into the manifest.
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
