// SPDX-License-Identifier: Apache-2.0
// The identity of a block's content, and its locations: versions, stores, slots. Values.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "offload/block_key.h"

namespace torpor {

// The version of a device block's content; any new content gets another version. A block in use is identified by its
// version, never by its key: equal keys do not mean equal bytes.
enum class ContentVersion : uint64_t { kNone };

enum class StoreId : uint8_t { kHost, kDisk, kRemote };
inline constexpr int kStores = 3;
std::string_view name(StoreId store);  // "host", "disk", "remote"
constexpr uint8_t tier_of(StoreId store) { return static_cast<uint8_t>(static_cast<uint8_t>(store) + 1); }  // in events

template <class T>
struct ByStore {  // one value for each store
  std::array<T, kStores> values;
  T& operator[](StoreId store) { return values[static_cast<size_t>(store)]; }
  const T& operator[](StoreId store) const { return values[static_cast<size_t>(store)]; }
};

struct BlockLocations {
  Slot host = -1;
  Slot disk = -1;
  Slot remote = -1;
  bool anywhere() const { return host >= 0 || disk >= 0 || remote >= 0; }
  friend bool operator==(const BlockLocations&, const BlockLocations&) = default;
};

constexpr Slot slot_in(const BlockLocations& places, StoreId store) {
  if (store == StoreId::kHost) return places.host;
  return store == StoreId::kDisk ? places.disk : places.remote;
}

// Return the store from which a block that is somewhere is loaded.
constexpr StoreId nearest(const BlockLocations& places) {
  if (places.host >= 0) return StoreId::kHost;
  return places.disk >= 0 ? StoreId::kDisk : StoreId::kRemote;
}

struct Dropped {  // a host slot, or a disk segment, that the ranks forget
  StoreId store = StoreId::kHost;
  int32_t number = 0;
  friend bool operator==(const Dropped&, const Dropped&) = default;
};

}  // namespace torpor
