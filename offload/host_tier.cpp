#include "offload/host_tier.h"

#include "base/units.h"

namespace torpor {

Status HostTier::prepare(uint64_t bytes, uint64_t chunks) { return arena_.prefault(bytes + chunks * 4 * kKiB); }

Result<std::span<std::byte>> HostTier::place(SavedChunk& chunk) {
  TORPOR_ASSIGN(HostArena::Span span, arena_.allocate(chunk.bytes));
  const std::span<std::byte> bytes = span.bytes();
  const MutexLock lock(mutex_);
  chunk.offset = spans_.size();
  chunk.stored_bytes = chunk.bytes;
  chunk.codec = Codec::kNone;
  spans_.push_back(std::move(span));
  return bytes;
}

void HostTier::adopt(SavedChunk& chunk, HostArena::Span&& span) {
  const MutexLock lock(mutex_);
  spans_.push_back(std::move(span));
  chunk.offset = spans_.size() - 1;
}

HostArena::Span HostTier::release(const SavedChunk& chunk) noexcept {
  const MutexLock lock(mutex_);
  return chunk.offset < spans_.size() ? std::move(spans_[chunk.offset]) : HostArena::Span();
}

std::span<std::byte> HostTier::view(const SavedChunk& chunk) {
  const MutexLock lock(mutex_);
  if (chunk.offset >= spans_.size() || spans_[chunk.offset].bytes().size() != chunk.bytes) return {};
  return spans_[chunk.offset].bytes();
}

}  // namespace torpor
