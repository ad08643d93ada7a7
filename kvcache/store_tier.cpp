// SPDX-License-Identifier: Apache-2.0
#include "kvcache/store_tier.h"

namespace torpor {

Result<std::span<std::byte>> StoreTier::place(SavedChunk& chunk) {
  chunk.stored_bytes = chunk.bytes;
  return store_.place(slot(chunk), chunk.bytes);
}

std::vector<StorePart> StoreTier::records_of(std::span<const TierPart> parts) const {
  std::vector<StorePart> records;
  records.reserve(parts.size());
  for (const TierPart& part : parts) {
    const auto at = static_cast<size_t>(part.chunk->key.index);
    records.push_back({.slot = slots_[at],
                       .key = keys_.empty() ? BlockKey{} : keys_[at],
                       .record = {.digest = part.chunk->digest},
                       .bytes = part.bytes});
  }
  return records;
}

void StoreTier::put(std::span<TierPart> parts) {
  std::vector<StorePart> records = records_of(parts);
  store_.put(records);
  for (size_t i = 0; i < parts.size(); ++i) parts[i].status = std::move(records[i].status);
}

void StoreTier::get(std::span<TierPart> parts) {
  std::vector<StorePart> records = records_of(parts);
  store_.get(records);
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].chunk->digest = records[i].record.digest;
    parts[i].status = std::move(records[i].status);
  }
}

void StoreTier::find(std::span<TierPart> parts) {
  std::vector<StorePart> records = records_of(parts);
  store_.find(records);
  for (size_t i = 0; i < parts.size(); ++i) parts[i].status = std::move(records[i].status);
}

}  // namespace torpor
