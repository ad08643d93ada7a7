// SPDX-License-Identifier: Apache-2.0
// The bytes of a segment file: its header page and its batch pages (offload/SEGMENTS.md). Pure functions. Everything
// read from a file is checked here before it is used.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "base/seal.h"
#include "base/status.h"
#include "base/units.h"
#include "offload/codec.h"
#include "offload/record_file.h"

namespace torpor {

inline constexpr size_t kBatchRecords = 40;  // most that one batch page describes
// A segment has at most 65,536 slots, so every slot up to this segment number fits a StoreSlot.
inline constexpr uint64_t kMostSegmentNumber = (uint64_t{1} << 47) - 1;

struct SegmentHeader {
  uint64_t number = 0;  // as in the file's name
  int32_t rank = 0;
  int32_t slots = 0;  // slots of each segment
  Digest space;       // digest of the namespace
  SealId id{};        // random
  Protection protection = Protection::kNone;
  KeyName key_name{};  // zero without a key
};

struct SegmentRecord {
  std::array<uint8_t, 32> hash{};
  uint32_t group = 0;
  uint32_t position = 0;  // slot = number * slots + position
  uint64_t offset = 0;    // in the file; a multiple of the page size
  uint64_t stored = 0;    // bytes in the file
  uint64_t bytes = 0;
  Digest digest;  // of the bytes before encoding
  Codec codec = Codec::kNone;
  SealTag seal{};  // over the stored bytes
};

std::string segment_name(uint64_t number);                      // "seg-000123"
Error segment_closed(uint64_t number);                          // the segment takes no more records
std::optional<uint64_t> segment_number(std::string_view name);  // no value: not the name of a segment
std::string leased_name(const SegmentHeader& header);  // name of a segment's link in a checkpoint: "seg-r0-000123"

// Return the first offset behind the record at which another record, or a batch page, may begin.
inline uint64_t record_end(const SegmentRecord& record) { return record.offset + align_up(record.stored, kPage); }

// Return the record as its segment's file stores it; the seal knows it by its hash and group. `bytes`: its memory, not
// encoded.
FileRecord file_record(const SegmentRecord& record, std::span<std::byte> bytes, const RecordFile& file);

// Fill `page` (4096 bytes) with the header. `seal`: made with the header's id; null without a key.
void write_header(std::span<std::byte> page, const SegmentHeader& header, const Seal* seal);
struct OpenedHeader {
  SegmentHeader header;
  std::shared_ptr<const Seal> seal;  // null: not protected
};
// Read and check a header page. kCorruption: it is not a whole header. kIncompatible: it has another version or byte
// order. kUnauthenticated: it was made with another key, or only one of header and caller has a key.
Result<OpenedHeader> read_header(std::span<const std::byte> page, const Key* key);

// Fill `page` as the batch page at `offset`, which describes `records`: at most kBatchRecords, stored behind it.
void write_batch(std::span<std::byte> page, const SegmentHeader& header, uint64_t offset,
                 std::span<const SegmentRecord> records, const Seal* seal);
// Return the records of the batch page at `offset`. Overwrites `page`. kCorruption if it is not a batch page of this
// segment and offset, or if its records do not follow it one after the other within the file.
Result<std::vector<SegmentRecord>> read_batch(std::span<std::byte> page, const SegmentHeader& header, uint64_t offset,
                                              uint64_t file_bytes, const Seal* seal);

}  // namespace torpor
