// SPDX-License-Identifier: Apache-2.0
#include "offload/host_tier.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "base/units.h"
#include "offload/bf16_codec.h"
#include "offload/codec.h"

namespace torpor {

Status HostTier::prepare(uint64_t bytes, uint64_t chunks) {
  TORPOR_ASSIGN_OR_RETURN(ahead_, arena_.prefault_ahead(least_bytes(codec_, bytes, chunks)));
  return ok();
}

uint64_t HostTier::least_bytes(Codec codec, uint64_t bytes, uint64_t chunks) {
  return (codec == Codec::kNone ? bytes : bf16::least_compressed(bytes)) + chunks * kPage;
}

Result<std::span<std::byte>> HostTier::place(SavedChunk& chunk) {
  TORPOR_ASSIGN_OR_RETURN(HostArena::Span span, arena_.allocate(chunk.bytes));
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

void HostTier::borrow(SavedChunk& chunk, std::span<std::byte> bytes, Codec codec, std::shared_ptr<const void> owner) {
  const MutexLock lock(mutex_);
  places_.push_back({{}, bytes});
  lender_ = std::move(owner);
  chunk.offset = places_.size() - 1;
  chunk.stored_bytes = bytes.size();
  chunk.codec = codec;
}

void HostTier::put(std::span<RecordPart> parts) {
  if (codec_ == Codec::kNone) return RecordStore::put(parts);
  uint64_t most = 0;
  for (const RecordPart& part : parts) most = std::max(most, compressed_bound(part.bytes.size()));
  ScratchPool::Lease scratch(scratch_);
  const std::span<std::byte> room = scratch->room(most);
  for (RecordPart& part : parts) part.status = pack(part, room);
}

// Encode into `room` first, so that the arena is asked for the final size, and no more.
Status HostTier::pack(RecordPart& part, std::span<std::byte> room) {
  SavedChunk& chunk = *part.chunk;
  const auto [stored, codec] = encode(part.bytes, room, {.codec = codec_});
  TORPOR_ASSIGN_OR_RETURN(HostArena::Span span, arena_.allocate(stored.size()));
  std::memcpy(span.bytes().data(), stored.data(), stored.size());
  chunk.codec = codec;
  chunk.stored_bytes = stored.size();
  adopt(chunk, std::move(span));
  return ok();
}

void HostTier::get(std::span<RecordPart> parts) {
  for (RecordPart& part : parts) part.status = unpack(part);
}

Status HostTier::unpack(const RecordPart& part) {
  const SavedChunk& chunk = *part.chunk;
  std::span<const std::byte> stored;
  {
    const MutexLock lock(mutex_);
    if (chunk.offset < places_.size()) stored = places_[chunk.offset].bytes;
  }
  if (stored.empty() || stored.size() != chunk.stored_bytes || part.bytes.size() != chunk.bytes) {
    return Error{.code = Code::kInternal,
                 .what = fmt::format("{} is not in the {} tier", chunk.key.to_string(), traits_.kind)};
  }
  const Status unpacked = decompress(chunk.codec, stored, part.bytes);
  if (unpacked) return ok();
  Error damaged = unpacked.error().within(chunk.key.to_string());
  if (damaged.code == Code::kCorruption) damaged.next_step = kLoadAgain;
  return damaged;
}

HostArena::Span HostTier::release(const SavedChunk& chunk) noexcept {
  const MutexLock lock(mutex_);
  if (chunk.offset >= places_.size() || places_[chunk.offset].span.empty()) return {};
  places_[chunk.offset].bytes = {};
  return std::move(places_[chunk.offset].span);
}

void HostTier::keep_only(std::span<SavedChunk> chunks) {
  std::vector<Place> kept;
  const MutexLock lock(mutex_);
  if (chunks.size() == places_.size()) return;
  kept.reserve(chunks.size());
  for (SavedChunk& chunk : chunks) {
    kept.push_back(std::move(places_[chunk.offset]));
    chunk.offset = kept.size() - 1;
  }
  places_.swap(kept);
  lender_.reset();
}

std::span<std::byte> HostTier::view(const SavedChunk& chunk) {
  const MutexLock lock(mutex_);
  if (chunk.offset >= places_.size() || places_[chunk.offset].bytes.size() != chunk.bytes) return {};
  return places_[chunk.offset].bytes;
}

void HostTier::abandon(std::unique_ptr<HostTier> tier) noexcept {
  static Mutex mutex;
  static const HostTier* last = nullptr;  // head of a list, so that leak checkers find each tier
  if (tier == nullptr) return;
  const MutexLock lock(mutex);
  tier->abandoned_before_ = last;
  last = tier.release();
}

}  // namespace torpor
