// SPDX-License-Identifier: Apache-2.0
// Placement: which blocks are worth storing and where, and which hits are worth loading. It decides only: no state of
// blocks, no slots. UseCounts: how often a key was used, in fixed memory.
//
// Threads: the scheduler's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kvcache/block_locations.h"
#include "kvcache/flat_array.h"

namespace torpor {

class StoreMask {
 public:
  StoreMask() = default;
  StoreMask& add(StoreId store) {
    bits_ = static_cast<uint8_t>(bits_ | 1u << static_cast<unsigned>(store));
    return *this;
  }
  bool has(StoreId store) const { return (bits_ >> static_cast<unsigned>(store) & 1) != 0; }
  bool empty() const { return bits_ == 0; }

 private:
  uint8_t bits_ = 0;
};

struct Candidate {
  const BlockKey& key;
  uint32_t uses = 0;      // requests that had it, this one included; 0: nobody counts
  BlockLocations places;  // where it is already
};

class Placement {
 public:
  virtual ~Placement() = default;
  // Where the block shall be. Host memory and others: there first, and on from there. Empty: a policy says no.
  virtual StoreMask wanted(const Candidate& candidate) const = 0;
  // Else the tokens are computed.
  virtual bool worth_loading(int64_t tokens, std::span<const BlockLocations> run) const = 0;
};

struct PlacementOptions {
  bool host = true;
  bool disk = false;              // also, if there is host memory: through it
  bool remote = false;            // also, through host memory
  bool presence = true;           // what one of the wanted stores has already is filtered before it is queued
  uint32_t min_uses = 1;          // frequency: a block goes when that many requests had it
  int64_t min_prefix_tokens = 0;  // shorter hits are computed
};
std::unique_ptr<Placement> make_placement(const PlacementOptions& options);

// Approximate: a key whose cell another one takes begins anew. 4 bytes a cell.
class UseCounts {
 public:
  // kResourceExhausted.
  static Result<UseCounts> create(size_t cells);
  uint32_t add(const BlockKey& key);  // one more; how many now, at most 255
  uint32_t count(const BlockKey& key) const;
  void clear();

 private:
  struct Cell {
    uint32_t tag_and_count;
  };
  FlatArray<Cell> cells_;
};

}  // namespace torpor
