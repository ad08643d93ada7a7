// SPDX-License-Identifier: Apache-2.0
// SegmentBatch: up to kBatchRecords records on their way into a segment: one page that describes them, and the records
// behind it. They are written in one submission.
//
//   encode()    no lock          bring the records into the form in which the file has them
//   reserve()   segment's lock   take the range behind the last batch of the segment
//   write()     no lock          seal, and write
//   finish()    segment's lock   make the written records visible. A batch that was reserved must be finished, however
//                                its writing ends: a sync of the segment waits for it
//
// Owner: one put of a SegmentStore. Threads: one. Failure: each part has its own status; a page that cannot be written
// fails all parts, and ends the segment.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "offload/codec.h"
#include "offload/scratch.h"
#include "offload/segment.h"
#include "offload/slot_store.h"

namespace torpor {

class SegmentBatch {
 public:
  // `segment`: of the slots of all parts. It and the parts outlive this object.
  SegmentBatch(Segment& segment, std::span<RecordPart* const> parts) : segment_(segment), parts_(parts) {}

  // Set the stored form of each part: its own memory if it can be written from there, else memory of `scratch`, which
  // outlives this object. kResourceExhausted: no memory.
  Status encode(PageBuffer& scratch, const CompressionOptions& compression);
  // Return false if nothing is left to write. A part whose slot was used before fails, and leaves the batch.
  // kFailedPrecondition: the segment takes no more records.
  Result<bool> reserve();
  void write();
  // Return the stored bytes of the records that are visible now. A part whose slot was dropped meanwhile fails.
  uint64_t finish();

 private:
  struct Item {
    RecordPart* part = nullptr;
    SegmentRecord record;
    FileRecord in_file;  // `record` as the file stores it
    size_t write = 0;    // index into writes_
  };
  Segment& segment_;
  const std::span<RecordPart* const> parts_;
  std::span<std::byte> page_;
  std::vector<Item> items_;
  uint64_t offset_ = 0;  // of the page, in the file
  std::shared_ptr<File> file_;
  std::vector<FilePart> writes_;
  bool written_ = false;  // the page
};

}  // namespace torpor
