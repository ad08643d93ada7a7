// SPDX-License-Identifier: Apache-2.0
// The bytes of a segment file: its header page and its batch pages (offload/SEGMENTS.md). Pure functions: what comes
// from a file is checked here before anything is believed.
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
// Of 65,536 slots each, the most of a store: then every slot is a StoreSlot.
inline constexpr uint64_t kMostSegmentNumber = (uint64_t{1} << 47) - 1;

struct SegmentHeader {
  uint64_t number = 0;  // of the file's name
  int32_t rank = 0;
  int32_t slots = 0;  // a segment
  Digest space;       // of the namespace
  SealId id{};        // random
  Protection protection = Protection::kNone;
  KeyName key_name{};  // zero without a key
};

struct SegmentRecord {
  std::array<uint8_t, 32> hash{};
  uint32_t group = 0;
  uint32_t position = 0;  // slot = number * slots + position
  uint64_t offset = 0;    // in the file
  uint64_t stored = 0;
  uint64_t bytes = 0;
  Digest digest;  // of the bytes before encoding
  Codec codec = Codec::kNone;
  SealTag seal{};  // of the stored bytes
};

std::string segment_name(uint64_t number);                      // "seg-000123"
Error segment_closed(uint64_t number);                          // it takes no more records
std::optional<uint64_t> segment_number(std::string_view name);  // none: not the name of a segment
std::string leased_name(const SegmentHeader& header);           // of its link in a checkpoint: "seg-r0-000123"

// Behind a record: where the next one, or the next batch page, may begin.
inline uint64_t record_end(const SegmentRecord& record) { return record.offset + align_up(record.stored, kPage); }

// Return how a record lies in a segment's file; the seal knows it by its hash and group. `bytes`: its own, not encoded.
FileRecord file_record(const SegmentRecord& record, std::span<std::byte> bytes, const RecordFile& file);

// `page`: 4096 bytes. `seal`: null without a key; of the header's id otherwise.
void write_header(std::span<std::byte> page, const SegmentHeader& header, const Seal* seal);
struct OpenedHeader {
  SegmentHeader header;
  std::shared_ptr<const Seal> seal;  // null: not protected
};
// kCorruption: not a whole header. kIncompatible: of another version or byte order. kUnauthenticated: it was made with
// another key, with none where one is given, or the other way round.
Result<OpenedHeader> read_header(std::span<const std::byte> page, const Key* key);

// The page at `offset` that describes `records`, at most kBatchRecords, which lie behind it.
void write_batch(std::span<std::byte> page, const SegmentHeader& header, uint64_t offset,
                 std::span<const SegmentRecord> records, const Seal* seal);
// The records of the batch page at `offset`; `page` is used up. kCorruption: it is not one, of this segment and place,
// whose records lie one after the other behind it and within the file.
Result<std::vector<SegmentRecord>> read_batch(std::span<std::byte> page, const SegmentHeader& header, uint64_t offset,
                                              uint64_t file_bytes, const Seal* seal);

}  // namespace torpor
