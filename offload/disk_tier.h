// SPDX-License-Identifier: Apache-2.0
// DiskTier: chunks in a rank's chunk file: a header page, then the chunks, each at a multiple of 4096 bytes, compressed
// and sealed if the options say so. The file has no index: the caller keeps each chunk's SavedChunk (a checkpoint: in
// its manifest) and needs it to read the chunk back. checkpoint/FORMAT.md describes the bytes.
//
// Threads: as RecordStore. Each thread that calls uses memory for one batch of stored bytes.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/file_system.h"
#include "base/progress.h"
#include "offload/codec.h"
#include "offload/record_file.h"
#include "offload/record_store.h"
#include "offload/scratch.h"

namespace torpor {

struct ChunkFileOptions {
  int32_t rank = 0;
  CompressionOptions compression{.codec = Codec::kNone};
  std::shared_ptr<const Seal> seal;         // null: neither authenticated nor encrypted
  std::shared_ptr<ProgressMeter> progress;  // may be null; after a cancel, put() and get() fail with kAborted
  FileIo io = FileIo::kFastest;
  // After finish() what was written survives a power cut. If false, the file ends with this process, and finish()
  // only reports writes that were lost.
  bool durable = true;
};

// An existing chunk file and its seal.
struct OpenChunkFile {
  std::unique_ptr<File> file;
  std::shared_ptr<const Seal> seal;  // null: the file is not sealed
};

class DiskTier final : public RecordStore {
 public:
  // Create a file in `directory`, for writing, and for reading back the chunks that were written.
  static Result<std::unique_ptr<DiskTier>> create(Directory& directory, std::string_view name,
                                                  ChunkFileOptions options);
  // Open existing chunk files of one rank for reading; SavedChunk::file is an index into `files`. kCorruption if a
  // header is not that of a chunk file; kIncompatible if it has another version or rank.
  static Result<std::unique_ptr<DiskTier>> open(std::vector<OpenChunkFile> files, int32_t rank,
                                                std::shared_ptr<ProgressMeter> progress = nullptr);

  const StoreTraits& traits() const override { return traits_; }
  Status prepare(uint64_t bytes, uint64_t chunks) override;
  void put(std::span<RecordPart> parts) override;
  void get(std::span<RecordPart> parts) override;
  Status finish() override;

  uint64_t file_bytes() const { return end_; }  // size of the created file; exact after finish()

 private:
  struct Source {
    OpenChunkFile opened;
    uint64_t bytes = 0;
  };
  explicit DiskTier(ChunkFileOptions options);
  RecordFile records_of(size_t file) const { return {sources_[file].opened.seal.get(), options_.rank}; }
  Status check(const SavedChunk& chunk, uint64_t bytes) const;
  Status count(uint64_t bytes);
  uint64_t take_place(uint64_t padded_bytes);

  const StoreTraits traits_;
  ChunkFileOptions options_;
  std::vector<Source> sources_;
  std::atomic<uint64_t> end_ = 0;  // offset of the next chunk
  ScratchPool scratch_;
};

}  // namespace torpor
