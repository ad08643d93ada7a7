// SPDX-License-Identifier: Apache-2.0
#include "engine/restore_gate.h"

#include <algorithm>

#include "base/units.h"

namespace torpor {
namespace {

// Large enough that the cost of a job does not count; two jobs are under way.
constexpr uint64_t kJobBytes = 256 * kMiB;

}  // namespace

MappedRegions::MappedRegions(SleepAllocator& allocator, const std::vector<std::string>& tags, bool own_thread)
    : order_(order_of(allocator, tags)), mapper_(allocator, order_.regions, own_thread) {}

MappedRegions::Order MappedRegions::order_of(const SleepAllocator& allocator, const std::vector<std::string>& tags) {
  Order order;
  for (const std::string& tag : tags) {
    const std::vector<RegionInfo> all = allocator.regions_of(tag);
    const bool went = std::any_of(all.begin(), all.end(), [](const auto& each) { return is_asleep(each.state); });
    for (const RegionInfo& region : all) {
      // A region that was allocated while the others were asleep is attached.
      if (!went || region.state != RegionState::kAttached) order.regions.push_back(region.address);
      order.end_of[{tag, region.name}] = order.regions.size();
    }
    order.end_of[{tag, ""}] = order.regions.size();  // KV blocks lie in all regions of their tag
  }
  return order;
}

Status MappedRegions::wait_for(const ChunkPlan& chunk) {
  const ChunkKey& key = chunk.key;
  if (key.tag == last_.tag && key.region == last_.region) return ok();
  TORPOR_RETURN_IF_ERROR(mapper_.wait(order_.end_of.at({key.tag, key.region})));
  last_ = key;
  return ok();
}

uint64_t MappedRegions::job_bytes() const { return kJobBytes; }

}  // namespace torpor
