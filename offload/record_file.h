// SPDX-License-Identifier: Apache-2.0
// RecordFile: the layout of records in a file. Each record begins on a page, is encoded and sealed if the options say
// so, and zeros fill its last page. DiskTier and SegmentStore write such files. The file has no index: the writer keeps
// each FileRecord, or stores it elsewhere.
//
// Threads: all methods from any thread, several at once for different records.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/file_system.h"
#include "base/seal.h"
#include "base/status.h"
#include "base/units.h"
#include "offload/codec.h"

namespace torpor {

// A record: its bytes in memory, and its position and form in the file.
struct FileRecord {
  std::span<std::byte> bytes;  // not encoded
  std::string key{};           // the name that the seal binds; only if the file is sealed
  Codec codec = Codec::kNone;
  uint64_t offset = 0;  // in the file
  uint64_t stored = 0;  // bytes in the file
  SealTag seal{};       // over the stored bytes
  // The stored bytes in memory, up to a whole page: `bytes` themselves if they are aligned, else scratch memory.
  std::span<std::byte> pages{};
  Status status{};
};

// Return whether direct I/O can use this memory: its address and size are multiples of the page size.
inline bool fits_pages(std::span<const std::byte> bytes) {
  return is_aligned(reinterpret_cast<uintptr_t>(bytes.data()), kPage) && is_aligned(bytes.size(), kPage);
}

// Return the offset of a record of `stored` bytes if the bytes before it end at `end`: a multiple of the page size, or
// of a MiB if `stored` is so many whole MiB. Reads that straddle these boundaries take twice the time on disks behind a
// hypervisor.
uint64_t record_offset(uint64_t end, uint64_t stored);

Error no_memory_for(uint64_t bytes);

class RecordFile {
 public:
  // `seal` outlives this object; null: the file is not sealed. `rank` is bound by the seal.
  RecordFile(const Seal* seal, int32_t rank) : seal_(seal), rank_(rank) {}

  bool sealed() const { return seal_ != nullptr; }
  // Return the most scratch memory, in bytes, that encode() needs for these bytes.
  uint64_t scratch_to_encode(std::span<const std::byte> bytes, const CompressionOptions& compression) const;
  // Set `codec`, `stored` and `pages` from the record's `bytes`. Takes memory from the front of `scratch`.
  void encode(FileRecord& record, std::span<std::byte>& scratch, const CompressionOptions& compression) const;
  // Seal the encoded record, whose `key` and `offset` are set. Does nothing if the file is not sealed.
  void seal(FileRecord& record) const;

  // Return the scratch memory, in bytes, that read() needs for the record.
  static uint64_t scratch_to_read(const FileRecord& record);
  // Read the records into their `bytes`, open the seal, and decode. The bytes are not verified against a digest.
  // `scratch` has space for all records. Skips records whose status is an error.
  void read(const File& file, std::span<FileRecord> records, std::span<std::byte>& scratch) const;

 private:
  bool encrypts() const { return seal_ != nullptr && seal_->protection() == Protection::kEncrypted; }
  Status decode(const FileRecord& record) const;

  const Seal* seal_;
  int32_t rank_;
};

}  // namespace torpor
