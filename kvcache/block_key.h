// BlockKey: a full block of KV by what it was computed from. Values.
//
// Equal keys are not equal bytes: a block that was computed again, in another batch, has other last digits. Keys serve
// requests that begin; a block that is in use is known by its Stamp.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/digest.h"

namespace torpor {

using Slot = int32_t;                   // the same number on every rank; -1: none
enum class Stamp : uint64_t { kNone };  // of a device block's present content; any new content has another one

struct BlockKey {
  std::array<uint8_t, 32>
      hash{};          // the engine's own, whole, over all tokens up to here; shorter ones with zeros behind
  uint32_t group = 0;  // KV cache group
  uint32_t space = 0;  // number of a KeySpace that this process has opened
  friend bool operator==(const BlockKey&, const BlockKey&) = default;
};

// What must be equal for equal hashes to mean blocks that may be exchanged. Its digest stands beside stored bytes; what
// has another one is a miss, never an error.
struct KeySpace {
  Digest model;
  Digest weights;
  Digest adapters;      // by their content
  std::string layout;   // of the KV, with its dtype
  std::string hashing;  // algorithm and seed of the engine's hashes
  int32_t ranks = 1;
  Digest digest() const;
  friend bool operator==(const KeySpace&, const KeySpace&) = default;
};

}  // namespace torpor
