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
#include "engine/rank_service.h"
#include "tools/bench/bench.h"

namespace torpor::bench {

// torpor: one tag of KV blocks, each known by a stamp.
class TorporKv {
 public:
  static constexpr uint64_t kBlockBytes = 512 * kKiB;  // of 16 tokens of a model of some size, over all its layers
  explicit TorporKv(uint64_t bytes) {
    memory_ = must(RankMemory::create(must(make_host_device()), linux_file_system(), {.retain_kv_bytes = bytes}));
    const auto blocks = static_cast<uint32_t>(bytes / kBlockBytes);
    address_ = must(memory_->allocate("kv_cache", "kv", blocks * kBlockBytes));
    std::memset(reinterpret_cast<void*>(address_), 7, blocks * kBlockBytes);  // NOLINT(performance-no-int-to-ptr)
    must(memory_->set_kv_layout("kv_cache", {.num_blocks = blocks,
                                             .tensors = {{.address = address_,
                                                          .layers = 1,
                                                          .layer_stride = kBlockBytes,
                                                          .block_stride = kBlockBytes,
                                                          .block_bytes = kBlockBytes}}}));
    for (uint32_t block = 0; block < blocks; ++block) {
      save_.blocks.push_back(static_cast<int32_t>(block));
      save_.stamps.push_back(++last_stamp_);
    }
    save_.tags = kTags;
    save_.steps = 1;
  }
  // The engine has gone on: the last block of each hundred is another one.
  void take_steps() {
    ++save_.steps;
    for (size_t block = 99; block < save_.stamps.size(); block += 100) save_.stamps[block] = ++last_stamp_;
  }
  uint64_t sleep() {
    const uint64_t copied = call(orders::Save(save_)).bytes;
    call(orders::Detach{.tags = kTags});
    return copied;
  }
  void wake() {
    call(orders::Attach{.tags = kTags});
    call(orders::Restore{.tags = kTags});
    call(orders::Finish{.tags = kTags, .keep_backup = true});
  }
  void forget() { memory_->mark_dirty("kv_cache"); }

 private:
  template <class Order>
  typename Order::Reply call(const Order& order) {
    return must(decode_reply<Order>(RankService(*memory_).call(encode_order(order))));
  }
  inline static const std::vector<std::string> kTags{"kv_cache"};
  std::unique_ptr<RankMemory> memory_;
  DeviceAddress address_ = 0;
  uint64_t last_stamp_ = 0;
  orders::Save save_;
};

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
  TorporKv kv(bytes);
  KvSleeps sleeps;
  const auto take = [&](KvSleeps::Sleep& sleep, bool counts) {
    take_time(sleep, counts, [&] { sleep.bytes = kv.sleep(); });
    kv.wake();
  };
  for (int round = 0; round <= rounds; ++round) {
    kv.forget();
    take(sleeps.first, round > 0);
    take(sleeps.second, round > 0);
    give_back(bytes, sleeps.given_back, round > 0);
    kv.take_steps();
    take(sleeps.after_steps, round > 0);
  }
  return sleeps;
}

}  // namespace torpor::bench
