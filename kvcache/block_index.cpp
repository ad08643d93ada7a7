// SPDX-License-Identifier: Apache-2.0
#include "kvcache/block_index.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor {
namespace {

// How many keys ahead to prefetch: far enough that memory has answered when a key's turn comes.
constexpr size_t kAhead = 8;

Error no_room(StoreId store) {
  return {.code = Code::kResourceExhausted,
          .what = fmt::format("every slot of the store {} is in use", name(store)),
          .next_step = "unpin some, or give it more"};
}

}  // namespace

std::string_view name(StoreId store) {
  switch (store) {
    case StoreId::kHost: return "host";
    case StoreId::kDisk: return "disk";
    case StoreId::kRemote: return "remote";
  }
  return "?";
}

Status BlockIndexOptions::validate() const {
  const auto wrong = [](std::string what) {
    return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = "correct the option"};
  };
  for (const auto& [field, value] :
       {std::pair("host_slots", host_slots), std::pair("disk_segments", disk_segments),
        std::pair("segment_slots", segment_slots), std::pair("remote_slots", remote_slots),
        std::pair("device_blocks", device_blocks), std::pair("remembered_removals", remembered_removals)}) {
    if (value < 0 || value >= kMostSlots) return wrong(fmt::format("{} is {}", field, value));
  }
  if (disk_segments == 1) return wrong("disk_segments is 1: one is written while another one goes");
  if ((disk_segments == 0) != (segment_slots == 0)) return wrong("disk_segments and segment_slots go together");
  const int64_t disk_slots = int64_t{disk_segments} * segment_slots;
  if (disk_slots >= kMostSlots) return wrong(fmt::format("the segments have {} slots", disk_slots));
  if (host_slots + disk_slots + remote_slots >= int64_t{2} * kMostSlots)
    return wrong("all stores together have too many slots");
  return ok();
}

Result<std::unique_ptr<BlockIndex>> BlockIndex::create(const BlockIndexOptions& options, EventPort port) {
  return try_catch([&]() -> Result<std::unique_ptr<BlockIndex>> {
    TORPOR_RETURN_IF_ERROR(options.validate());
    std::unique_ptr<BlockIndex> made(new BlockIndex);
    made->options_ = options;
    made->reports_ = IndexReports(port, options.block_tokens, options.host_slots, options.disk_segments,
                                  options.remembered_removals);
    const std::array<int32_t, kStores> sizes = {options.host_slots, options.disk_segments * options.segment_slots,
                                                options.remote_slots};
    size_t all = 0;
    for (size_t store = 0; store < kStores; ++store) {
      made->stores_[store].size = sizes[store];
      TORPOR_ASSIGN_OR_RETURN(made->stores_[store].slots,
                              FlatArray<SlotRecord>::create(static_cast<size_t>(sizes[store])));
      all += static_cast<size_t>(sizes[store]);
    }
    TORPOR_ASSIGN_OR_RETURN(made->table_, KeyTable::create(all));
    TORPOR_ASSIGN_OR_RETURN(made->segments_, DiskSegments::create(options.disk_segments, options.segment_slots));
    TORPOR_ASSIGN_OR_RETURN(made->backings_, FlatArray<Backing>::create(static_cast<size_t>(options.device_blocks)));
    return made;
  });
}

void BlockIndex::misused(std::string_view call, StoreId store, int64_t slot) noexcept {
  if (!misuse_.empty()) return;  // the first is the cause of later ones
  (void)try_catch([&] {
    misuse_ = fmt::format("{}() does not fit the state of slot {} of the store {}", call, slot, name(store));
    return ok();
  });
}

// Look up all keys in order. Call `found` with the position and the locations of each, until it returns false.
template <class Found>
void BlockIndex::probe(std::span<const BlockKey> keys, Found found) const {
  const size_t size = keys.size();
  std::array<uint32_t, 4 * kAhead> hashes;  // of the keys up to 2 kAhead ahead
  const auto hash = [&](size_t at) -> uint32_t& { return hashes[at % hashes.size()]; };
  const auto take_up = [&](size_t at) {
    if (at >= size) return;
    hash(at) = KeyTable::hash_of(keys[at]);
    table_.prefetch_cells(hash(at));
  };
  const auto look_at = [&](size_t at) {
    if (at < size) table_.prefetch_entry(hash(at));
  };
  for (size_t at = 0; at < std::min(size, 2 * kAhead); ++at) take_up(at);
  if (size > 1) {  // for a single key prefetching gains nothing
    for (size_t at = 0; at < std::min(size, kAhead); ++at) look_at(at);
  }
  for (size_t at = 0; at < size; ++at) {
    take_up(at + 2 * kAhead);
    look_at(at + kAhead);
    const bool fits = KeyTable::fits(keys[at]) && !retired(keys[at].space);
    const int32_t entry = fits ? table_.find(keys[at], hash(at)) : -1;
    BlockLocations places;
    if (entry >= 0) {
      const auto& refs = table_[entry].refs;
      places = {.host = refs[0].visible_slot(),
                .disk = refs[1].visible_slot(),
                .remote = remote_hidden_ ? -1 : refs[2].visible_slot()};
    }
    if (!found(at, places)) return;
  }
}

