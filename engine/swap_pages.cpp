// SPDX-License-Identifier: Apache-2.0
#include "engine/swap_pages.h"

namespace torpor {

PageReleaser::PageReleaser(SleepAllocator& allocator, std::span<const std::string> tags, SwapChannel& channel,
                           size_t rank)
    : allocator_(allocator), channel_(channel), rank_(rank), pages_(allocator, tags), missing_(pages_.size()) {}

void PageReleaser::expect(std::span<const ChunkPlan> chunks) {
  for (const ChunkPlan& chunk : chunks) pages_.each_of(chunk, [&](size_t page) { ++missing_[page]; });
}

Status PageReleaser::release(size_t page) {
  has_released_ = true;
  TORPOR_RETURN_IF_ERROR(allocator_.release_page(pages_[page]));
  return channel_.release(rank_, pages_[page].size_bytes);
}

Status PageReleaser::begin() {
  for (size_t page = 0; page < pages_.size(); ++page) {
    if (missing_[page] == 0) TORPOR_RETURN_IF_ERROR(release(page));
  }
  return ok();
}

Status PageReleaser::on_saved(std::span<const ChunkPlan> chunks) {
  Status released;
  for (const ChunkPlan& chunk : chunks) {
    pages_.each_of(chunk, [&](size_t page) {
      if (--missing_[page] == 0 && released) released = release(page);
    });
  }
  return released;
}

PageAcquirer::PageAcquirer(SleepAllocator& allocator, const std::vector<std::string>& tags, SwapChannel& channel,
                           size_t rank)
    : allocator_(allocator),
      channel_(channel),
      rank_(rank),
      tags_(tags),
      pages_(allocator, tags),
      there_(pages_.size()) {}

Status PageAcquirer::begin() {
  uint64_t bytes = 0;
  for (size_t page = 0; page < pages_.size(); ++page) bytes += pages_[page].size_bytes;
  return channel_.demand(rank_, bytes);
}

// The device may be slow to have the memory that the other engine released, or another process may have taken it. Both
// look like a lack of memory; that is an error only if nothing more will be released.
Status PageAcquirer::acquire(size_t page) {
  TORPOR_RETURN_IF_ERROR(channel_.acquire(rank_, pages_[page].size_bytes));
  for (bool more = true;;) {
    const uint64_t seen = channel_.released(rank_);
    Status acquired = allocator_.acquire_page(pages_[page]);
    if (acquired) break;
    if (acquired.error().code != Code::kResourceExhausted || !more) return acquired;
    TORPOR_ASSIGN_OR_RETURN(more, channel_.wait_for_more(rank_, seen));
  }
  there_[page] = true;
  return ok();
}

Status PageAcquirer::wait_for(const ChunkPlan& chunk) {
  Status acquired;
  pages_.each_of(chunk, [&](size_t page) {
    if (acquired && !there_[page]) acquired = acquire(page);
  });
  return acquired;
}

Status PageAcquirer::wait_for_all() {
  for (size_t page = 0; page < pages_.size(); ++page) {
    if (!there_[page]) TORPOR_RETURN_IF_ERROR(acquire(page));
  }
  for (const std::string& tag : tags_) {
    for (const RegionInfo& region : allocator_.regions_of(tag)) {
      if (region.state != RegionState::kAttached) TORPOR_RETURN_IF_ERROR(allocator_.attach_region(region.address));
    }
  }
  return ok();
}

}  // namespace torpor
