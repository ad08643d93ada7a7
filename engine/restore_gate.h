// SPDX-License-Identifier: Apache-2.0
// RestoreGate: waits until the memory of a chunk is there, so that its bytes can be copied into it.
//
// Owner: one order to a rank. Threads: one calls it.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "allocator/sleep_allocator.h"
#include "engine/region_mapper.h"
#include "offload/chunk.h"

namespace torpor {

class RestoreGate {
 public:
  virtual ~RestoreGate() = default;
  // Wait until the memory of the chunk is there. An error: it will not be.
  virtual Status wait_for(const ChunkPlan& chunk) = 0;
  // Wait until all memory of the wake is there. An error: it will not be.
  virtual Status wait_for_all() = 0;
  // Return whether all memory is there; false if that is not known.
  virtual bool all_there() const = 0;
  // Return the size of a job, in bytes, until all_there(). A job begins when the memory of all its chunks is there.
  virtual uint64_t job_bytes() const = 0;
  // Return whether memory comes in the order of addresses; then chunks are to be copied in that order.
  virtual bool by_address() const = 0;
};

// For memory that is there already.
class AllAttached final : public RestoreGate {
 public:
  Status wait_for(const ChunkPlan&) override { return ok(); }
  Status wait_for_all() override { return ok(); }
  bool all_there() const override { return true; }
  uint64_t job_bytes() const override { return std::numeric_limits<uint64_t>::max(); }
  bool by_address() const override { return false; }
};

// For the regions of a wake, which a thread attaches one after the other.
class MappedRegions final : public RestoreGate {
 public:
  // `tags`: their regions, in this order. `allocator` outlives this object. Without a thread all regions are attached
  // here.
  MappedRegions(SleepAllocator& allocator, const std::vector<std::string>& tags, bool own_thread);

  Status wait_for(const ChunkPlan& chunk) override;
  Status wait_for_all() override { return mapper_.wait(order_.regions.size()); }
  bool all_there() const override { return mapper_.finished(); }
  uint64_t job_bytes() const override;
  bool by_address() const override { return false; }

 private:
  struct Order {
    std::vector<DeviceAddress> regions;
    // (tag, region name) -> number of regions up to and including it. An empty name: up to the end of the tag.
    std::map<std::pair<std::string, std::string>, size_t> end_of;
  };
  static Order order_of(const SleepAllocator& allocator, const std::vector<std::string>& tags);

  const Order order_;
  ChunkKey last_{};  // the last chunk that was waited for
  RegionMapper mapper_;
};

}  // namespace torpor
