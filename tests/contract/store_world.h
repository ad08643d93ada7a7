// SPDX-License-Identifier: Apache-2.0
// A store under test, and records to put there.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/units.h"
#include "offload/store.h"
#include "tests/support/results.h"

namespace torpor::test {

// A store and what only its own test knows of it: room for at least 64 records of 3 pages, key space 1 open.
class StoreWorld {
 public:
  virtual ~StoreWorld() = default;
  virtual Store& store() = 0;
  virtual std::vector<StoreSlot> fresh(int32_t count) = 0;  // slots that were never used, in a run
  virtual StoreSlot beyond() = 0;                           // for which there is no room
  // From now on every access to the medium fails, or none any more. False: it cannot fail.
  virtual bool fail(bool) { return false; }
  // The store as a new process finds it; null if nothing outlives it.
  virtual Store* reopen() { return nullptr; }
};

struct StoreWay {
  std::string name;
  std::function<std::unique_ptr<StoreWorld>()> make;
};

inline constexpr uint64_t kContractRecord = 3 * kPage;

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

inline StorePart part_of(StoreSlot slot, uint64_t seed, std::span<std::byte> bytes) {
  return {.slot = slot, .key = some_key(seed), .record = {.digest = digest_of(bytes)}, .bytes = bytes};
}

inline Status put_one(Store& store, StoreSlot slot, uint64_t seed, size_t size = kContractRecord) {
  std::vector<std::byte> bytes = some_bytes(seed, size);
  StorePart part = part_of(slot, seed, bytes);
  store.put({&part, 1});
  return part.status;
}

// Whether the slot has what put_one() put; an error if it cannot be had.
inline Result<bool> has_one(Store& store, StoreSlot slot, uint64_t seed, size_t size = kContractRecord) {
  std::vector<std::byte> bytes(size);
  StorePart part{.slot = slot, .bytes = bytes};
  store.get({&part, 1});
  if (!part.status) return part.status.error();
  return digest_of(bytes) == part.record.digest && bytes == some_bytes(seed, size);
}

}  // namespace torpor::test
