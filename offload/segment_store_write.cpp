// SPDX-License-Identifier: Apache-2.0
// SegmentStore: puts records, batch by batch.
#include <algorithm>

#include <fmt/core.h>

#include "offload/segment.h"
#include "offload/segment_batch.h"
#include "offload/segment_store.h"

namespace torpor {
namespace {

// Return whether the error is a mistake of the caller, which says nothing about the disk.
bool is_callers(const Error& error) {
  return error.origin == Origin::kTorpor && (error.code == Code::kFailedPrecondition ||
                                             error.code == Code::kInvalidArgument || error.code == Code::kNotFound);
}

}  // namespace

// Finishes a reserved batch, however its writing ends.
class SegmentStore::Writing {
 public:
  Writing(SegmentStore& store, SegmentBatch& batch) : store_(store), batch_(batch) {}
  ~Writing() {
    const MutexLock lock(store_.mutex_);
    store_.health_.put_bytes += batch_.finish();
    store_.changed_.notify_all();
  }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

 private:
  SegmentStore& store_;
  SegmentBatch& batch_;
};

void SegmentStore::do_put(std::span<RecordPart> parts) {
  directory_->remove_queued();
  std::vector<RecordPart*> sorted;
  sorted.reserve(parts.size());
  for (RecordPart& part : parts) {
    if (part.status) sorted.push_back(&part);
  }
  const auto place = [this](const RecordPart* part) {
    return std::pair(segment_of(slot_of(*part), traits_.slots_per_segment), key_of(*part).space);
  };
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const RecordPart* a, const RecordPart* b) { return place(a) < place(b); });
  for (size_t first = 0; first < sorted.size();) {
    size_t end = first + 1;
    while (end < sorted.size() && end - first < kBatchRecords && place(sorted[end]) == place(sorted[first])) ++end;
    put_batch(std::span(sorted).subspan(first, end - first));
    first = end;
  }
  bool any_good = false;
  for (const RecordPart* part : sorted) {
    any_good = any_good || part->status.has_value();
    if (!part->status && !is_callers(part->status.error())) note(part->status.error(), true);
  }
  if (any_good &&
      std::all_of(sorted.begin(), sorted.end(), [](const RecordPart* p) { return p->status.has_value(); })) {
    const MutexLock lock(mutex_);
    health_.degraded = false;
  }
  finish_ended();
}

void SegmentStore::put_batch(std::span<RecordPart* const> parts) {
  const auto fail = [&](const Error& error) {
    for (RecordPart* part : parts) part->status = error;
  };
  const uint64_t number = segment_of(slot_of(*parts[0]), traits_.slots_per_segment);
  const Result<SegmentPtr> segment = writable(number, key_of(*parts[0]).space);
  if (!segment) return fail(segment.error());
  ScratchPool::Lease scratch(scratch_);
  SegmentBatch batch(**segment, parts);
  if (const Status encoded = batch.encode(*scratch.operator->(), options_.compression); !encoded)
    return fail(encoded.error());
  const Result<bool> reserved = [&] {
    const MutexLock lock(mutex_);
    return batch.reserve();
  }();
  if (!reserved) return fail(reserved.error());
  if (!*reserved) return;
  const Writing writing(*this, batch);
  const Status done = try_catch([&]() -> Status {
    batch.write();
    return ok();
  });
  if (!done) fail(done.error());
}

}  // namespace torpor
