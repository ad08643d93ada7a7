// SPDX-License-Identifier: Apache-2.0
#include "console/model_replay.h"

#include <algorithm>
#include <map>
#include <memory>

#include <fmt/core.h>

#include "kvcache/block_index.h"

namespace torpor::console {
namespace {

constexpr int64_t kMostBlocks = 1 << 26;
constexpr size_t kMostKeys = 1 << 20;  // of a request
constexpr int64_t kSegments = 32;      // number of segments of the modelled disk

BlockKey key_of(const Event& event) {
  BlockKey key;
  std::copy(event.key.bytes.begin(), event.key.bytes.end(), key.hash.begin());
  return key;
}

class Tiers {
 public:
  static Result<Tiers> create(const TierSizes& sizes) {
    Tiers tiers;
    if (sizes.device > 0) {
      TORPOR_ASSIGN_OR_RETURN(tiers.device_, BlockIndex::create({.host_slots = static_cast<int32_t>(sizes.device)}));
    }
    if (sizes.host + sizes.disk > 0) {
      BlockIndexOptions below{.host_slots = static_cast<int32_t>(sizes.host)};
      if (sizes.disk > 0) {
        below.segment_slots = static_cast<int32_t>(std::max<int64_t>(sizes.disk / kSegments, 1));
        below.disk_segments = static_cast<int32_t>(std::max<int64_t>(sizes.disk / below.segment_slots, 2));
      }
      TORPOR_ASSIGN_OR_RETURN(tiers.below_, BlockIndex::create(below));
    }
    return tiers;
  }
  // Find the first blocks that are in some tier, each in the uppermost one that has it. A found block counts as used.
  void find(const std::vector<BlockKey>& chain, TierSizes& found) {
    for (const BlockKey& key : chain) {
      if (used(device_.get(), StoreId::kHost, key)) {
        ++found.device;
      } else if (used(below_.get(), StoreId::kHost, key)) {
        ++found.host;
      } else if (used(below_.get(), StoreId::kDisk, key)) {
        ++found.disk;
      } else {
        return;
      }
    }
  }
  // Store the end of a chain first, so that it is evicted before the beginning.
  void put(const std::vector<BlockKey>& chain) {
    for (auto key = chain.rbegin(); key != chain.rend(); ++key) {
      store(device_.get(), StoreId::kHost, *key);
      store(below_.get(), StoreId::kHost, *key);
      store(below_.get(), StoreId::kDisk, *key);
    }
  }

 private:
  static Slot place(BlockIndex* index, StoreId store, const BlockKey& key) {
    BlockLocations places;
    if (index == nullptr || index->run({&key, 1}, {&places, 1}) == 0) return -1;
    return store == StoreId::kHost ? places.host : places.disk;
  }
  static bool used(BlockIndex* index, StoreId store, const BlockKey& key) {
    const Slot slot = place(index, store, key);
    if (slot < 0) return false;
    index->pin(store, slot);
    index->unpin(store, slot);
    return true;
  }
  // Store a block; do nothing if the tier does not exist or is full.
  static void store(BlockIndex* index, StoreId store, const BlockKey& key) {
    if (index == nullptr || place(index, store, key) >= 0) return;
    const Result<Slot> slot = index->reserve(store, &key);
    if (!slot) return;
    index->commit(store, *slot);
    index->unpin(store, *slot);
    (void)index->reports().take_dropped();
  }
  std::unique_ptr<BlockIndex> device_;
  std::unique_ptr<BlockIndex> below_;
};

Status check(const TierSizes& sizes) {
  for (const int64_t size : {sizes.device, sizes.host, sizes.disk}) {
    if (size < 0 || size > kMostBlocks) {
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("a tier of {} blocks", size),
                   .next_step = fmt::format("use 0 to {}", kMostBlocks)};
    }
  }
  return ok();
}

}  // namespace

TierSizes recorded_sizes(const SourceEvents& recording) {
  TierSizes sizes;
  for (const Event& event : recording.events) {
    if (event.type != EventType::kTier) continue;
    const int64_t all = int64_t{high_of(event.a)} + high_of(event.b) + low_of(event.b);
    int64_t& size = event.from == 0 ? sizes.device : event.from == 1 ? sizes.host : sizes.disk;
    size = std::max(size, std::min(all, kMostBlocks));
  }
  return sizes;
}

RecordedHits recorded_hits(const SourceEvents& recording) {
  RecordedHits hits;
  for (const Event& event : recording.events) {
    if (event.type != EventType::kHit) continue;
    hits.asked += event.a;
    hits.host += high_of(event.b);
    hits.disk += low_of(event.b);
  }
  return hits;
}

Result<ModelResult> replay_in_model(const SourceEvents& recording, const TierSizes& sizes) {
  return try_catch([&]() -> Result<ModelResult> {
    TORPOR_RETURN_IF_ERROR(check(sizes));
    TORPOR_ASSIGN_OR_RETURN(Tiers tiers, Tiers::create(sizes));
    ModelResult result{.sizes = sizes};
    std::map<uint32_t, std::vector<BlockKey>> chains;  // by request, as far as they are known
    for (const Event& event : recording.events) {
      if (event.type != EventType::kKey || event.a >= event.b || event.b > kMostKeys) continue;
      std::vector<BlockKey>& chain = chains[event.request];
      const bool prompt = static_cast<KeyOf>(event.to) == KeyOf::kPrompt;
      if (prompt && event.a == 0) chain.clear();  // the number belongs to a new request
      if (event.a != chain.size()) continue;      // keys are missing: no request would find the blocks behind them
      chain.push_back(key_of(event));
      if (event.a + 1 < event.b) continue;
      if (prompt) {
        ++result.requests;
        result.asked += chain.size();
        tiers.find(chain, result.found);
      }
      tiers.put(chain);
    }
    if (result.requests == 0) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = "no keys of requests are in this recording",
                   .next_step = "record an engine with the option events_keys"};
    }
    return result;
  });
}

}  // namespace torpor::console
