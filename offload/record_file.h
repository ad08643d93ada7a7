// SPDX-License-Identifier: Apache-2.0
// RecordFile: how records lie in a file: each begins on a page, encoded and sealed where that is wished, and zeros fill
// its last page. DiskTier and SegmentStore write their files so. The file has no index: whoever wrote a record keeps
// its FileRecord, or writes it somewhere.
//
// Threads: all methods from any, several at once for different records.
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

// A record: its bytes in memory, and where and in which form they lie in the file.
struct FileRecord {
  std::span<std::byte> bytes;  // not encoded
  std::string key{};           // what the seal knows it by; only where the file is sealed
  Codec codec = Codec::kNone;
  uint64_t offset = 0;  // in the file
  uint64_t stored = 0;  // bytes there
  SealTag seal{};       // of the stored bytes
  // The stored bytes in memory, up to a whole page: `bytes` themselves where they fit, else scratch memory.
  std::span<std::byte> pages{};
  Status status{};
};

// Return whether direct I/O goes from and to such memory as it is.
inline bool fits_pages(std::span<const std::byte> bytes) {
  return is_aligned(reinterpret_cast<uintptr_t>(bytes.data()), kPage) && is_aligned(bytes.size(), kPage);
}

// Return where a record of so many stored bytes begins if what lies before it ends at `end`: on a page, or on a MiB if
// it has so many whole MiB. Reads that straddle these boundaries take twice the time on disks behind a hypervisor.
uint64_t record_offset(uint64_t end, uint64_t stored);

Error no_memory_for(uint64_t bytes);

class RecordFile {
 public:
  // `seal`: null where the file is not sealed; it outlives this. `rank`: the seal binds it.
  RecordFile(const Seal* seal, int32_t rank) : seal_(seal), rank_(rank) {}

  bool sealed() const { return seal_ != nullptr; }
  // Return how much scratch memory encode() takes of these bytes at most.
  uint64_t scratch_to_encode(std::span<const std::byte> bytes, const CompressionOptions& compression) const;
  // Fill `codec`, `stored` and `pages` of a record that has its `bytes`. Takes memory from the front of `scratch`.
  void encode(FileRecord& record, std::span<std::byte>& scratch, const CompressionOptions& compression) const;
  // Seal the encoded record, which has its `key` and `offset`. Changes nothing where the file is not sealed.
  void seal(FileRecord& record) const;

  // Return how much scratch memory read() takes of such a record.
  static uint64_t scratch_to_read(const FileRecord& record);
  // Read the records into their `bytes`: open the seal, decode; what they are is not verified. `scratch` has room for
  // them all. Records whose status is an error are left out.
  void read(const File& file, std::span<FileRecord> records, std::span<std::byte>& scratch) const;

 private:
  bool encrypts() const { return seal_ != nullptr && seal_->protection() == Protection::kEncrypted; }
  Status decode(const FileRecord& record) const;

  const Seal* seal_;
  int32_t rank_;
};

}  // namespace torpor
