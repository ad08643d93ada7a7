// SPDX-License-Identifier: Apache-2.0
// KeyTable: maps a block's key to its slots, one entry for each key. Open addressing: cells hold indices of entries,
// which lie in an array of their own. A lookup reads one cache line of cells and one entry. The table also remembers
// which namespaces are retired.
//
// It has space for a fixed number of keys from the beginning: only create() and retire() allocate or fail. Owner and
// threads: BlockIndex.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/block_locations.h"
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
    ByStore<SlotRef> refs;
    bool empty() const {
      return !refs[StoreId::kHost].any() && !refs[StoreId::kDisk].any() && !refs[StoreId::kRemote].any();
    }
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
  // Look up all keys in order, and load ahead what is read next. Call `found` with the position of each key and its
  // entry, until it returns false. The entry is -1 if there is none, the key does not fit or its namespace is retired.
  template <class Found>
  void look_up(std::span<const BlockKey> keys, Found found) const;

  // Retire a namespace: look_up() finds none of its keys. Its entries stay until they are erased. kResourceExhausted:
  // no memory; nothing has changed.
  Status retire(uint32_t space);
  bool retired(uint32_t space) const { return space < retired_.size() && retired_[space] != 0; }

  Entry& operator[](int32_t entry) { return entries_[entry]; }
  const Entry& operator[](int32_t entry) const { return entries_[entry]; }
  size_t size() const { return size_; }
  size_t bytes() const { return cells_.bytes() + entries_.bytes() + retired_.capacity(); }
  // Load the key's cells into the processor's cache before a lookup.
  void prefetch_cells(uint32_t hash) const { __builtin_prefetch(&cells_[home(hash)]); }
  // For checks: every cell's entry can be found, and no other entry is counted. kInternal: the first contradiction.
  Status check() const;

 private:
  struct Cell {
    uint32_t hash;
    uint32_t entry;  // index plus 1; 0: empty, which ends a search
  };
  // How many keys ahead look_up() loads: far enough that memory has answered when a key's turn comes.
  static constexpr size_t kAhead = 8;

  void prefetch_entry(uint32_t hash) const;
  int64_t home(uint32_t hash) const { return static_cast<int64_t>((uint64_t{hash} * cells_.size()) >> 32); }
  int64_t next(int64_t cell) const { return cell + 1 == static_cast<int64_t>(cells_.size()) ? 0 : cell + 1; }
  FlatArray<Cell> cells_;
  FlatArray<Entry> entries_;
  size_t size_ = 0;
  int32_t fresh_ = 0;  // entries from here on were never used
  // The first freed entry, or -1. Each freed entry has the next one's index plus 1 in `group_and_space`.
  int32_t free_ = -1;
  std::vector<uint8_t> retired_;  // by space
};

template <class Found>
void KeyTable::look_up(std::span<const BlockKey> keys, Found found) const {
  const size_t size = keys.size();
  std::array<uint32_t, 4 * kAhead> hashes;  // of the keys up to 2 kAhead ahead
  const auto hash = [&](size_t at) -> uint32_t& { return hashes[at % hashes.size()]; };
  const auto take_up = [&](size_t at) {
    if (at >= size) return;
    hash(at) = hash_of(keys[at]);
    prefetch_cells(hash(at));
  };
  const auto look_at = [&](size_t at) {
    if (at < size) prefetch_entry(hash(at));
  };
  for (size_t at = 0; at < std::min(size, 2 * kAhead); ++at) take_up(at);
  if (size > 1) {  // for a single key prefetching gains nothing
    for (size_t at = 0; at < std::min(size, kAhead); ++at) look_at(at);
  }
  for (size_t at = 0; at < size; ++at) {
    take_up(at + 2 * kAhead);
    look_at(at + kAhead);
    const bool findable = fits(keys[at]) && !retired(keys[at].space);
    if (!found(at, findable ? find(keys[at], hash(at)) : -1)) return;
  }
}

}  // namespace torpor