size_t BlockIndex::run(std::span<const BlockKey> chain, std::span<BlockLocations> places) const {
  size_t there = 0;
  probe(chain.first(std::min(chain.size(), places.size())), [&](size_t at, const BlockLocations& found) {
    if (!found.anywhere()) return false;
    places[at] = found;
    there = at + 1;
    return true;
  });
  return there;
}

void BlockIndex::find_each(std::span<const BlockKey> keys, std::span<BlockLocations> places) const {
  probe(keys.first(std::min(keys.size(), places.size())), [&](size_t at, const BlockLocations& found) {
    places[at] = found;
    return true;
  });
}

bool BlockIndex::is_coming(StoreId store, const BlockKey& key) const {
  if (!KeyTable::fits(key) || retired(key.space)) return false;
  const int32_t entry = table_.find(key, KeyTable::hash_of(key));
  if (entry < 0) return false;
  const SlotRef ref = table_[entry].refs[static_cast<size_t>(store)];
  return ref.any() && !ref.visible();
}

Result<Slot> BlockIndex::reserve(StoreId store, const BlockKey* key) {
  if (key == nullptr) {
    if (store != StoreId::kHost) {
      return try_catch([&]() -> Result<Slot> {
        return Error{.code = Code::kInvalidArgument,
                     .what = fmt::format("a block without a key has no place in the store {}", name(store)),
                     .next_step = "keep it in host memory, or in the checkpoint's own file"};
      });
    }
    const Slot slot = free_slot(store);
    if (slot < 0) return try_catch([&]() -> Result<Slot> { return no_room(store); });
    start(store, slot, -1);
    return slot;
  }
  if (!KeyTable::fits(*key)) {
    return try_catch([&]() -> Result<Slot> {
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("group {} of namespace {}", key->group, key->space),
                   .next_step = fmt::format("stay below {} and {}", kMostGroups, kMostSpaces)};
    });
  }
  const uint32_t hash = KeyTable::hash_of(*key);
  int32_t entry = table_.find(*key, hash);
  if (retired(key->space) || (entry >= 0 && ref(entry, store).any())) {
    return try_catch([&]() -> Result<Slot> {
      return Error{.code = Code::kFailedPrecondition,
                   .what = retired(key->space) ? "its namespace is retired" : "it is there, or on its way",
                   .next_step = "leave it out"};
    });
  }
  const Slot slot = store == StoreId::kDisk ? next_position() : free_slot(store);
  if (slot < 0) return try_catch([&]() -> Result<Slot> { return no_room(store); });
  if (entry < 0) entry = table_.insert(*key, hash);
  ref(entry, store) = SlotRef(slot, false);
  start(store, slot, entry);
  return slot;
}

// Set up a reserved slot. `entry` may name another slot of this store: the one that this slot is to replace.
void BlockIndex::start(StoreId store, Slot slot, int32_t entry) {
  SlotRecord& record = store_of(store).slots[slot];
  record = {
      .before = -1, .after = -1, .entry = entry, .pins = 1, .generation = record.generation, .state = State::kReserved};
  ++store_of(store).counts.reserved;
  emit_state(store, slot, BlockState::kEmpty, BlockState::kInflight);
  if (store == StoreId::kDisk) segments_.pin(slot);
}

BlockIndex::SlotRecord* BlockIndex::known(StoreId store, Slot slot) {
  Store& of = store_of(store);
  if (slot < 0 || slot >= of.size || of.slots[slot].state == State::kFree) return nullptr;
  return &of.slots[slot];
}

// ---- states of a slot

void BlockIndex::commit(StoreId store, Slot slot, bool emits) {
  SlotRecord* record = known(store, slot);
  if (record == nullptr || record->state != State::kReserved) return misused("commit", store, slot);
  Store& of = store_of(store);
  record->state = State::kVisible;
  --of.counts.reserved;
  ++of.counts.visible;
  emit_state(store, slot, BlockState::kInflight, BlockState::kRegistered);
  if (record->entry < 0) return;
  if (emits && record->before < 0 && reports_.emits(store) && !stale(*record))
    reports_.emit_registered(store, slot, table_[record->entry].key());
  if (store == StoreId::kDisk) {
    if (!stale(*record)) segments_.useful_changed(segment_of(slot), 1);
    if (record->before >= 0) replace(slot);
  }
  ref(record->entry, store) = SlotRef(slot, true);
  if (store == StoreId::kDisk) host_reordered(record->entry);
}

