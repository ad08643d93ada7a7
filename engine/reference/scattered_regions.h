// SPDX-License-Identifier: Apache-2.0
// Device memory as an engine on a GPU has it: a tag has several regions, of irregular sizes and at irregular addresses,
// and regions are allocated and freed while the engine serves and while it sleeps.
//
// Owner: the reference engine and the engines of tests; the RankMemory outlives it. Threads: one at a time. Failure:
// errors are values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "engine/rank_memory.h"

namespace torpor::reference {

inline constexpr size_t kRegionsPerTag = 3;

// Allocate a region of each size in `tag`, with names like "w", "w1", "w2" for "weights", and return the addresses.
// `seed` shuffles the order of allocation; with three or more regions the addresses are neither ascending nor
// descending.
Result<std::vector<DeviceAddress>> allocate_scattered(RankMemory& memory, std::string_view tag,
                                                      std::span<const uint64_t> sizes, uint64_t seed);
// Split `bytes` into `count` random sizes of at least one byte; into fewer if there are fewer bytes.
std::vector<uint64_t> random_sizes(uint64_t bytes, size_t count, uint64_t seed);

// The shape of a KV cache whose layers lie in regions of their own.
struct ScatteredKv {
  uint32_t layers = 0;
  int32_t blocks = 0;
  uint64_t block_bytes = 0;       // of one layer
  std::vector<uint64_t> spare{};  // sizes of regions that no layer uses
};
// Allocate it like allocate_scattered(), and set the memory's layout. Return the addresses of the layers.
Result<std::vector<DeviceAddress>> allocate_kv(RankMemory& memory, const ScatteredKv& kv, uint64_t seed);

// Bytes that lie in several regions of a tag, one after the other.
class ScatteredBytes {
 public:
  // Allocate them. `seed` draws the sizes of the regions, `order` the order of allocation.
  static Result<ScatteredBytes> allocate(RankMemory& memory, std::string_view tag, uint64_t bytes, uint64_t seed,
                                         uint64_t order, size_t regions = kRegionsPerTag);
  ScatteredBytes() = default;
  const std::vector<std::span<std::byte>>& parts() const { return parts_; }
  uint64_t size() const;
  Digest digest() const;
  void add_first(StreamingDigest& digest, uint64_t bytes) const;
  // Write all bytes, as `seed` makes them (made_bytes.h).
  void make(uint64_t seed, bool bf16) const;

 private:
  std::vector<std::span<std::byte>> parts_;
};

inline constexpr const char* kRuntimeTag = "runtime";
inline constexpr const char* kGraphTag = "cudagraph";

// A tag that an engine has beside weights and KV cache, and writes anew in each step. Its size stays the same.
class StepRegions {
 public:
  static constexpr uint64_t kBytes = 6'000;

  // As ScatteredBytes::allocate().
  static Result<StepRegions> allocate(RankMemory& memory, std::string tag, uint64_t bytes, uint64_t seed,
                                      uint64_t order, size_t regions = kRegionsPerTag);
  // Check and rewrite all bytes. kCorruption: a byte has changed since the last step, so the engine must not run.
  // Regions of the workspace may also be zeroed, as a sleep leaves them.
  Status step();
  // Free a region and allocate another one of its size, while the tag is awake or asleep. It does nothing in other
  // states.
  Status exchange();
  const std::string& tag() const { return tag_; }
  uint64_t next_bytes() const { return regions_[exchanges_ % regions_.size()].bytes; }  // of the one that goes next

 private:
  struct Region {
    std::string name;
    DeviceAddress address = 0;
    uint64_t bytes = 0;
    uint64_t written = 0;  // seed of the content; 0: not written yet
  };
  static std::span<std::byte> content(const Region& region);
  void write(Region& region);

  RankMemory* memory_ = nullptr;
  std::string tag_;
  std::vector<Region> regions_;
  uint64_t writes_ = 0;
  uint64_t exchanges_ = 0;
};

}  // namespace torpor::reference
