// SPDX-License-Identifier: Apache-2.0
// BlockIndex: which key lies where, in host memory, on disk and in a remote store, and what may go when room is needed.
//
// It knows keys, slots and pins, and never touches bytes: slots are numbers that mean the same on every rank. A slot is
// free → reserved → visible → free. Only what was proven on all ranks is visible; only what nobody pins goes. What goes
// first: in host memory what no key finds any more (retired spaces, private slots), then clean blocks (on disk too),
// then dirty ones, and of each kind what was used longest ago. On disk slots are (segment, position), filled in order
// and never again; room comes by whole segments that nobody pins: one without a useful record, else the oldest.
//
// What becomes findable in host memory or on disk and what no longer is, is told as events, one a block; a space that
// is retired as one a store.
//
// Owner: the scheduler, on its one thread. All memory is taken at the beginning, so nothing fails later for want of it.
// A call that does not fit the state of its slot (a second commit, an unpin without a pin) changes nothing and is what
// check() says from then on.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/event.h"
#include "kvcache/block_locations.h"
#include "kvcache/block_state.h"
#include "kvcache/flat_array.h"
#include "kvcache/key_table.h"
#include "kvcache/slot_list.h"

namespace torpor {

struct BlockIndexOptions {
  int32_t host_slots = 0;
  int32_t disk_segments = 0;  // none, or at least two
  int32_t segment_slots = 0;
  int32_t remote_slots = 0;         // keys of which it is remembered that the remote store has them
  int32_t device_blocks = 0;        // of which the backing is remembered
  int32_t remembered_removals = 0;  // most keys that wait for take_removed()
  int32_t block_tokens = 0;         // for events
  Status validate() const;          // kInvalidArgument names the field
};

struct LeavingBlock {  // of the segment that goes next
  Slot slot = -1;
  BlockKey key;
  bool used = false;  // pinned since it was committed
  bool on_host = false;
};

struct RemovedBlock {  // no longer found in this store
  StoreId store = StoreId::kHost;
  BlockKey key;
};
struct RemovedBlocks {
  std::vector<RemovedBlock> blocks;
  uint64_t lost = 0;  // more than were remembered
};

struct StoreCounts {
  int64_t reserved = 0;
  int64_t visible = 0;
  int64_t doomed = 0;  // no longer found, but pinned
  int64_t quarantined = 0;
  uint64_t evicted_stale = 0;  // on disk all that was visible and retired
  uint64_t evicted_clean = 0;  // and all other blocks of the remote store
  uint64_t evicted_dirty = 0;  // the only copy: from host memory not on disk, from disk not in host memory
};

class BlockIndex {
 public:
  // kInvalidArgument; kResourceExhausted: no memory.
  static Result<std::unique_ptr<BlockIndex>> create(const BlockIndexOptions& options, EventPort port = {});

  // Where the blocks of a chain are, up to the first that is nowhere, whose number is returned. One probe a key for all
  // stores. What is found is not kept: pin it before anything else is reserved.
  size_t run(std::span<const BlockKey> chain, std::span<BlockLocations> places) const;
  // Where each of them is, whether the others are anywhere or not.
  void find_each(std::span<const BlockKey> keys, std::span<BlockLocations> places) const;
  // While it is hidden, nothing is found in the remote store: it does not answer.
  void hide_remote(bool hidden) { remote_hidden_ = hidden; }
  // It is asked for soon.
  void prefetch(const BlockKey& key) const { table_.prefetch_cells(KeyTable::hash_of(key)); }

  // A slot for a block: pinned, not visible yet. Without a key it is private: no run() finds it (host memory only; on
  // disk such a block belongs into the checkpoint's own file). Evicts if need be. kResourceExhausted: all is pinned.
  // kFailedPrecondition: the key is there already or on its way, or its space is retired.
  Result<Slot> reserve(StoreId store, const BlockKey* key);
  // Proven on all ranks: visible, and still pinned by who reserved it.
  // `tell`: as an event; who commits very many at once tells them by one of its own.
  void commit(StoreId store, Slot slot, bool tell = true);
  // It will not become visible, and the pin of who reserved it ends. `unproven`: somebody may still write there; the
  // slot (on disk: its segment) is never used again.
  void abandon(StoreId store, Slot slot, bool unproven);
  // A load found that its bytes are not what they were: a miss from now on, free when nobody pins it any more.
  void damaged(StoreId store, Slot slot);
  // Somebody does not want it found any more. False: it is not there, or it is pinned, and stays.
  bool drop(StoreId store, Slot slot);
  void pin(StoreId store, Slot slot);
  void unpin(StoreId store, Slot slot);

  // The visible slot has the bytes that the device block has now. kNone or another version: nothing has them.
  void back(int32_t block, ContentVersion version, StoreId store, Slot slot);
  BlockLocations backing(int32_t block, ContentVersion version) const;
  // No key of this space is found or taken any more; what it has goes first. Takes time for all slots.
  // kResourceExhausted: no memory; nothing has changed.
  Status retire(uint32_t space);

