// SPDX-License-Identifier: Apache-2.0
// Device memory as an engine on a GPU has it: several regions a tag, of sizes and at addresses that follow nothing, and
// regions that come and go while the engine serves and while it sleeps.
//
// For the reference engine and the engines of tests, which own it; the memory outlives it. Threads: one at a time.
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

// Allocates a region of each size in `tag`, named by its place ("w", "w1", "w2" of "weights"). Their order of
// allocation is drawn from `seed`; from three on their addresses neither rise nor fall in it.
Result<std::vector<DeviceAddress>> allocate_scattered(RankMemory& memory, std::string_view tag,
                                                      std::span<const uint64_t> sizes, uint64_t seed);
// `bytes` as that many sizes, drawn from `seed`: as many as there are bytes, at most.
std::vector<uint64_t> random_sizes(uint64_t bytes, size_t count, uint64_t seed);

// A KV cache whose layers lie apart, each in a region of its own.
struct ScatteredKv {
  uint32_t layers = 0;
  int32_t blocks = 0;
  uint64_t block_bytes = 0;       // a layer
  std::vector<uint64_t> spare{};  // sizes of regions that no layer needs
};
// Allocates it as allocate_scattered() does, and tells the memory its layout. Returns the layers' addresses.
Result<std::vector<DeviceAddress>> allocate_kv(RankMemory& memory, const ScatteredKv& kv, uint64_t seed);

// Bytes that lie in several regions of a tag, one after the other.
class ScatteredBytes {
 public:
  // Their sizes are drawn from `seed`, their order of allocation from `order`.
  static Result<ScatteredBytes> allocate(RankMemory& memory, std::string_view tag, uint64_t bytes, uint64_t seed,
                                         uint64_t order, size_t regions = kRegionsPerTag);
  ScatteredBytes() = default;
  const std::vector<std::span<std::byte>>& parts() const { return parts_; }
  uint64_t size() const;
  Digest digest() const;
  void add_first(StreamingDigest& digest, uint64_t bytes) const;
  // Writes all of them, as `seed` makes them (made_bytes.h).
  void make(uint64_t seed, bool bf16) const;

 private:
  std::vector<std::span<std::byte>> parts_;
};

inline constexpr const char* kRuntimeTag = "runtime";
inline constexpr const char* kGraphTag = "cudagraph";

// A tag that an engine has beside weights and KV, written anew in each step. Its size stays the same.
class StepRegions {
 public:
  static constexpr uint64_t kBytes = 6'000;

  // As ScatteredBytes.
  static Result<StepRegions> allocate(RankMemory& memory, std::string tag, uint64_t bytes, uint64_t seed,
                                      uint64_t order, size_t regions = kRegionsPerTag);
  // Writes all of it. kCorruption: a byte is not as it was left; an engine must not run then. Of the workspace
  // a region may be zeroed instead, as a sleep leaves it.
  Status step();
  // A region goes, and another of its size comes in its place: awake, or asleep. Nothing where neither is the case.
  Status exchange();
  const std::string& tag() const { return tag_; }
  uint64_t next_bytes() const { return regions_[exchanges_ % regions_.size()].bytes; }  // of the one that goes next

 private:
  struct Region {
    std::string name;
    DeviceAddress address = 0;
    uint64_t bytes = 0;
    uint64_t written = 0;  // what with; 0: not yet
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
