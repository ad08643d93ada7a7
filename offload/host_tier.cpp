#include "offload/host_tier.h"

#include <cstring>

#include <fmt/format.h>

#include "base/units.h"

namespace torpor {

Status HostTier::prepare(uint64_t bytes, uint64_t chunks) { return arena_.prefault(bytes + chunks * 4 * kKiB); }

Result<std::span<std::byte>> HostTier::place(SavedChunk& chunk) {
  TORPOR_ASSIGN(HostArena::Span span, arena_.allocate(chunk.bytes));
  const std::span<std::byte> bytes = span.bytes();
  const std::lock_guard lock(mutex_);
  chunk.offset = spans_.size();
  chunk.stored_bytes = chunk.bytes;
  chunk.codec = Codec::kNone;
  spans_.push_back(std::move(span));
  return bytes;
}

Status HostTier::put(SavedChunk& chunk, std::span<const std::byte> bytes) {
  TORPOR_ASSIGN(const std::span<std::byte> place_of_chunk, place(chunk));
  std::memcpy(place_of_chunk.data(), bytes.data(), bytes.size());
  return ok();
}

std::span<std::byte> HostTier::view(const SavedChunk& chunk) {
  const std::lock_guard lock(mutex_);
  if (chunk.offset >= spans_.size() || spans_[chunk.offset].bytes().size() != chunk.bytes) return {};
  return spans_[chunk.offset].bytes();
}

Status HostTier::get(const SavedChunk& chunk, std::span<std::byte> bytes) {
  const std::span<std::byte> found = view(chunk);
  if (found.size() != bytes.size()) {
    return Error{.code = Code::kInternal, .what = fmt::format("{} is not in this host tier", chunk.key.to_string())};
  }
  std::memcpy(bytes.data(), found.data(), bytes.size());
  return ok();
}

}  // namespace torpor
