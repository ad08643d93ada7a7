// Onboarding: KV blocks on their way back up into the device, when a request's prefix is found below.
//
// Each block is looked for in the stores in their order. Its digest must be right, otherwise it is dropped from its
// store: a miss, never data (I8). Blocks of a store that is not addressable (disk) go to the device directly, through
// staging memory, or by way of an addressable store above it, which then has them too. Threads: any. Pool, layout,
// transfer engine and stores outlive it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "kvcache/block_routes.h"
#include "kvcache/block_tier.h"
#include "kvcache/kv_layout.h"
#include "offload/transfer_engine.h"

namespace torpor {

enum class DiskOnboarding : uint8_t { kDirect, kStaged };

struct OnboardingInfo {
  std::vector<uint64_t> onboarded;  // blocks that came from each store, as far as they reached the device
  uint64_t damaged = 0;             // dropped: unreadable, or another digest
  uint64_t promoted = 0;            // staged
};

class Onboarding {
 public:
  // `stores`: nearest first; kStaged does nothing unless the first one is addressable.
  Onboarding(BlockPool& device, const KvLayout& layout, TransferEngine& transfers, std::vector<BlockTier*> stores,
             DiskOnboarding mode = DiskOnboarding::kDirect)
      : device_(device), layout_(layout), transfers_(transfers), stores_(std::move(stores)), mode_(mode) {
    info_.onboarded.resize(stores_.size());
  }

  // Brings the longest run of `chain` that the stores have, together, up into the device pool; returns it registered
  // there, first block first, perhaps empty. kResourceExhausted when the device pool has no room: nothing is taken
  // then.
  Result<std::vector<BlockRef>> onboard(std::span<const BlockIdentity> chain);
  OnboardingInfo info() const;

 private:
  struct Source {
    size_t store = 0;
    BlockRef block;
    Status status;
    bool unproven = false;
  };
  std::vector<Source> find(std::span<const BlockIdentity> chain);
  void promote(std::vector<Source>& sources);
  void drop_damaged(const Source& source);

  BlockPool& device_;
  const KvLayout& layout_;
  TransferEngine& transfers_;
  const std::vector<BlockTier*> stores_;
  const DiskOnboarding mode_;
  mutable Mutex mutex_;
  OnboardingInfo info_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
