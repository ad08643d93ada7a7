// SPDX-License-Identifier: Apache-2.0
#include "offload/segment_table.h"

#include <algorithm>
#include <utility>

#include <fmt/core.h>

namespace torpor {

Result<SegmentHeader> SegmentTable::header_of(uint32_t space) const {
  const auto digest = spaces_.find(space);
  if (digest == spaces_.end()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("namespace {} was not opened", space),
                 .next_step = "open it first"};
  }
  return SegmentHeader{.rank = rules_.rank,
                       .slots = rules_.slots,
                       .space = digest->second,
                       .protection = rules_.key == nullptr ? Protection::kNone
                                     : rules_.encrypt      ? Protection::kEncrypted
                                                           : Protection::kAuthenticated};
}

SegmentPtr SegmentTable::find(uint64_t number) const {
  const auto found = segments_.find(number);
  return found == segments_.end() ? nullptr : found->second;
}

SegmentTable::Found SegmentTable::find_record(StoreSlot slot) const {
  const auto found = slot < 0 ? segments_.end() : segments_.find(segment_of(slot, rules_.slots));
  if (found == segments_.end() || !found->second->is_there()) return {};
  const Segment::Place& place = found->second->places[static_cast<size_t>(slot % rules_.slots)];
  if (place.use != Segment::Use::kStored) return {};
  return {found->second, &place.record};
}

// ---- begin and end

Result<SegmentPtr> SegmentTable::begin(uint64_t number, uint32_t space) {
  if (number < rules_.first_number || number + kOpenSegments <= newest_) return segment_closed(number);
  TORPOR_ASSIGN_OR_RETURN(const SegmentHeader header, header_of(space));
  if (rules_.budget_bytes != 0 && held_bytes_ + rules_.capacity > rules_.budget_bytes) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("{} bytes of segments are there, a budget of {} has no room for {} more",
                                     held_bytes_, rules_.budget_bytes, rules_.capacity),
                 .next_step = "drop a segment, or use a larger budget"};
  }
  auto segment = std::make_shared<Segment>();
  segment->header = header;
  segment->header.number = number;
  segment->header.id = random_seal_id();
  if (rules_.key != nullptr) {
    segment->seal = std::make_shared<Seal>(*rules_.key, segment->header.id, segment->header.protection);
    segment->header.key_name = segment->seal->key_name();
  }
  segment->space = space;
  segment->places.resize(static_cast<size_t>(rules_.slots));
  unfinished_.push_back(segment);
  segments_.emplace(number, segment);
  segment->reserved = rules_.capacity;
  held_bytes_ += rules_.capacity;
  return segment;
}

// Forgets also those of the older segments that were dropped.
void SegmentTable::open(Segment& opened) {
  opened.state = Segment::State::kOpen;
  newest_ = std::max(newest_, opened.header.number);
  for (const SegmentPtr& segment : unfinished_) {
    if (segment->state == Segment::State::kOpen && segment->header.number + kOpenSegments <= newest_)
      segment->state = Segment::State::kEnded;
  }
  std::erase_if(segments_, [newest = newest_](const auto& entry) {
    return entry.second->state == Segment::State::kGone && entry.first + kOpenSegments <= newest;
  });
}

std::shared_ptr<File> SegmentTable::cancel(const SegmentPtr& segment) {
  const bool dropped = segment->state == Segment::State::kGone;
  std::shared_ptr<File> file = forget(*segment);
  std::erase(unfinished_, segment);
  if (!dropped) segments_.erase(segment->header.number);  // else the store removes a file of this name once more
  return file;
}

void SegmentTable::add(const SegmentPtr& segment) {
  held_bytes_ += segment->reserved;
  segments_.emplace(segment->header.number, segment);
}

std::vector<SegmentTable::Ended> SegmentTable::take_ended() {
  std::vector<Ended> ended;
  ended.reserve(unfinished_.size());
  std::erase_if(unfinished_, [&](const SegmentPtr& segment) {
    if (segment->state == Segment::State::kMaking || !segment->under_way.empty()) return false;
    if (segment->state == Segment::State::kGone) return true;
    if (segment->state == Segment::State::kOpen && segment->used < segment->places.size()) return false;
    segment->state = Segment::State::kEnded;
    segment->finished = true;
    const uint64_t used = std::min(segment->end, segment->broken_at);
    const uint64_t end = std::min(segment->reserved, align_up(used, granularity_of(segment->reserved)));
    ended.push_back({segment, segment->file, end});
    return true;
  });
  return ended;
}

void SegmentTable::cut(Segment& segment, uint64_t end) {
  if (!segment.is_there()) return;
  held_bytes_ -= segment.reserved - end;
  segment.reserved = end;
}

size_t SegmentTable::synced(Segment& segment, uint64_t end) {
  segment.durable_end = std::max(segment.durable_end, end);
  segment.name_is_durable = true;
  size_t lost = 0;
  for (Segment::Place& place : segment.places) {
    if (place.use != Segment::Use::kStored || place.record.offset < segment.broken_at) continue;
    drop_place(place);
    ++lost;
  }
  return lost;
}

// ---- drop

void SegmentTable::drop_place(Segment::Place& place) {
  if (place.use == Segment::Use::kStored) dropped_bytes_ += place.record.stored;
  place.use = Segment::Use::kGone;
}

std::shared_ptr<File> SegmentTable::forget(Segment& segment) {
  for (Segment::Place& place : segment.places) drop_place(place);
  segment.state = Segment::State::kGone;
  held_bytes_ -= std::exchange(segment.reserved, 0);
  return std::move(segment.file);
}

SegmentTable::Drop SegmentTable::drop(StoreSlot first, StoreSlot end) {
  const int64_t slots = rules_.slots;
  const auto found = segments_.lower_bound(segment_of(first, rules_.slots));  // skips numbers that do not exist
  if (found == segments_.end() || static_cast<int64_t>(found->first) * slots >= end) return {.next = end};
  Segment& segment = *found->second;
  const StoreSlot start = static_cast<int64_t>(found->first) * slots;
  Drop done{.next = end - start > slots ? start + slots : end, .number = found->first};
  if (segment.state == Segment::State::kGone) return done;
  const int64_t from = std::max(first - start, int64_t{0});
  const int64_t to = std::min(end - start, slots);
  done.is_whole = from == 0 && to == slots;
  if (done.is_whole) {
    done.file = forget(segment);
    if (found->first < rules_.first_number) segments_.erase(found);
    return done;
  }
  for (int64_t position = from; position < to; ++position) {
    Segment::Place& place = segment.places[static_cast<size_t>(position)];
    if (place.use == Segment::Use::kUnused) ++segment.used;
    drop_place(place);
  }
  return done;
}

}  // namespace torpor
