// SPDX-License-Identifier: Apache-2.0
// KeyTable: maps a block's key to its slots, one entry for each key. Open addressing: cells hold indices of entries,
// which lie in an array of their own. A lookup reads one cache line of cells and one entry.
//
// It has space for a fixed number of keys from the beginning: only create() allocates or fails. Owner and threads:
// BlockIndex.
#pragma once

#include <cstdint>

#include "kvcache/flat_array.h"
#include "offload/block_key.h"

namespace torpor {

// A slot in an entry, with a bit for "visible"; zero: none.
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
  // Make an empty table for `keys` keys. kResourceExhausted: no memory.
  static Result<KeyTable> create(size_t keys);

  static bool fits(const BlockKey& key) { return key.group < kMostGroups && key.space < kMostSpaces; }
  static uint32_t hash_of(const BlockKey& key);
  // Return the index of the key's entry; -1 if there is none. Precondition here and below: fits(key), and `hash` is
  // hash_of(key).
  int32_t find(const BlockKey& key, uint32_t hash) const;
  // Add an entry that names no slot yet. Preconditions: the key has no entry, and the table is not full.
  int32_t insert(const BlockKey& key, uint32_t hash);
  void erase(int32_t entry);

  Entry& operator[](int32_t entry) { return entries_[entry]; }
  const Entry& operator[](int32_t entry) const { return entries_[entry]; }
  size_t size() const { return size_; }
  size_t bytes() const { return cells_.bytes() + entries_.bytes(); }
  // To look up many keys at once: prefetch the cells, later the entry, then find().
  void prefetch_cells(uint32_t hash) const { __builtin_prefetch(&cells_[home(hash)]); }
  void prefetch_entry(uint32_t hash) const;
  // For checks: every cell's entry can be found, and no other entry is counted. kInternal: the first contradiction.
  Status check() const;

 private:
  struct Cell {
    uint32_t hash;
    uint32_t entry;  // index plus 1; 0: empty, which ends a search
  };
  int64_t home(uint32_t hash) const { return static_cast<int64_t>((uint64_t{hash} * cells_.size()) >> 32); }
  int64_t next(int64_t cell) const { return cell + 1 == static_cast<int64_t>(cells_.size()) ? 0 : cell + 1; }
  FlatArray<Cell> cells_;
  FlatArray<Entry> entries_;
  size_t size_ = 0;
  int32_t fresh_ = 0;  // entries from here on were never used
  // The first freed entry, or -1. Each freed entry has the next one's index plus 1 in `group_and_space`.
  int32_t free_ = -1;
};

}  // namespace torpor
