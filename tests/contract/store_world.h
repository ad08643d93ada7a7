// SPDX-License-Identifier: Apache-2.0
// A store under test, and records to put there.
#pragma once

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/seal.h"
#include "base/units.h"
#include "offload/slot_store.h"
#include "tests/support/results.h"

namespace torpor::test {

// A store and what only its own test knows of it: room for at least 64 records of 3 pages, namespace 1 open.
class StoreWorld {
 public:
  virtual ~StoreWorld() = default;
  virtual SlotStore& store() = 0;
  // Return slots that were never used, in a run.
  std::vector<StoreSlot> fresh(int32_t count) {
    std::vector<StoreSlot> slots;
    for (int32_t i = 0; i < count; ++i) slots.push_back(next_++);
    return slots;
  }
  virtual StoreSlot beyond() = 0;  // for which there is no room
  // From now on every access to the medium fails, or none any more. False: it cannot fail.
  virtual bool fail(bool) { return false; }
  // The store as a new process finds it; null if nothing outlives it.
  virtual SlotStore* reopen() { return nullptr; }

 protected:
  StoreSlot next_ = 0;
};

struct StoreWay {
  std::string name;
  std::function<std::unique_ptr<StoreWorld>()> make;
};

inline constexpr uint64_t kContractRecord = 3 * kPage;

inline std::shared_ptr<const Key> a_key(uint8_t fill) {
  std::array<uint8_t, kKeyBytes> secret{};
  secret.fill(fill);
  return std::make_shared<const Key>(secret);
}

// Bytes that compress a little, and differ for each seed and size.
inline std::vector<std::byte> some_bytes(uint64_t seed, size_t size) {
  std::vector<std::byte> bytes(size);
  uint64_t state = seed * 2654435761u + size;
  for (size_t i = 0; i < size; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    bytes[i] = i % 3 == 0 ? std::byte{7} : static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

inline BlockKey some_key(uint64_t seed) {
  BlockKey key{.group = static_cast<uint32_t>(seed % 3), .space = 1};
  std::memcpy(key.hash.data(), &seed, sizeof seed);
  return key;
}

// A record on its way, with what a RecordPart points at.
struct StorePart {
  StoreSlot slot = -1;
  BlockKey key;
  StoredRecord record;
  std::span<std::byte> bytes;
  Status status;
};

inline void call(SlotStore& store, void (RecordStore::*verb)(std::span<RecordPart>), std::span<StorePart> parts) {
  std::vector<SavedChunk> chunks(parts.size());
  std::vector<RecordPart> records;
  for (size_t i = 0; i < parts.size(); ++i) {
    chunks[i].offset = static_cast<uint64_t>(parts[i].slot);
    chunks[i].digest = parts[i].record.digest;
    records.push_back({.chunk = &chunks[i], .bytes = parts[i].bytes, .key = &parts[i].key});
  }
  (store.*verb)(records);
  for (size_t i = 0; i < parts.size(); ++i) {
    const SavedChunk& chunk = chunks[i];
    EXPECT_EQ(chunk.offset, static_cast<uint64_t>(parts[i].slot));
    parts[i].record = {
        .bytes = chunk.bytes, .stored = chunk.stored_bytes, .digest = chunk.digest, .codec = chunk.codec};
    parts[i].status = std::move(records[i].status);
  }
}
inline void put(SlotStore& store, std::span<StorePart> parts) { call(store, &RecordStore::put, parts); }
inline void get(SlotStore& store, std::span<StorePart> parts) { call(store, &RecordStore::get, parts); }
inline void find(SlotStore& store, std::span<StorePart> parts) { call(store, &RecordStore::find, parts); }

inline StorePart part_of(StoreSlot slot, uint64_t seed, std::span<std::byte> bytes) {
  return {.slot = slot, .key = some_key(seed), .record = {.digest = digest_of(bytes)}, .bytes = bytes};
}

inline Status put_one(SlotStore& store, StoreSlot slot, uint64_t seed, size_t size = kContractRecord) {
  std::vector<std::byte> bytes = some_bytes(seed, size);
  StorePart part = part_of(slot, seed, bytes);
  put(store, {&part, 1});
  return part.status;
}

// Whether the slot has what put_one() put; an error if it cannot be had.
inline Result<bool> has_one(SlotStore& store, StoreSlot slot, uint64_t seed, size_t size = kContractRecord) {
  std::vector<std::byte> bytes(size);
  StorePart part{.slot = slot, .bytes = bytes};
  get(store, {&part, 1});
  if (!part.status) return part.status.error();
  return digest_of(bytes) == part.record.digest && bytes == some_bytes(seed, size);
}

}  // namespace torpor::test
