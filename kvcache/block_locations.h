// SPDX-License-Identifier: Apache-2.0
// What names a block's content and where its bytes lie: versions, stores, slots. Values.
#pragma once

#include <cstdint>
#include <string_view>

#include "offload/block_key.h"

namespace torpor {

// Of a device block's present content; any new content has another one. A block that is in use is known by its version,
// never by its key: equal keys are not equal bytes.
enum class ContentVersion : uint64_t { kNone };

enum class StoreId : uint8_t { kHost, kDisk, kRemote };
inline constexpr int kStores = 3;
std::string_view name(StoreId store);  // "host", "disk", "remote"
constexpr uint8_t tier_of(StoreId store) { return static_cast<uint8_t>(static_cast<uint8_t>(store) + 1); }  // in events

struct BlockLocations {
  Slot host = -1;
  Slot disk = -1;
  Slot remote = -1;
  bool anywhere() const { return host >= 0 || disk >= 0 || remote >= 0; }
  friend bool operator==(const BlockLocations&, const BlockLocations&) = default;
};

struct Dropped {  // what ranks forget: a host slot, or a segment on disk
  StoreId store = StoreId::kHost;
  int32_t number = 0;
  friend bool operator==(const Dropped&, const Dropped&) = default;
};

}  // namespace torpor
