// SPDX-License-Identifier: Apache-2.0
#include "kvcache/block_index.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor {
namespace {

Error no_room(StoreId store) {
  return {.code = Code::kResourceExhausted,
          .what = fmt::format("every slot of the store {} is in use", name(store)),
          .next_step = "unpin some, or give it more"};
}

// Return the visible slots of an entry, or none for -1. Part of the loop of each lookup, so it is inline.
inline BlockLocations locations(const KeyTable& table, int32_t entry, bool remote_hidden) {
  if (entry < 0) return {};
  const ByStore<SlotRef>& refs = table[entry].refs;
  return {.host = refs[StoreId::kHost].visible_slot(),
          .disk = refs[StoreId::kDisk].visible_slot(),
          .remote = remote_hidden ? -1 : refs[StoreId::kRemote].visible_slot()};
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
    size_t all = 0;
    for (const auto& [store, size] : {std::pair(StoreId::kHost, options.host_slots),
                                      std::pair(StoreId::kDisk, options.disk_segments * options.segment_slots),
                                      std::pair(StoreId::kRemote, options.remote_slots)}) {
      TORPOR_ASSIGN_OR_RETURN(made->stores_[store], StoreSlots::create(store, size, made->table_, made->reports_));
      all += static_cast<size_t>(size);
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

size_t BlockIndex::run(std::span<const BlockKey> chain, std::span<BlockLocations> places) const {
  size_t there = 0;
  table_.look_up(chain.first(std::min(chain.size(), places.size())), [&](size_t at, int32_t entry) {
    const BlockLocations found = locations(table_, entry, remote_hidden_);
    if (!found.anywhere()) return false;
    places[at] = found;
    there = at + 1;
    return true;
  });
  return there;
}

void BlockIndex::find_each(std::span<const BlockKey> keys, std::span<BlockLocations> places) const {
  table_.look_up(keys.first(std::min(keys.size(), places.size())), [&](size_t at, int32_t entry) {
    places[at] = locations(table_, entry, remote_hidden_);
    return true;
  });
}

bool BlockIndex::is_coming(StoreId store, const BlockKey& key) const {
  if (!KeyTable::fits(key) || table_.retired(key.space)) return false;
  const int32_t entry = table_.find(key, KeyTable::hash_of(key));
  if (entry < 0) return false;
  const SlotRef ref = table_[entry].refs[store];
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
  const bool retired = table_.retired(key->space);
  if (retired || (entry >= 0 && table_[entry].refs[store].any())) {
    return try_catch([&]() -> Result<Slot> {
      return Error{.code = Code::kFailedPrecondition,
                   .what = retired ? "its namespace is retired" : "it is there, or on its way",
                   .next_step = "leave it out"};
    });
  }
  const Slot slot = free_slot(store);
  if (slot < 0) return try_catch([&]() -> Result<Slot> { return no_room(store); });
  if (entry < 0) entry = table_.insert(*key, hash);
  table_[entry].refs[store] = SlotRef(slot, false);
  start(store, slot, entry);
  return slot;
}

// Set up a reserved slot. `entry` names this slot, or the one that it `replaces`.
void BlockIndex::start(StoreId store, Slot slot, int32_t entry, Slot replaces) {
  stores_[store].reserve(slot, entry, replaces);
  if (store == StoreId::kDisk) segments_.pin(slot);
}

// ---- states of a slot

void BlockIndex::commit(StoreId store, Slot slot, bool emits) {
  StoreSlots& slots = stores_[store];
  const StoreSlots::Record* record = slots.known(slot);
  if (record == nullptr || record->state != State::kReserved) return misused("commit", store, slot);
  slots.commit(slot);
  if (record->entry < 0) return;
  KeyTable::Entry& entry = table_[record->entry];
  if (emits && record->before < 0 && reports_.emits(store) && !slots.stale(slot))
    reports_.emit_registered(store, slot, entry.key());
  if (store == StoreId::kDisk) {
    const int useful = slots.stale(slot) ? 0 : 1;
    segments_.useful_changed(segment_of(slot), useful);
    if (const Slot old = slots.replace(slot); old >= 0) {  // the block was reinserted: the key now names the new slot
      segments_.useful_changed(segment_of(old), -useful);
      hide(StoreId::kDisk, old, DropReason::kEvicted);
    }
  }
  entry.refs[store] = SlotRef(slot, true);
  if (store == StoreId::kDisk) stores_[StoreId::kHost].reorder(entry.refs[StoreId::kHost].visible_slot());
}

void BlockIndex::abandon(StoreId store, Slot slot, bool unproven) {
  StoreSlots& slots = stores_[store];
  const StoreSlots::Record* record = slots.known(slot);
  if (record == nullptr || record->state != State::kReserved) return misused("abandon", store, slot);
  slots.abandon(slot, unproven);
  unlink(store, slot);
  if (!unproven) unpin(store, slot);  // else its pin stays for ever, and on disk keeps its segment
}

void BlockIndex::damaged(StoreId store, Slot slot) {
  const StoreSlots::Record* record = stores_[store].known(slot);
  if (record != nullptr && record->state == State::kDoomed) return;  // another load reported it
  if (record == nullptr || record->state != State::kVisible) return misused("damaged", store, slot);
  hide(store, slot, DropReason::kDiscarded);
}

bool BlockIndex::drop(StoreId store, Slot slot) {
  const StoreSlots::Record* record = stores_[store].known(slot);
  if (record == nullptr || record->state != State::kVisible || record->pins > 0) return false;
  hide(store, slot, DropReason::kDiscarded);
  return true;
}

void BlockIndex::pin(StoreId store, Slot slot) {
  const StoreSlots::Record* record = stores_[store].known(slot);
  if (record == nullptr || (record->state != State::kReserved && record->state != State::kVisible) ||
      record->pins == UINT32_MAX)
    return misused("pin", store, slot);
  stores_[store].pin(slot);
  if (store == StoreId::kDisk) segments_.pin(slot);
}

void BlockIndex::unpin(StoreId store, Slot slot) {
  const StoreSlots::Record* record = stores_[store].known(slot);
  // The pin of reserve() stays until commit() or abandon().
  const uint32_t stays = record == nullptr                                                           ? 0
                         : record->state == State::kReserved || record->state == State::kQuarantined ? 1u
                                                                                                     : 0u;
  if (record == nullptr || record->pins <= stays) return misused("unpin", store, slot);
  if (store == StoreId::kDisk) segments_.unpin(slot);
  stores_[store].unpin(slot);
}

// Drop a visible slot.
void BlockIndex::hide(StoreId store, Slot slot, DropReason reason) {
  StoreSlots& slots = stores_[store];
  const int32_t entry = slots[slot].entry;
  if (reports_.emits(store) && !slots.stale(slot)) reports_.emit_dropped(store, slot, table_[entry].key(), reason);
  if (store == StoreId::kDisk && !slots.stale(slot)) segments_.useful_changed(segment_of(slot), -1);
  if (reports_.remembers_removals() && entry >= 0) reports_.remove(store, table_[entry].key());
  slots.hide(slot);
  unlink(store, slot);
}

// Remove the slot from its key's entry; erase an entry that names no slot.
void BlockIndex::unlink(StoreId store, Slot slot) {
  const int32_t number = stores_[store][slot].entry;
  if (number < 0) return;
  KeyTable::Entry& entry = table_[number];
  entry.refs[store] = stores_[store].unlink(slot);
  if (store == StoreId::kDisk) stores_[StoreId::kHost].reorder(entry.refs[StoreId::kHost].visible_slot());
  if (entry.empty()) table_.erase(number);
}

// ---- blocks of the device

void BlockIndex::back(int32_t block, ContentVersion version, StoreId store, Slot slot) {
  const StoreSlots::Record* record = stores_[store].known(slot);
  if (record == nullptr || record->state != State::kVisible || block < 0 || block >= options_.device_blocks ||
      version == ContentVersion::kNone)
    return misused("back", store, slot);
  Backing& backing = backings_[block];
  if (backing.version != version) backing = {.version = version, .slots = {}, .generations = {}};
  backing.slots[store] = slot + 1;
  backing.generations[store] = record->generation;
}

BlockLocations BlockIndex::backing(int32_t block, ContentVersion version) const {
  if (block < 0 || block >= options_.device_blocks || version == ContentVersion::kNone) return {};
  const Backing& backing = backings_[block];
  if (backing.version != version) return {};
  const auto slot = [&](StoreId store) -> Slot {
    const Slot found = backing.slots[store] - 1;
    if (found < 0) return -1;
    const StoreSlots::Record& record = stores_[store][found];
    const bool same = record.state == State::kVisible && record.generation == backing.generations[store];
    return same ? found : -1;
  };
  return {.host = slot(StoreId::kHost), .disk = slot(StoreId::kDisk), .remote = slot(StoreId::kRemote)};
}

uint64_t BlockIndex::bytes() const {
  uint64_t bytes = table_.bytes() + segments_.bytes() + backings_.bytes() + reports_.bytes();
  for (const StoreSlots& slots : stores_.values) bytes += slots.bytes();
  return bytes;
}

}  // namespace torpor
