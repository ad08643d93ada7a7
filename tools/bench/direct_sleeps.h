// SPDX-License-Identifier: Apache-2.0
// Regions moved without torpor, on the same kind of device: nothing is proven, nothing undone. The baseline of
// sleep_wake_bench has one thread and fresh host memory at each sleep; the ceiling all cores, one region and one warm
// buffer.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "allocator/host_device.h"
#include "base/copy.h"
#include "base/units.h"
#include "tools/bench/bench.h"

namespace torpor::bench {

struct DirectOptions {
  unsigned threads = 1;
  bool keep_host_memory = false;
  bool digests = false;  // are taken of all bytes, in the pass of the copy
};

class Direct {
 public:
  Direct(const std::vector<uint64_t>& sizes, DirectOptions options)
      : options_(options), device_(must(make_host_device())) {
    for (const uint64_t size : sizes) {
      const uint64_t rounded = align_up(size, device_->granularity());
      Region region{must(device_->reserve(rounded)), rounded, {}, nullptr};
      map(region);
      std::memset(pointer(region), 1, region.bytes);
      regions_.push_back(region);
    }
  }
  ~Direct() {
    for (Region& region : regions_) {
      std::free(region.backup);
      unmap(region);
      must(device_->free_reservation(region.address));
    }
  }
  void sleep() {
    for (Region& region : regions_) {
      if (region.backup == nullptr) region.backup = static_cast<std::byte*>(std::malloc(region.bytes));
      copy(region.backup, pointer(region), region.bytes);
      unmap(region);
    }
  }
  void wake() {
    for (Region& region : regions_) {
      map(region);
      copy(pointer(region), region.backup, region.bytes);
      if (options_.keep_host_memory) continue;
      std::free(region.backup);
      region.backup = nullptr;
    }
  }

 private:
  struct Region {
    DeviceAddress address;
    uint64_t bytes;
    PhysicalId id;
    std::byte* backup;
  };
  static std::byte* pointer(const Region& region) {
    return reinterpret_cast<std::byte*>(region.address);
  }  // NOLINT(performance-no-int-to-ptr)
  void copy(std::byte* to, const std::byte* from, uint64_t bytes) const {
    const auto part = [&](unsigned i) {
      const uint64_t begin = bytes * i / options_.threads;
      const uint64_t size = bytes * (i + 1) / options_.threads - begin;
      if (options_.digests) {
        StreamingDigest digest;
        BulkCopy(size).copy({to + begin, size}, {from + begin, size}, digest);
        (void)digest.finish();
      } else if (options_.keep_host_memory) {  // the ceiling copies as fast as the machine can
        BulkCopy(size).copy({to + begin, size}, {from + begin, size});
      } else {
        std::memcpy(to + begin, from + begin, size);
      }
    };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < options_.threads; ++i) others.emplace_back(part, i);
    part(0);
    for (std::thread& thread : others) thread.join();
  }
  void map(Region& region) {
    region.id = must(device_->create(region.bytes));
    must(device_->map(region.address, region.id));
    must(device_->set_access(region.address, region.bytes, Access::kReadWrite));
  }
  void unmap(const Region& region) {
    must(device_->unmap(region.address, region.bytes));
    must(device_->release(region.id));
  }
  const DirectOptions options_;
  std::unique_ptr<DeviceMemory> device_;
  std::vector<Region> regions_;
};

}  // namespace torpor::bench
