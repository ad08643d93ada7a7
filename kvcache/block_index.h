// SPDX-License-Identifier: Apache-2.0
// BlockIndex: maps a key to its slots in host memory, on disk and in a remote store, and decides what is evicted.
//
// It knows keys, slots and pins, and never touches bytes. A slot number means the same on every rank. A slot is free →
// reserved → visible → free. A slot is visible only after all ranks proved its bytes; only slots without a pin are
// evicted. In host memory the order of eviction is: stale blocks, which no key finds (retired namespaces, private
// slots); then clean blocks, which are on disk too; then dirty ones; within each kind, the least recently used first.
// Disk slots are (segment, position), and disk space is freed by evicting a whole segment without pins
// (kvcache/disk_segments.h).
//
// Its parts: KeyTable has an entry for each key, with the key's slots; StoreSlots has the state of each slot of one
// store, and the key's entry (kvcache/store_slots.h). The index keeps the two alike: it changes entries when states
// change. Ranks, subscribers of cache events and the console learn by its reports what has changed
// (kvcache/index_reports.h).
//
// Owner and threads: the scheduler, on its one thread. Failure: all memory is allocated at the beginning, so later
// calls do not run out of it. A call that does not fit the state of its slot (a second commit, an unpin without a pin)
// changes nothing; check() returns the first such call from then on.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/event.h"
#include "kvcache/block_locations.h"
#include "kvcache/disk_segments.h"
#include "kvcache/flat_array.h"
#include "kvcache/index_reports.h"
#include "kvcache/key_table.h"
#include "kvcache/store_slots.h"

namespace torpor {

struct BlockIndexOptions {
  int32_t host_slots = 0;
  int32_t disk_segments = 0;  // 0, or at least 2
  int32_t segment_slots = 0;
  int32_t remote_slots = 0;         // most keys known to be in the remote store
  int32_t device_blocks = 0;        // blocks whose backing is remembered
  int32_t remembered_removals = 0;  // most keys that wait for IndexReports::take_removed()
  int32_t block_tokens = 0;         // for events
  Status validate() const;          // kInvalidArgument names the field
};

struct LeavingBlock {  // a block of the segment that is evicted next
  Slot slot = -1;
  BlockKey key;
  bool used = false;  // pinned since it was committed
  bool on_host = false;
};

class BlockIndex {
 public:
  // kInvalidArgument: invalid options. kResourceExhausted: no memory.
  static Result<std::unique_ptr<BlockIndex>> create(const BlockIndexOptions& options, EventPort port = {});
  BlockIndex(const BlockIndex&) = delete;  // its parts refer to each other
  BlockIndex& operator=(const BlockIndex&) = delete;

  // Set `places` for the blocks of `chain`, up to the first block that no store has; return the number of that block.
  // Takes one lookup for each key. The blocks may be evicted by the next reserve(): pin them before.
  size_t run(std::span<const BlockKey> chain, std::span<BlockLocations> places) const;
  // Set `places` for each key; a key that no store has gets no slot.
  void find_each(std::span<const BlockKey> keys, std::span<BlockLocations> places) const;
  // Return whether a slot of this store is reserved for the key: its bytes are on their way.
  bool is_coming(StoreId store, const BlockKey& key) const;
  // While `hidden`, find nothing in the remote store: it does not answer.
  void hide_remote(bool hidden) { remote_hidden_ = hidden; }
  // Load the key's cells into the processor's cache before a lookup.
  void prefetch(const BlockKey& key) const { table_.prefetch_cells(KeyTable::hash_of(key)); }

  // Return a pinned slot that is not visible yet; evict if needed. Without a key the slot is private: run() does not
  // find it. Private slots exist in host memory only; on disk such a block belongs into the checkpoint's own file.
  // kResourceExhausted: all slots are pinned. kFailedPrecondition: the store has the key, or it is on its way, or its
  // namespace is retired. kInvalidArgument: the key's group or namespace is out of range.
  Result<Slot> reserve(StoreId store, const BlockKey* key);
  // Make a reserved slot visible, after all ranks proved its bytes. The pin of reserve() stays. Without `emits` no
  // event is emitted: a caller that commits very many blocks emits one of its own.
  void commit(StoreId store, Slot slot, bool emits = true);
  // End a reservation and its pin: the slot does not become visible. `unproven`: a copy may still write there, so the
  // slot (on disk: its segment) is never used again.
  void abandon(StoreId store, Slot slot, bool unproven);
  // Drop a visible slot because a load found its bytes changed. It is freed with its last pin.
  void damaged(StoreId store, Slot slot);
  // Drop a visible slot for an operator. Return false if it is not visible, or pinned; it then stays.
  bool drop(StoreId store, Slot slot);
  void pin(StoreId store, Slot slot);
  void unpin(StoreId store, Slot slot);

  // Note that the visible slot has the bytes of this version of the device block. `version` must not be kNone.
  void back(int32_t block, ContentVersion version, StoreId store, Slot slot);
  // Return the slots that have the bytes of this version of the device block; none for kNone or another version.
  BlockLocations backing(int32_t block, ContentVersion version) const;
  // Retire a namespace: its keys are no longer found or accepted, and its blocks are evicted first. Takes time
  // proportional to all slots. kResourceExhausted: no memory; nothing has changed.
  Status retire(uint32_t space);

  // Add no more blocks to the open segment: it is full in bytes, or its file failed.
  void close_segment() { segments_.close(); }
  // Return how many disk slots can be reserved before a segment is evicted.
  int64_t disk_room() const { return segments_.room(); }
  // Return the visible blocks of the segment that is evicted next. To keep one, reinsert() it before that.
  std::vector<LeavingBlock> leaving() const;
  // Reserve a new disk slot for the block in `disk_slot`, and return it. Pin the old slot before; copy its bytes into
  // the new slot afterwards, and commit() that, which replaces the old one. kFailedPrecondition: the old slot is not
  // visible and pinned, or was reinserted already. kResourceExhausted: no disk slot is free.
  Result<Slot> reinsert(Slot disk_slot);
  int32_t segment_of(Slot disk_slot) const { return segments_.segment_of(disk_slot); }

  // Return what has changed, to be taken.
  IndexReports& reports() { return reports_; }
  StoreCounts counts(StoreId store) const { return stores_[store].counts(); }
  size_t keys() const { return table_.size(); }
  uint64_t bytes() const;  // memory, once everything is in use
  // Check all invariants. kInternal names the first contradiction, or the first call that did not fit its slot's state.
  // Takes time proportional to all slots.
  Status check() const;

 private:
  friend class BlockIndexCheck;  // kvcache/block_index_check.cpp
  using State = StoreSlots::State;
  struct Backing {
    ContentVersion version;
    ByStore<int32_t> slots;  // plus 1
    ByStore<uint32_t> generations;
  };

  BlockIndex() = default;
  void misused(std::string_view call, StoreId store, int64_t slot) noexcept;
  Slot free_slot(StoreId store);
  void start(StoreId store, Slot slot, int32_t entry, Slot replaces = -1);
  void hide(StoreId store, Slot slot, DropReason reason);
  void unlink(StoreId store, Slot slot);
  void evict_segment(int32_t segment);

  BlockIndexOptions options_;
  bool remote_hidden_ = false;
  KeyTable table_;
  ByStore<StoreSlots> stores_;
  DiskSegments segments_;
  FlatArray<Backing> backings_;
  IndexReports reports_;
  std::string misuse_;
};

}  // namespace torpor
