// The ways of KV blocks down, as an OffloadPipeline drives them: from the device into a store, and from host memory
// into the next store. What was registered in the target may be sent on from there: on_registered().
//
// A block is registered in the target only after its copy is proven (I2). A copy that may still be running keeps both
// its sides out of use for ever (I3). Threads: as BlockRoute. Pools, layout, stores and transfer engine
// outlive the routes.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "kvcache/block_tier.h"
#include "kvcache/kv_layout.h"
#include "offload/block_route.h"
#include "offload/transfer_engine.h"

namespace torpor {

// The name by which a pipeline knows a registered block.
BlockName name_of(const BlockRef& block);

// Where the bytes of a device block lie, as the chunk of a store's slot.
ChunkPlan plan_of(const KvLayout& layout, int32_t device_block, const SavedChunk& chunk);

class RouteIntoStore : public BlockRoute {
 public:
  using Registered = std::function<void(std::vector<BlockName>)>;

  std::string_view name() const override { return name_; }  // "device to host", …
  bool present(const Digest& key) const override { return target_.contains(key); }
  bool upgrade(const BlockName& block) override;
  void transfer(std::span<const BlockName> blocks, std::span<BlockOutcome> outcomes) override;

  // Called after each transfer, on its thread, with the target's blocks. Set before the route is used.
  void on_registered(Registered registered) { registered_ = std::move(registered); }
  int64_t quarantined() const;  // source blocks whose copy was never proven

 protected:
  struct Move {  // the source is kept, the target is owned and Inflight
    size_t index = 0;
    BlockRef source;
    MutableBlock target;
    SavedChunk saved;
    BlockOutcome outcome = BlockOutcome::kFailed;  // of the copy
  };
  RouteIntoStore(std::string_view from, BlockPool& source, BlockTier& target);
  virtual void copy(std::span<Move> moves) = 0;  // fills saved and outcome
  BlockTier& target() { return target_; }

 private:
  BlockRef take_kept(const BlockName& block);
  BlockOutcome settle(Move& move, std::vector<BlockName>& registered);

  const std::string name_;
  BlockPool& source_;
  BlockTier& target_;
  Registered registered_;
  mutable Mutex mutex_;
  // Upgraded; transferred in nearly the same order.
  std::deque<std::pair<BlockName, BlockRef>> kept_ TORPOR_GUARDED_BY(mutex_);
  int64_t quarantined_ TORPOR_GUARDED_BY(mutex_) = 0;
};

class DeviceRoute final : public RouteIntoStore {
 public:
  DeviceRoute(BlockPool& device, const KvLayout& layout, BlockTier& target, TransferEngine& transfers)
      : RouteIntoStore("device", device, target), layout_(layout), transfers_(transfers) {}

 private:
  void copy(std::span<Move> moves) override;
  const KvLayout& layout_;
  TransferEngine& transfers_;
};

class HostRoute final : public RouteIntoStore {
 public:
  HostRoute(BlockTier& host, BlockTier& target) : RouteIntoStore(host.kind(), host.pool(), target), host_(host) {}

 private:
  void copy(std::span<Move> moves) override;
  BlockTier& host_;
};

}  // namespace torpor
