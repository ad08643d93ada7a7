// SPDX-License-Identifier: Apache-2.0
// IndexReports: what has changed in a BlockIndex, for those who follow it.
//
//   the ranks        forget host slots and disk segments that are used for other blocks: take_dropped()
//   cache events     tell subscribers which keys are found no more: take_removed()
//   the console      gets an event for each block that becomes visible or is dropped in host memory or on disk. Blocks
//                    of the remote store have none, because other engines use it too
//
// All memory but that of removed keys is allocated at the beginning. Owner and threads: the index's.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/event.h"
#include "kvcache/block_locations.h"
#include "kvcache/block_state.h"

namespace torpor {

struct RemovedBlock {  // no longer found in this store
  StoreId store = StoreId::kHost;
  BlockKey key;
};
struct RemovedBlocks {
  std::vector<RemovedBlock> blocks;
  uint64_t lost = 0;  // removals beyond `remembered_removals`
};

class IndexReports {
 public:
  IndexReports() = default;
  // `block_tokens`: of a block, for events. `remembered_removals`: the most keys that wait for take_removed(); 0: none
  // is remembered. Throws if there is no memory.
  IndexReports(EventPort port, int32_t block_tokens, int32_t host_slots, int32_t disk_segments,
               int32_t remembered_removals);

  // Note that the ranks are to forget a host slot, or a disk segment. A second call before take_dropped() does nothing.
  void drop(StoreId store, int32_t number) noexcept;
  // Return what was dropped since the last call, in order, for the next plan, before its jobs. Needs memory; without
  // any it returns nothing, and the next call returns all.
  std::vector<Dropped> take_dropped();

  bool remembers_removals() const { return remembered_removals_ > 0; }
  void remove(StoreId store, const BlockKey& key) noexcept;
  // Return the keys that were removed since the last call, for cache events.
  RemovedBlocks take_removed() { return std::exchange(removed_, {}); }
  bool any_removed() const { return !removed_.blocks.empty() || removed_.lost > 0; }

  bool emits(StoreId store) const { return port_.on() && store != StoreId::kRemote; }
  // Emit an event for a block. Preconditions here and below: emits(store).
  void emit_registered(StoreId store, Slot slot, const BlockKey& key) const;
  void emit_dropped(StoreId store, Slot slot, const BlockKey& key, DropReason reason) const;
  // Emit a state of a block, which has a key or has none yet. Precondition: emits_states(store).
  bool emits_states(StoreId store) const { return port_.blocks() && store != StoreId::kRemote; }
  void emit_state(StoreId store, Slot slot, uint64_t generation, const std::optional<BlockKey>& key, BlockState from,
                  BlockState to) const;
  // Emit one event without a key, for so many blocks of a retired namespace.
  void emit_cleared(StoreId store, uint64_t blocks) const;

  uint64_t bytes() const { return dropped_.capacity() * sizeof(Dropped) + marked_.size() * sizeof(uint64_t); }
  bool consistent() const;  // everything marked is listed once

 private:
  struct Bit {
    uint64_t& word;
    uint64_t mask;
  };
  Bit bit_of(StoreId store, int32_t number);

  EventPort port_;
  int32_t block_tokens_ = 0;
  int32_t host_slots_ = 0;
  int32_t remembered_removals_ = 0;
  std::vector<Dropped> dropped_;
  std::vector<uint64_t> marked_;  // a bit for each host slot, then segment: it is in dropped_
  RemovedBlocks removed_;
};

}  // namespace torpor
