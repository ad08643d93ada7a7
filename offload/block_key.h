// SPDX-License-Identifier: Apache-2.0
// BlockKey: a full KV block by what it was computed from; KeySpace: all else that its bytes depend on. Values.
//
// A key serves new requests. It does not name bytes: the same tokens computed in another batch have the same key and
// other last digits.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/digest.h"

namespace torpor {

// A slot of a scheduler's index and its plans, the same number on every rank; -1: none. At most kMostSlots
// (kvcache/key_table.h): they are used again and again.
using Slot = int32_t;
// A slot of a rank's store; -1: none. A store on disk uses each one once in the life of its directory.
using StoreSlot = int64_t;

struct BlockKey {
  std::array<uint8_t, 32> hash{};  // the engine's, chained; shorter ones are padded with zeros
  uint32_t group = 0;              // KV cache group
  uint32_t space = 0;              // number of a namespace that this process has opened (SlotStore::open_space)
  friend bool operator==(const BlockKey&, const BlockKey&) = default;
};

// Its digest stands beside stored bytes; what has another one is a miss, never an error. A change of weights opens
// another namespace.
struct KeySpace {
  Digest model;
  Digest weights;
  Digest adapters;
  std::string layout;   // of the KV: layers, strides, dtype
  std::string hashing;  // how the engine makes keys: algorithm and seed
  int32_t ranks = 1;
  Digest digest() const;
  friend bool operator==(const KeySpace&, const KeySpace&) = default;
};

}  // namespace torpor
