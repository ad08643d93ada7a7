// SPDX-License-Identifier: Apache-2.0
#include "kvcache/placement.h"

#include <cstring>

namespace torpor {
namespace {

class OptionPlacement final : public Placement {
 public:
  explicit OptionPlacement(const PlacementOptions& options) : options_(options) {}
  StoreMask wanted(const Candidate& candidate) const override {
    if (options_.min_uses > 1 && candidate.uses < options_.min_uses) return {};
    const bool on_host = candidate.places.host >= 0;
    const bool on_disk = candidate.places.disk >= 0;
    // A block on disk only may come into host memory too; a block in host memory goes on by itself.
    const bool there = options_.host ? on_host : on_disk;
    if (options_.presence && there) return {};
    StoreMask mask;
    if (options_.host) mask.add(StoreId::kHost);
    if (options_.disk) mask.add(StoreId::kDisk);
    if (options_.remote && options_.host && candidate.places.remote < 0) mask.add(StoreId::kRemote);
    return mask;
  }
  bool worth_loading(int64_t tokens, std::span<const BlockLocations>) const override {
    return tokens >= options_.min_prefix_tokens;
  }

 private:
  const PlacementOptions options_;
};

uint64_t words_of(const BlockKey& key) {
  uint64_t words[2];
  std::memcpy(words, key.hash.data(), sizeof words);
  return (words[0] ^ (words[1] * 0x9e3779b97f4a7c15u)) + key.group;
}

}  // namespace

std::unique_ptr<Placement> make_placement(const PlacementOptions& options) {
  return std::make_unique<OptionPlacement>(options);
}

Result<UseCounts> UseCounts::create(size_t cells) {
  UseCounts made;
  TORPOR_ASSIGN_OR_RETURN(made.cells_, FlatArray<Cell>::create(cells));
  return made;
}

uint32_t UseCounts::add(const BlockKey& key) {
  if (cells_.size() == 0) return 0;
  const uint64_t hash = words_of(key);
  uint32_t& cell = cells_[static_cast<int64_t>(hash % cells_.size())].tag_and_count;
  const auto tag = static_cast<uint32_t>(hash >> 40) << 8;
  if ((cell & ~255u) != tag) cell = tag;
  if ((cell & 255u) < 255u) ++cell;
  return cell & 255u;
}

uint32_t UseCounts::count(const BlockKey& key) const {
  if (cells_.size() == 0) return 0;
  const uint64_t hash = words_of(key);
  const uint32_t cell = cells_[static_cast<int64_t>(hash % cells_.size())].tag_and_count;
  return (cell & ~255u) == static_cast<uint32_t>(hash >> 40) << 8 ? cell & 255u : 0;
}

void UseCounts::clear() {
  for (int64_t i = 0; i < static_cast<int64_t>(cells_.size()); ++i) cells_[i] = {};
}

}  // namespace torpor
