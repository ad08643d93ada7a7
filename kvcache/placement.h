// SPDX-License-Identifier: Apache-2.0
// Placement: decides which blocks are worth storing and where, and which hits are worth loading. It has no state of
// blocks and no slots. UseCounts: how often a key was used, in fixed memory.
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
  uint32_t uses = 0;      // requests that used it, including this one; 0: not counted
  BlockLocations places;  // stores that have it already
};

class Placement {
 public:
  virtual ~Placement() = default;
  // Return the stores that should have the block; empty: none. If host memory is one of them, the block goes there
  // first, and from there to the others.
  virtual StoreMask wanted(const Candidate& candidate) const = 0;
  // Return whether to load a run of `tokens` tokens; else the engine computes them.
  virtual bool worth_loading(int64_t tokens, std::span<const BlockLocations> run) const = 0;
};

struct PlacementOptions {
  bool host = true;
  bool disk = false;              // through host memory, if there is any
  bool remote = false;            // through host memory
  bool presence = true;           // skip a block that one of the wanted stores has already
  uint32_t min_uses = 1;          // store a block once so many requests used it
  int64_t min_prefix_tokens = 0;  // shorter hits are computed, not loaded
};
std::unique_ptr<Placement> make_placement(const PlacementOptions& options);

// Approximate: if two keys share a cell, a key that takes the cell starts at zero. 4 bytes for each cell.
class UseCounts {
 public:
  // Make counts with `cells` cells. kResourceExhausted: no memory.
  static Result<UseCounts> create(size_t cells);
  uint32_t add(const BlockKey& key);  // adds one use; returns the count, at most 255
  uint32_t count(const BlockKey& key) const;
  void clear();

 private:
  struct Cell {
    uint32_t tag_and_count;
  };
  FlatArray<Cell> cells_;
};

}  // namespace torpor
