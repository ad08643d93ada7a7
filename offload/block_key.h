// SPDX-License-Identifier: Apache-2.0
// BlockKey: names a full KV block by the tokens that it was computed from. KeySpace: everything else that the block's
// bytes depend on. Values.
//
// A key serves new requests. Equal keys do not mean equal bytes: the same tokens computed in another batch can differ
// in the last digits.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>

#include "base/digest.h"

namespace torpor {

// A slot of a scheduler's index and its plans; the same number on every rank; -1: none. At most kMostSlots
// (kvcache/key_table.h). Slots are reused.
using Slot = int32_t;
// A slot of a rank's store; -1: none. A store on disk uses each slot once while a process uses its directory.
using StoreSlot = int64_t;

struct BlockKey {
  std::array<uint8_t, 32> hash{};  // the engine's, chained; shorter hashes are padded with zeros
  uint32_t group = 0;              // KV cache group
  uint32_t space = 0;              // number of a namespace that this process opened (SlotStore::open_space)
  friend bool operator==(const BlockKey&, const BlockKey&) = default;
};

// Orders the keys of one namespace.
struct BlockKeyLess {
  bool operator()(const BlockKey& a, const BlockKey& b) const {
    return std::tie(a.hash, a.group) < std::tie(b.hash, b.group);
  }
};

// A namespace. Its digest is stored beside the bytes; bytes with another digest are a miss, never an error. New weights
// open another namespace.
struct KeySpace {
  Digest model;
  Digest weights;
  Digest adapters;
  std::string layout;   // of the KV cache: layers, strides, dtype
  std::string hashing;  // how the engine makes keys: algorithm and seed
  int32_t ranks = 1;
  Digest digest() const;
  friend bool operator==(const KeySpace&, const KeySpace&) = default;
};

}  // namespace torpor
