// SPDX-License-Identifier: Apache-2.0
// RankMemory: freeing and trimming regions, and reading what is saved of the others.
#include <algorithm>

#include <fmt/core.h>

#include "engine/rank_memory.h"
#include "engine/tags.h"

namespace torpor {

Status RankMemory::free(DeviceAddress address) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  const std::optional<RegionInfo> region = allocator_->region_at(address);
  if (region) before_free(*region);
  TORPOR_RETURN_IF_ERROR(allocator_->free(address));
  if (region) forget(*region);  // a trimmed one is forgotten already
  return ok();
}

Result<uint64_t> RankMemory::trim(DeviceAddress address) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  const std::optional<RegionInfo> region = allocator_->region_at(address);
  if (region) before_free(*region);
  Result<uint64_t> bytes = try_catch([&] { return allocator_->trim(address); });
  if (region && !allocator_->region_at(address)) forget(*region);
  return bytes;
}

// Called before a region is freed or trimmed: nothing reads or writes it any more.
void RankMemory::before_free(const RegionInfo& region) {
  const bool holds_blocks = images_->chunks().holds_blocks(region);
  if (region.tag == kWeightsTag || holds_blocks) saver_->checkpoint().stop();
  if (holds_blocks) restorer_->end_deferred();
}

void RankMemory::forget(const RegionInfo& region) {
  images_->on_freed(region);
  (region.tag == kKvCacheTag ? kv_bytes_ : other_bytes_) -= region.size_bytes;
  if (!named_weights_ || region.tag != kWeightsTag) return;
  // The named pieces are not the engine's weights any more.
  const bool named = std::any_of(named_weights_->pieces.begin(), named_weights_->pieces.end(), [&](const auto& piece) {
    return piece.address >= region.address && piece.address - region.address < region.size_bytes;
  });
  if (named) named_weights_.reset();
}

Status RankMemory::read_saved(DeviceAddress address, std::span<std::byte> out) const {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  for (const RegionInfo& region : allocator_->regions()) {
    if (address < region.address || address - region.address >= region.size_bytes) continue;
    if (out.size() > region.size_bytes - (address - region.address)) break;
    return images_->read_saved(region, address - region.address, out);
  }
  return Error{.code = Code::kNotFound,
               .what = fmt::format("{} bytes at {:#x} are of no region", out.size(), address),
               .next_step = "ask for what was allocated here"};
}

}  // namespace torpor