  // The open segment takes no more: it is full in bytes, or its file failed.
  void close_segment();
  // Slots on disk that can be reserved before a segment has to go.
  int64_t disk_room() const;
  // The visible blocks of the segment that goes next. Who wants to keep one appends it again before that: pins the old
  // slot and copies it into append_again(old), which takes its place with commit().
  std::vector<LeavingBlock> leaving() const;
  Result<Slot> append_again(Slot disk_slot);
  int32_t segment_of(Slot disk_slot) const { return disk_slot / options_.segment_slots; }

  // Since the last call, in their order; for the next plan, before its jobs. Takes memory; without any it is empty, and
  // the next call has all.
  std::vector<Dropped> take_dropped();
  // The same for keys, and for who watches.
  RemovedBlocks take_removed() { return std::exchange(removed_, {}); }
  bool any_removed() const { return !removed_.blocks.empty() || removed_.lost > 0; }
  StoreCounts counts(StoreId store) const { return store_of(store).counts; }
  size_t keys() const { return table_.size(); }
  uint64_t bytes() const;  // of memory when everything is in use
  // Everything against everything, and the first call that did not fit. kInternal. Takes time for all slots.
  Status check() const;

 private:
  enum class State : uint8_t { kFree, kReserved, kVisible, kDoomed, kQuarantined, kSpent };  // spent: disk only
  enum class Order : uint8_t { kNone, kStale, kClean, kDirty };                              // in which list
  struct SlotRecord {
    int32_t before;  // in its list; on disk: the slot that it is written to replace, or -1
    int32_t after;   // in its list or the free ones; on disk: the slot that is to replace it, or -1
    int32_t entry;   // of the table; -1: no key finds it
    uint32_t pins;
    uint32_t generation;  // changes when it is no longer visible
    State state;
    Order order;
    bool used;
  };
  static_assert(sizeof(SlotRecord) == 24);
  struct Store {
    FlatArray<SlotRecord> slots;
    int32_t size = 0;
    int32_t fresh = 0;              // slots from here on were never used
    int32_t free = -1;              // those that were let go of; not on disk
    std::array<SlotList, 4> lists;  // by Order; the first is not used
    StoreCounts counts;
  };
  struct Segment {
    int32_t before;
    int32_t after;
    int32_t written;  // positions handed out
    int32_t useful;   // visible, of a space in use
    uint64_t pins;    // of all its slots together
    bool closed;
    bool stale;  // closed and nothing useful: which list it is in
  };
  struct Backing {
    ContentVersion version;
    std::array<int32_t, kStores> slots;  // plus 1
    std::array<uint32_t, kStores> generations;
  };

  BlockIndex() = default;
  Store& store_of(StoreId store) { return stores_[static_cast<size_t>(store)]; }
  const Store& store_of(StoreId store) const { return stores_[static_cast<size_t>(store)]; }
  SlotRecord* known(StoreId store, Slot slot);  // null: no such slot, or it was never used
  SlotRef& ref(int32_t entry, StoreId store) { return table_[entry].refs[static_cast<size_t>(store)]; }
  bool retired(uint32_t space) const { return space < retired_.size() && retired_[space] != 0; }
  bool stale(const SlotRecord& record) const { return record.entry < 0 || retired(table_[record.entry].space()); }
  void misused(std::string_view call, StoreId store, int64_t slot) noexcept;
  template <class Found>
  void probe(std::span<const BlockKey> keys, Found found) const;
  void prefetch_those_behind(StoreId store, Slot slot) const;
  Slot free_slot(StoreId store);
  Slot next_position();
  void start(StoreId store, Slot slot, int32_t entry);
  void return_slot(StoreId store, Slot slot);
  void hide(StoreId store, Slot slot, DropReason reason);
  void tell(EventType type, StoreId store, Slot slot, DropReason reason = {}) const;
  void tell_retired(uint32_t space) const;
  void note_removed(StoreId store, const SlotRecord& record) noexcept;
  void unlink(StoreId store, Slot slot);
  Order order_of(StoreId store, const SlotRecord& record) const;
  void line_up(StoreId store, Slot slot);
  void leave_line(StoreId store, Slot slot);
  void host_reordered(int32_t entry);
  void replace(Slot by);
  int32_t next_to_leave() const;
  void evict_segment(int32_t segment);
  void useful_changed(int32_t segment, int by);
  void recount_segments();
  Status check_slots(StoreId store) const;
  Status check_segments() const;
  Status check_entries() const;

  BlockIndexOptions options_;
  EventPort port_;
  bool remote_hidden_ = false;
  KeyTable table_;
  std::array<Store, kStores> stores_;
  FlatArray<Segment> segments_;
  SlotList closed_;  // segments, the oldest first
  SlotList stale_segments_;
  int32_t open_ = -1;
  int32_t fresh_segments_ = 0;
  FlatArray<Backing> backings_;
  std::vector<uint8_t> retired_;  // by space
  std::vector<Dropped> dropped_;
  std::vector<uint64_t> in_dropped_;  // host slots and then segments, a bit each: each is named once
  RemovedBlocks removed_;
  std::string misuse_;
};

}  // namespace torpor
