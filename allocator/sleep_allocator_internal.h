// SPDX-License-Identifier: Apache-2.0
// Types that the source files of SleepAllocator share.
#pragma once

#include <fmt/core.h>

#include "allocator/region_memory.h"
#include "allocator/sleep_allocator.h"

namespace torpor {

struct SleepAllocator::Region : RegionMemory {  // belongs to the call that holds the tag
  RegionInfo info;                              // the allocator's lock guards `state`; the rest never changes
  uint64_t number = 0;                          // in order of allocation
};

// Holds tags (none named: all) while it lives. Other calls that need one of them wait.
class SleepAllocator::Hold {
 public:
  Hold(SleepAllocator& allocator, Tags tags) : allocator_(allocator), tags_(std::move(tags)) {
    Tags named = tags_;
    const MutexLock lock(allocator_.mutex_);
    while (allocator_.in_use(tags_)) allocator_.call_ended_.wait(allocator_.mutex_);
    if (tags_.empty()) allocator_.all_held_ = true;
    allocator_.held_.merge(named);
  }
  Hold(SleepAllocator& allocator, std::span<const std::string> tags)
      : Hold(allocator, Tags(tags.begin(), tags.end())) {}
  ~Hold() {
    const MutexLock lock(allocator_.mutex_);
    if (tags_.empty()) allocator_.all_held_ = false;
    for (const std::string& tag : tags_) allocator_.held_.erase(tag);
    allocator_.call_ended_.notify_all();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  SleepAllocator& allocator_;
  const Tags tags_;
};

template <class Some>
bool SleepAllocator::in_use(const Some& tags) const {
  if (all_held_ || tags.empty()) return all_held_ || !held_.empty();
  for (const std::string& tag : tags) {
    if (held_.contains(tag)) return true;
  }
  return false;
}

inline Error wrong_state(const RegionInfo& region, std::string_view wanted) {
  if (region.state == RegionState::kBroken) {
    return Error{.code = Code::kDevice,
                 .what = fmt::format("the region {}/{} is broken: an earlier failure could not be undone", region.tag,
                                     region.name),
                 .next_step = "end this process; what was saved can be woken in a new one",
                 .origin = Origin::kDevice};
  }
  return Error{.code = Code::kFailedPrecondition,
               .what = fmt::format("the tag {} is {}, not {}", region.tag, name(region.state), wanted),
               .next_step = "see state()"};
}

}  // namespace torpor