// Let slot `by` replace the slot that it was copied from.
void BlockIndex::replace(Slot by) {
  Store& of = store_of(StoreId::kDisk);
  const Slot old = of.slots[by].before;
  of.slots[by].before = -1;
  of.slots[old].after = -1;
  if (!stale(of.slots[old])) segments_.useful_changed(segment_of(old), -1);
  of.slots[old].entry = -1;  // the key now names the new slot
  hide(StoreId::kDisk, old, DropReason::kEvicted);
}

void BlockIndex::abandon(StoreId store, Slot slot, bool unproven) {
  SlotRecord* record = known(store, slot);
  if (record == nullptr || record->state != State::kReserved) return misused("abandon", store, slot);
  Store& of = store_of(store);
  if (!unproven) emit_state(store, slot, BlockState::kInflight, BlockState::kEmpty);
  unlink(store, slot);
  --of.counts.reserved;
  if (unproven) {  // its pin stays for ever, and on disk keeps its segment
    record->state = State::kQuarantined;
    ++of.counts.quarantined;
    return;
  }
  record->state = State::kDoomed;
  ++of.counts.doomed;
  unpin(store, slot);
}

void BlockIndex::damaged(StoreId store, Slot slot) {
  const SlotRecord* record = known(store, slot);
  if (record != nullptr && record->state == State::kDoomed) return;  // another load reported it
  if (record == nullptr || record->state != State::kVisible) return misused("damaged", store, slot);
  hide(store, slot, DropReason::kDiscarded);
}

bool BlockIndex::drop(StoreId store, Slot slot) {
  const SlotRecord* record = known(store, slot);
  if (record == nullptr || record->state != State::kVisible || record->pins > 0) return false;
  hide(store, slot, DropReason::kDiscarded);
  return true;
}

void BlockIndex::pin(StoreId store, Slot slot) {
  SlotRecord* record = known(store, slot);
  if (record == nullptr || (record->state != State::kReserved && record->state != State::kVisible) ||
      record->pins == UINT32_MAX)
    return misused("pin", store, slot);
  leave_line(store, slot);
  ++record->pins;
  record->used = true;
  if (store == StoreId::kDisk) segments_.pin(slot);
}

void BlockIndex::unpin(StoreId store, Slot slot) {
  SlotRecord* record = known(store, slot);
  // The pin of reserve() stays until commit() or abandon().
  const uint32_t stays = record == nullptr                                                           ? 0
                         : record->state == State::kReserved || record->state == State::kQuarantined ? 1u
                                                                                                     : 0u;
  if (record == nullptr || record->pins <= stays) return misused("unpin", store, slot);
  --record->pins;
  if (store == StoreId::kDisk) segments_.unpin(slot);
  if (record->pins > 0) return;
  if (record->state == State::kVisible) return line_up(store, slot);
  --store_of(store).counts.doomed;
  return_slot(store, slot);
}

void BlockIndex::back(int32_t block, ContentVersion version, StoreId store, Slot slot) {
  const SlotRecord* record = known(store, slot);
  if (record == nullptr || record->state != State::kVisible || block < 0 || block >= options_.device_blocks ||
      version == ContentVersion::kNone)
    return misused("back", store, slot);
  Backing& backing = backings_[block];
  if (backing.version != version) backing = {.version = version, .slots = {}, .generations = {}};
  backing.slots[static_cast<size_t>(store)] = slot + 1;
  backing.generations[static_cast<size_t>(store)] = record->generation;
}

BlockLocations BlockIndex::backing(int32_t block, ContentVersion version) const {
  if (block < 0 || block >= options_.device_blocks || version == ContentVersion::kNone) return {};
  const Backing& backing = backings_[block];
  if (backing.version != version) return {};
  const auto slot = [&](StoreId store) -> Slot {
    const Slot found = backing.slots[static_cast<size_t>(store)] - 1;
    if (found < 0) return -1;
    const SlotRecord& record = store_of(store).slots[found];
    const bool same =
        record.state == State::kVisible && record.generation == backing.generations[static_cast<size_t>(store)];
    return same ? found : -1;
  };
  return {.host = slot(StoreId::kHost), .disk = slot(StoreId::kDisk), .remote = slot(StoreId::kRemote)};
}

uint64_t BlockIndex::bytes() const {
  uint64_t bytes = table_.bytes() + segments_.bytes() + backings_.bytes() + reports_.bytes() + retired_.capacity();
  for (const Store& store : stores_) bytes += store.slots.bytes();
  return bytes;
}

}  // namespace torpor
