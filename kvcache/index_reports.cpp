// SPDX-License-Identifier: Apache-2.0
#include "kvcache/index_reports.h"

#include <algorithm>
#include <bit>

#include "base/status.h"

namespace torpor {
namespace {

Event event_of(EventType type, StoreId store, Slot slot, const BlockKey& key) {
  Event event{.type = type, .from = tier_of(store), .a = static_cast<uint64_t>(slot), .b = key.group};
  std::copy_n(key.hash.begin(), event.key.bytes.size(), event.key.bytes.begin());
  return event;
}

}  // namespace

IndexReports::IndexReports(EventPort port, int32_t block_tokens, int32_t host_slots, int32_t disk_segments,
                           int32_t remembered_removals)
    : port_(port), block_tokens_(block_tokens), host_slots_(host_slots), remembered_removals_(remembered_removals) {
  const size_t droppable = static_cast<size_t>(host_slots) + static_cast<size_t>(disk_segments);
  dropped_.reserve(droppable);
  marked_.resize(droppable / 64 + 1);
}

IndexReports::Bit IndexReports::bit_of(StoreId store, int32_t number) {
  const auto bit = static_cast<size_t>(number) + static_cast<size_t>(store == StoreId::kDisk ? host_slots_ : 0);
  return {marked_[bit / 64], uint64_t{1} << (bit % 64)};
}

void IndexReports::drop(StoreId store, int32_t number) noexcept {
  const Bit bit = bit_of(store, number);
  if ((bit.word & bit.mask) == 0) dropped_.push_back({store, number});
  bit.word |= bit.mask;
}

std::vector<Dropped> IndexReports::take_dropped() {
  std::vector<Dropped> taken;
  const Status copied = try_catch([&] {
    taken = dropped_;
    return ok();
  });
  if (!copied) return {};
  for (const Dropped& each : dropped_) {
    const Bit bit = bit_of(each.store, each.number);
    bit.word &= ~bit.mask;
  }
  dropped_.clear();  // keeps its memory
  return taken;
}

void IndexReports::remove(StoreId store, const BlockKey& key) noexcept {
  const Status noted = try_catch([&]() -> Status {
    if (removed_.blocks.size() < static_cast<size_t>(remembered_removals_)) {
      removed_.blocks.push_back({store, key});
    } else {
      ++removed_.lost;
    }
    return ok();
  });
  if (!noted) ++removed_.lost;
}

void IndexReports::emit_registered(StoreId store, Slot slot, const BlockKey& key) const {
  Event event = event_of(EventType::kRegistered, store, slot, key);
  event.a = both(static_cast<uint64_t>(block_tokens_), event.a);
  (void)port_.record(event);
}

void IndexReports::emit_dropped(StoreId store, Slot slot, const BlockKey& key, DropReason reason) const {
  Event event = event_of(EventType::kDropped, store, slot, key);
  event.to = static_cast<uint8_t>(reason);
  (void)port_.record(event);
}

void IndexReports::emit_state(StoreId store, Slot slot, uint64_t generation, const std::optional<BlockKey>& key,
                              BlockState from, BlockState to) const {
  Event event{.type = EventType::kBlock,
              .from = static_cast<uint8_t>(from),
              .to = static_cast<uint8_t>(to),
              .a = both(tier_of(store), static_cast<uint64_t>(slot)),
              .b = generation};
  if (key) std::copy_n(key->hash.begin(), event.key.bytes.size(), event.key.bytes.begin());
  (void)port_.record(event);
}

void IndexReports::emit_cleared(StoreId store, uint64_t blocks) const {
  (void)port_.record({.type = EventType::kDropped,
                      .from = tier_of(store),
                      .to = static_cast<uint8_t>(DropReason::kCleared),
                      .a = blocks});
}

bool IndexReports::consistent() const {
  size_t marked = 0;
  for (const uint64_t word : marked_) marked += static_cast<size_t>(std::popcount(word));
  return marked == dropped_.size();
}

}  // namespace torpor
