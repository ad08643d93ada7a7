#include "offload/host_tier.h"

#include "base/units.h"

namespace torpor {

Status HostTier::prepare(uint64_t bytes, uint64_t chunks) { return arena_.prefault(bytes + chunks * 4 * kKiB); }

Result<std::span<std::byte>> HostTier::place(SavedChunk& chunk) {
  TORPOR_ASSIGN(HostArena::Span span, arena_.allocate(chunk.bytes));
  const std::span<std::byte> bytes = span.bytes();
  const MutexLock lock(mutex_);
  chunk.offset = places_.size();
  chunk.stored_bytes = chunk.bytes;
  chunk.codec = Codec::kNone;
  places_.push_back({std::move(span), bytes});
  return bytes;
}

void HostTier::adopt(SavedChunk& chunk, HostArena::Span&& span) {
  const MutexLock lock(mutex_);
  Place& place = places_.emplace_back();
  place.span = std::move(span);
  place.bytes = place.span.bytes();
  chunk.offset = places_.size() - 1;
}

void HostTier::borrow(SavedChunk& chunk, std::span<std::byte> bytes, std::shared_ptr<const void> owner) {
  const MutexLock lock(mutex_);
  places_.push_back({{}, bytes});
  lender_ = std::move(owner);
  chunk.offset = places_.size() - 1;
  chunk.stored_bytes = chunk.bytes;
  chunk.codec = Codec::kNone;
}

HostArena::Span HostTier::release(const SavedChunk& chunk) noexcept {
  const MutexLock lock(mutex_);
  if (chunk.offset >= places_.size() || places_[chunk.offset].span.empty()) return {};
  places_[chunk.offset].bytes = {};
  return std::move(places_[chunk.offset].span);
}

std::span<std::byte> HostTier::view(const SavedChunk& chunk) {
  const MutexLock lock(mutex_);
  if (chunk.offset >= places_.size() || places_[chunk.offset].bytes.size() != chunk.bytes) return {};
  return places_[chunk.offset].bytes;
}

void HostTier::abandon(std::unique_ptr<HostTier> tier) noexcept {
  static Mutex mutex;
  static const HostTier* last = nullptr;  // of a list, so that who looks for leaks finds each
  if (tier == nullptr) return;
  const MutexLock lock(mutex);
  tier->abandoned_before_ = last;
  last = tier.release();
}

}  // namespace torpor
