// SPDX-License-Identifier: Apache-2.0
#include "offload/segment.h"

namespace torpor {

// Reads batch pages until one does not match: that is the end of the segment, whatever follows.
Result<std::shared_ptr<Segment>> read_segment(const File& file, const SegmentHeader& wanted, const Key* key,
                                              std::span<std::byte> page) {
  TORPOR_ASSIGN_OR_RETURN(const uint64_t file_bytes, file.size());
  TORPOR_RETURN_IF_ERROR(file.pread(page, 0));
  TORPOR_ASSIGN_OR_RETURN(OpenedHeader opened, read_header(page, key));
  auto segment = std::make_shared<Segment>();
  segment->header = opened.header;
  segment->seal = std::move(opened.seal);
  segment->state = Segment::State::kEnded;
  segment->finished = true;
  segment->recovered = true;
  segment->reserved = file_bytes;
  const SegmentHeader& header = segment->header;
  const bool encrypted = header.protection == Protection::kEncrypted;
  if (header.space != wanted.space || header.number != wanted.number || header.rank != wanted.rank ||
      header.slots != wanted.slots || encrypted != (wanted.protection == Protection::kEncrypted)) {
    return Error{.code = Code::kIncompatible,
                 .what = "it is of another namespace, another rank or another size",
                 .next_step = "compute its blocks again"};
  }
  segment->places.resize(static_cast<size_t>(header.slots));
  while (segment->end + kPage <= file_bytes) {
    if (!file.pread(page, segment->end)) break;
    const auto records = read_batch(page, header, segment->end, file_bytes, segment->seal.get());
    if (!records) break;
    const bool fresh = std::all_of(records->begin(), records->end(), [&](const SegmentRecord& record) {
      return segment->places[record.position].use == Segment::Use::kUnused;
    });
    if (!fresh) break;
    for (const SegmentRecord& record : *records) segment->places[record.position] = {record, Segment::Use::kStored};
    segment->used += records->size();
    segment->end = record_end(records->back());
  }
  if (segment->used > 0) return segment;
  return Error{.code = Code::kCorruption, .what = "there is no record in it", .next_step = "nothing is lost"};
}

}  // namespace torpor
