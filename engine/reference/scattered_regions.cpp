// SPDX-License-Identifier: Apache-2.0
#include "engine/reference/scattered_regions.h"

#include <algorithm>
#include <numeric>
#include <random>

#include <fmt/core.h>

#include "engine/reference/made_bytes.h"
#include "engine/tags.h"

namespace torpor::reference {
namespace {

std::byte* at(DeviceAddress address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

Result<std::vector<DeviceAddress>> allocate_scattered(RankMemory& memory, std::string_view tag,
                                                      std::span<const uint64_t> sizes, uint64_t seed) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937_64 random(seed);
  for (size_t left = order.size(); left > 1; --left) std::swap(order[left - 1], order[random() % left]);
  // The second region is placed above memory that was allocated before the first; the third below the second.
  DeviceAddress before = 0;
  if (order.size() > 1) {
    TORPOR_ASSIGN_OR_RETURN(before, memory.allocate(tag, "before", sizes[order[1]]));
  }
  std::vector<DeviceAddress> addresses(sizes.size());
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 1) TORPOR_RETURN_IF_ERROR(memory.free(before));
    const std::string name = order[i] == 0 ? std::string(tag.substr(0, 1)) : fmt::format("{}{}", tag[0], order[i]);
    TORPOR_ASSIGN_OR_RETURN(addresses[order[i]], memory.allocate(tag, name, sizes[order[i]]));
  }
  return addresses;
}

Result<std::vector<DeviceAddress>> allocate_kv(RankMemory& memory, const ScatteredKv& kv, uint64_t seed) {
  const uint64_t layer_bytes = static_cast<uint64_t>(kv.blocks) * kv.block_bytes;
  std::vector<uint64_t> sizes(kv.layers, layer_bytes);
  sizes.insert(sizes.end(), kv.spare.begin(), kv.spare.end());
  TORPOR_ASSIGN_OR_RETURN(std::vector<DeviceAddress> addresses, allocate_scattered(memory, kKvCacheTag, sizes, seed));
  addresses.resize(kv.layers);
  KvLayout layout{.num_blocks = static_cast<uint32_t>(kv.blocks), .tensors = {}};
  for (const DeviceAddress address : addresses) {
    layout.tensors.push_back({.address = address,
                              .layers = 1,
                              .layer_stride = layer_bytes,
                              .block_stride = kv.block_bytes,
                              .block_bytes = kv.block_bytes});
  }
  TORPOR_RETURN_IF_ERROR(memory.set_kv_layout(kKvCacheTag, std::move(layout)));
  return addresses;
}

std::vector<uint64_t> random_sizes(uint64_t bytes, size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> sizes;
  for (size_t left = std::min<uint64_t>(count, bytes); left > 1; --left) {
    sizes.push_back(2 +
                    2 * (random() % std::max<uint64_t>(1, (bytes - left + 1) / left)));  // whole values of two bytes
    sizes.back() = std::min(sizes.back(), bytes - (left - 1));
    bytes -= sizes.back();
  }
  sizes.push_back(bytes);
  return sizes;
}

Result<ScatteredBytes> ScatteredBytes::allocate(RankMemory& memory, std::string_view tag, uint64_t bytes, uint64_t seed,
                                                uint64_t order, size_t regions) {
  const std::vector<uint64_t> sizes = random_sizes(bytes, regions, seed);
  TORPOR_ASSIGN_OR_RETURN(const std::vector<DeviceAddress> addresses, allocate_scattered(memory, tag, sizes, order));
  ScatteredBytes made;
  for (size_t i = 0; i < sizes.size(); ++i) made.parts_.emplace_back(at(addresses[i]), sizes[i]);
  return made;
}

uint64_t ScatteredBytes::size() const {
  uint64_t bytes = 0;
  for (const std::span<std::byte> part : parts_) bytes += part.size();
  return bytes;
}

Digest ScatteredBytes::digest() const {
  StreamingDigest digest;
  for (const std::span<std::byte> part : parts_) digest.update(part);
  return digest.finish();
}

void ScatteredBytes::add_first(StreamingDigest& digest, uint64_t bytes) const {
  for (const std::span<std::byte> part : parts_) {
    digest.update(part.first(std::min<uint64_t>(bytes, part.size())));
    bytes -= std::min<uint64_t>(bytes, part.size());
  }
}

void ScatteredBytes::make(uint64_t seed, bool bf16) const {
  uint64_t at = 0;
  for (const std::span<std::byte> part : parts_) {
    make_bytes(part, at, seed);
    if (bf16) make_like_bf16(part, at);
    at += part.size();
  }
}

Result<StepRegions> StepRegions::allocate(RankMemory& memory, std::string tag, uint64_t bytes, uint64_t seed,
                                          uint64_t order, size_t regions) {
  StepRegions made;
  made.memory_ = &memory;
  made.tag_ = std::move(tag);
  const std::vector<uint64_t> sizes = random_sizes(bytes, regions, seed);
  TORPOR_ASSIGN_OR_RETURN(const std::vector<DeviceAddress> addresses,
                          allocate_scattered(memory, made.tag_, sizes, order));
  for (size_t i = 0; i < sizes.size(); ++i)
    made.regions_.push_back({.name = fmt::format("{}", i), .address = addresses[i], .bytes = sizes[i]});
  return made;
}

std::span<std::byte> StepRegions::content(const Region& region) { return {at(region.address), region.bytes}; }

void StepRegions::write(Region& region) {
  region.written = ++writes_;
  make_bytes(content(region), 0, region.written);
}

Status StepRegions::step() {
  for (Region& region : regions_) {
    const std::span<const std::byte> now = content(region);
    if (tag_ == kWorkspaceTag && first_not_zero(now) == now.size()) region.written = 0;
    const size_t other = region.written == 0 ? first_not_zero(now) : first_not_made(now, region.written);
    if (other != now.size())
      return Error{.code = Code::kCorruption,
                   .what = fmt::format("byte {} of the region {}/{} is not as it was left", other, tag_, region.name)};
    write(region);
  }
  return ok();
}

// The new region is written at once, also while the tag sleeps: its owner allocates it to use it.
Status StepRegions::exchange() {
  const std::map<std::string, RegionState> states = memory_->states();
  const auto state = states.find(tag_);
  if (state == states.end() || (state->second != RegionState::kAttached && state->second != RegionState::kDetached))
    return ok();
  Region& region = regions_[exchanges_ % regions_.size()];
  Region fresh{.name = fmt::format("exchanged {}", ++exchanges_), .bytes = region.bytes};
  TORPOR_RETURN_IF_ERROR(memory_->free(region.address));
  TORPOR_ASSIGN_OR_RETURN(fresh.address,
                          memory_->allocate(tag_, fresh.name, fresh.bytes));  // perhaps at the old address
  region = std::move(fresh);
  write(region);
  return ok();
}

}  // namespace torpor::reference
