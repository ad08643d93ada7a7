// SPDX-License-Identifier: Apache-2.0
// StoreSlots: the slots of one store of a BlockIndex: the state and the pins of each, which are free, and in which
// order blocks are evicted.
//
//   free → reserved → visible → free
//
// A slot is doomed if its block is dropped while it has pins; it is free after the last one. A slot is quarantined if a
// copy may write to it at any time; it stays so. In host memory and in the remote store, visible slots without a pin
// are in one of three lists: stale, clean and dirty blocks (kvcache/block_index.h), each the least recently used first.
// On disk whole segments are evicted (kvcache/disk_segments.h): there a slot is spent instead of free until its segment
// is emptied, and it may replace an older slot of the same key.
//
// A slot has the number of its key's entry. This class reads there whether the key's namespace is retired, and which
// other stores have the block; the index changes entries. It reports each state to the console, and to the ranks each
// host slot that becomes free (kvcache/index_reports.h).
//
// Owner and threads: the index's. Failure: all memory is allocated at the beginning. The index checks that a call fits
// the state of its slot.
#pragma once

#include <array>
#include <cstdint>

#include "base/status.h"
#include "kvcache/block_locations.h"
#include "kvcache/block_state.h"
#include "kvcache/flat_array.h"
#include "kvcache/index_reports.h"
#include "kvcache/key_table.h"
#include "kvcache/slot_list.h"

namespace torpor {

struct StoreCounts {
  int64_t reserved = 0;
  int64_t visible = 0;
  int64_t doomed = 0;  // no longer found, but still pinned
  int64_t quarantined = 0;
  // Evicted blocks. Stale: retired or private; on disk, every retired block. Clean: another copy remains; every other
  // block of the remote store. Dirty: the only copy (a host block that is not on disk, a disk block that is not in host
  // memory).
  uint64_t evicted_stale = 0;
  uint64_t evicted_clean = 0;
  uint64_t evicted_dirty = 0;
};

class StoreSlots {
 public:
  enum class State : uint8_t { kFree, kReserved, kVisible, kDoomed, kQuarantined, kSpent };  // spent: disk only
  enum class Order : uint8_t { kNone, kStale, kClean, kDirty };                              // the list that it is in
  struct Record {
    int32_t before;  // in its list; on disk: the slot that it replaces once committed, or -1
    int32_t after;   // in its list or the free list; on disk: the slot that replaces it, or -1
    int32_t entry;   // in the table; -1: no key finds it
    uint32_t pins;
    uint32_t generation;  // changes when the slot is dropped
    State state;
    Order order;
    bool used;  // pinned since it was committed
  };
  static_assert(sizeof(Record) == 24);

  StoreSlots() = default;
  // `keys` and `reports`: the index's; they outlive this object. kResourceExhausted: no memory.
  static Result<StoreSlots> create(StoreId store, int32_t size, const KeyTable& keys, IndexReports& reports);

  int32_t size() const { return static_cast<int32_t>(records_.size()); }
  const Record& operator[](Slot slot) const { return records_[slot]; }
  // Return the slot's record; null: no such slot, or it is free.
  const Record* known(Slot slot) const {
    return slot >= 0 && slot < size() && records_[slot].state != State::kFree ? &records_[slot] : nullptr;
  }
  // Return whether no key finds the block, or only one of a retired namespace.
  bool stale(Slot slot) const {
    const int32_t entry = records_[slot].entry;
    return entry < 0 || keys_->retired((*keys_)[entry].space());
  }
  const StoreCounts& counts() const { return counts_; }
  // Return the number of visible blocks that are not stale among these slots.
  int32_t useful(Slot begin, Slot end) const;

  // Not on disk, where DiskSegments hands out slots: return whether a slot is free; take one, which must be there.
  bool has_free() const { return free_ >= 0 || fresh_ < size(); }
  Slot take_free();
  // Return the slot that is evicted next; -1 if all are in use. Not on disk.
  Slot next_to_leave() const;
  // Count the eviction of a visible slot. Call it before hide().
  void count_evicted(Slot slot);
  // Free a slot without pins whose segment is emptied.
  void empty(Slot slot) { records_[slot].state = State::kFree; }

  // Reserve a slot that was taken, with one pin. `entry`: of its key, or -1. `replaces`: on disk, a visible slot of the
  // same key, or -1.
  void reserve(Slot slot, int32_t entry, Slot replaces = -1);
  // Make a reserved slot visible.
  void commit(Slot slot);
  // End a reservation, not its pin: doom the slot, or quarantine it if it is `unproven`.
  void abandon(Slot slot, bool unproven);
  // Drop a visible slot: free it, or doom it if it has pins. The index unlinks it.
  void hide(Slot slot);
  void pin(Slot slot);
  void unpin(Slot slot);

  // Take the slot's entry away. Return what the entry is to name instead: nothing, or on disk the other slot of the two
  // of which one was to replace the other.
  SlotRef unlink(Slot slot);
  // On disk: let a slot take the entry of the slot that it replaces. Return that slot; -1 if it replaces none.
  Slot replace(Slot by);

  // Append the slot to another list if its block is no longer of the kind of the list that it is in: it came to disk,
  // or left it. Does nothing for -1.
  void reorder(Slot slot);
  // Append all blocks that became stale to the list of those, in their order.
  void reorder_stale();

  uint64_t bytes() const { return records_.bytes(); }  // memory, once everything is in use

 private:
  friend class BlockIndexCheck;  // kvcache/block_index_check.cpp

  Order order_of(Slot slot) const;
  void line_up(Slot slot);
  void leave_line(Slot slot);
  void give_back(Slot slot);
  void emit(Slot slot, BlockState from, BlockState to) const;

  StoreId store_ = StoreId::kHost;
  const KeyTable* keys_ = nullptr;
  IndexReports* reports_ = nullptr;
  FlatArray<Record> records_;
  int32_t fresh_ = 0;              // slots from here on were never used; not on disk
  int32_t free_ = -1;              // head of the list of freed slots; not on disk
  std::array<SlotList, 4> lists_;  // by Order; the first is unused
  StoreCounts counts_;
};

}  // namespace torpor
