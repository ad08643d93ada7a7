// SPDX-License-Identifier: Apache-2.0
#include "kvcache/disk_segments.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor {

Result<DiskSegments> DiskSegments::create(int32_t segments, int32_t segment_slots) {
  DiskSegments made;
  TORPOR_ASSIGN_OR_RETURN(made.segments_, FlatArray<Segment>::create(static_cast<size_t>(segments)));
  made.segment_slots_ = std::max(segment_slots, 1);
  return made;
}

bool DiskSegments::has_position() {
  if (open_ >= 0 && segments_[open_].written == segment_slots_) close();
  return open_ >= 0 || begun_ < static_cast<int32_t>(segments_.size());
}

Slot DiskSegments::append() {
  if (open_ < 0) open_ = begun_++;
  return begin_of(open_) + segments_[open_].written++;
}

void DiskSegments::close() {
  if (open_ < 0) return;
  Segment& segment = segments_[open_];
  segment.closed = true;
  segment.stale = segment.useful == 0;
  list_of(segment).push_back(segments_, open_);
  open_ = -1;
}

int64_t DiskSegments::room() const {
  const int64_t here = open_ < 0 ? 0 : segment_slots_ - segments_[open_].written;
  return here + (static_cast<int64_t>(segments_.size()) - begun_) * segment_slots_;
}

int32_t DiskSegments::next_to_leave() const {
  for (const SlotList* list : {&stale_, &closed_}) {
    for (int32_t segment = list->first; segment >= 0; segment = segments_[segment].after) {
      if (segments_[segment].pins == 0) return segment;
    }
  }
  return -1;
}

void DiskSegments::empty(int32_t number) {
  list_of(segments_[number]).remove(segments_, number);
  segments_[number] = {};
  open_ = number;
}

void DiskSegments::useful_changed(int32_t number, int by) {
  Segment& segment = segments_[number];
  segment.useful += by;
  if (!segment.closed || segment.stale == (segment.useful == 0)) return;
  list_of(segment).remove(segments_, number);
  segment.stale = !segment.stale;
  list_of(segment).push_back(segments_, number);
}

Status DiskSegments::check() const {
  const auto broken = [](std::string what) {
    return Error{.code = Code::kInternal, .what = std::move(what), .next_step = "report this"};
  };
  int64_t closed = 0;
  for (int32_t number = 0; number < begun_; ++number) {
    const Segment& segment = segments_[number];
    if (segment.closed == (number == open_)) return broken(fmt::format("segment {}: open or closed", number));
    if (segment.closed && segment.stale != (segment.useful == 0))
      return broken(fmt::format("segment {}: in the wrong list", number));
    closed += segment.closed ? 1 : 0;
  }
  int64_t listed = 0;
  for (const SlotList* list : {&closed_, &stale_}) {
    for (int32_t segment = list->first; segment >= 0 && listed <= closed; segment = segments_[segment].after) {
      if (!segments_[segment].closed || segments_[segment].stale != (list == &stale_))
        return broken(fmt::format("segment {}: in the wrong list", segment));
      ++listed;
    }
  }
  if (listed != closed) return broken("segments are in no list, or in two");
  return ok();
}

}  // namespace torpor
