// SPDX-License-Identifier: Apache-2.0
// SleepAllocator: releases and creates memory page by page.
#include <algorithm>

#include <fmt/core.h>

#include "allocator/sleep_allocator.h"
#include "allocator/sleep_allocator_internal.h"

namespace torpor {

std::vector<DevicePage> SleepAllocator::pages_of(std::span<const std::string> tags) const {
  std::vector<DevicePage> pages;
  for (const std::string& tag : tags) {
    for (const RegionInfo& region : regions_of(tag)) {
      if (region.state == RegionState::kAttached) continue;
      for (uint64_t offset = 0; offset < region.reserved_bytes; offset += options_.handle_bytes)
        pages.push_back({region.address, offset, std::min(options_.handle_bytes, region.reserved_bytes - offset)});
    }
  }
  return pages;
}

// Call `call` with the page's region, which is in one of the `allowed` states and stays in it.
template <class Call>
Status SleepAllocator::on_page(const DevicePage& page, std::initializer_list<RegionState> allowed, const Call& call) {
  const std::optional<RegionInfo> wanted = region_at(page.region);
  const Error unknown{.code = Code::kNotFound,
                      .what = fmt::format("no page begins at {:#x}", page.address()),
                      .next_step = "name what pages_of() returned"};
  if (!wanted) return unknown;
  const Hold hold(*this, Tags{wanted->tag});
  Region* region = nullptr;
  RegionState state{};
  {
    const MutexLock lock(mutex_);
    const auto found = regions_.find(page.region);
    if (found == regions_.end() || found->second->info.tag != wanted->tag) return unknown;
    region = found->second.get();
    state = region->info.state;
    if (std::find(allowed.begin(), allowed.end(), state) == allowed.end())
      return wrong_state(region->info, name(*allowed.begin()));
  }
  Status done = call(*region);
  if (!done) set_state({&region, 1}, state);
  return done;
}

Status SleepAllocator::release_page(const DevicePage& page) {
  return on_page(page, {RegionState::kSaving}, [&](Region& region) {
    return region.find(page.offset) == region.handles.end() ? ok() : region.release_piece(device_, page.offset);
  });
}

Status SleepAllocator::acquire_page(const DevicePage& page) {
  return on_page(page, {RegionState::kSaving, RegionState::kAttaching, RegionState::kRestoring},
                 [&](Region& region) { return region.acquire_piece(device_, page.offset, page.size_bytes); });
}

}  // namespace torpor
