// SPDX-License-Identifier: Apache-2.0
// Sleeps of an engine's KV blocks in host memory: the first, the second after no step, and one after steps that changed
// one block in a hundred; beside giving back as much device memory and nothing else.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "allocator/host_device.h"
#include "base/units.h"
#include "tools/bench/bench.h"
#include "tools/bench/kv_rank.h"

namespace torpor::bench {

constexpr uint64_t kKvBlockBytes = 512 * kKiB;  // of 16 tokens of a model of some size, over all its layers

// Seconds, of CPU too, and bytes of the sleeps of one engine's KV, by what was done since the one before.
struct KvSleeps {
  struct Sleep {
    std::vector<double> seconds;
    std::vector<double> cpu;
    uint64_t bytes = 0;
  };
  Sleep first, second, after_steps;
  Sleep given_back;  // as much device memory, and nothing else: no sleep can be shorter
};
inline void take_time(KvSleeps::Sleep& sleep, bool counts, const std::function<void()>& work) {
  const double began = cpu_seconds();
  const double taken = seconds(work);
  if (counts) sleep.seconds.push_back(taken), sleep.cpu.push_back(cpu_seconds() - began);
}
inline void give_back(uint64_t bytes, KvSleeps::Sleep& sleep, bool counts) {
  const auto device = must(make_host_device());
  const uint64_t size = align_up(bytes, device->granularity());
  const DeviceAddress address = must(device->reserve(size));
  const PhysicalId id = must(device->create(size));
  must(device->map(address, id));
  must(device->set_access(address, size, Access::kReadWrite));
  std::memset(reinterpret_cast<void*>(address), 7, size);  // NOLINT(performance-no-int-to-ptr)
  take_time(sleep, counts, [&] {
    must(device->unmap(address, size));
    must(device->release(id));
  });
  must(device->free_reservation(address));
}
inline KvSleeps sleep_kv_again(uint64_t bytes, int rounds) {
  const auto blocks = static_cast<uint32_t>(bytes / kKvBlockBytes);
  KvRank kv(blocks, kKvBlockBytes, blocks);
  KvSleeps sleeps;
  const auto take = [&](KvSleeps::Sleep& sleep, bool counts) {
    take_time(sleep, counts, [&] {
      sleep.bytes = kv.save();
      kv.release();
    });
    kv.restore();
  };
  for (int round = 0; round <= rounds; ++round) {
    kv.mark_dirty();
    take(sleeps.first, round > 0);
    take(sleeps.second, round > 0);
    give_back(bytes, sleeps.given_back, round > 0);
    kv.change(100);  // the last block of each hundred
    take(sleeps.after_steps, round > 0);
  }
  return sleeps;
}

}  // namespace torpor::bench
