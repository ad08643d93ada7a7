// SPDX-License-Identifier: Apache-2.0
// KeyTable: from a block's key to where it lies, one entry a key: open addressing over numbers of entries, which lie
// beside each other in an array of their own. A probe reads one line of cells and one entry.
//
// It has room for a fixed number of keys from the beginning: nothing takes memory or fails later. Owner: BlockIndex.
#pragma once

#include <cstdint>

#include "kvcache/flat_array.h"
#include "offload/block_key.h"

namespace torpor {

// A slot as an entry names it; zero: none.
class SlotRef {
 public:
  SlotRef() = default;
  SlotRef(Slot slot, bool visible) : raw_((static_cast<uint32_t>(slot) + 1) << 1 | (visible ? 1u : 0u)) {}
  bool any() const { return raw_ != 0; }
  bool visible() const { return (raw_ & 1) != 0; }
  Slot slot() const { return static_cast<Slot>(raw_ >> 1) - 1; }
  Slot visible_slot() const { return visible() ? slot() : -1; }

 private:
  uint32_t raw_ = 0;
};
inline constexpr int64_t kMostSlots = int64_t{1} << 30;  // of a store
inline constexpr uint32_t kMostGroups = 1u << 8;         // KV cache groups
inline constexpr uint32_t kMostSpaces = 1u << 24;

class KeyTable {
 public:
  struct Entry {
    std::array<uint8_t, 32> hash;
    uint32_t group_and_space;
    std::array<SlotRef, 3> refs;  // by StoreId
    bool empty() const { return !refs[0].any() && !refs[1].any() && !refs[2].any(); }
    uint32_t space() const { return group_and_space >> 8; }
    BlockKey key() const { return {.hash = hash, .group = group_and_space & 255, .space = space()}; }
  };
  static_assert(sizeof(Entry) == 48);

  KeyTable() = default;
  static Result<KeyTable> create(size_t keys);

  static bool fits(const BlockKey& key) { return key.group < kMostGroups && key.space < kMostSpaces; }
  static uint32_t hash_of(const BlockKey& key);
  // The number of its entry, or -1. Precondition of all below: fits(key), `hash` is its hash_of().
  int32_t find(const BlockKey& key, uint32_t hash) const;
  // Precondition: it is not there, and there is room. The entry names no slot yet.
  int32_t insert(const BlockKey& key, uint32_t hash);
  void erase(int32_t entry);

  Entry& operator[](int32_t entry) { return entries_[entry]; }
  const Entry& operator[](int32_t entry) const { return entries_[entry]; }
  size_t size() const { return size_; }
  size_t bytes() const { return cells_.bytes() + entries_.bytes(); }
  // For many probes at once: first the cells, a while later the entry, then find().
  void prefetch_cells(uint32_t hash) const { __builtin_prefetch(&cells_[home(hash)]); }
  void prefetch_entry(uint32_t hash) const;
  // For checks: every cell's entry can be found and no other is counted.
  Status check() const;

 private:
  struct Cell {
    uint32_t hash;
    uint32_t entry;  // plus 1; 0: nothing here, nor anything of this home behind it
  };
  int64_t home(uint32_t hash) const { return static_cast<int64_t>((uint64_t{hash} * cells_.size()) >> 32); }
  int64_t next(int64_t cell) const { return cell + 1 == static_cast<int64_t>(cells_.size()) ? 0 : cell + 1; }
  FlatArray<Cell> cells_;
  FlatArray<Entry> entries_;
  size_t size_ = 0;
  int32_t fresh_ = 0;  // entries from here on were never used
  int32_t free_ = -1;  // the first of those that were let go of; each names the next in its `group_and_space`
};

}  // namespace torpor
