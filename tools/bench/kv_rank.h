// SPDX-License-Identifier: Apache-2.0
// A rank with one tag of KV blocks, whose content versions a bench sets, and the steps of a sleep and a wake to host.
#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/host_device.h"
#include "engine/rank_service.h"
#include "tools/bench/bench.h"

namespace torpor::bench {

class KvRank {
 public:
  // Of `blocks` in the pool, `live` are live, evenly spread. All are retained after a wake.
  KvRank(uint32_t blocks, uint64_t block_bytes, uint32_t live) {
    const uint64_t bytes = blocks * block_bytes;
    memory_ = must(RankMemory::create(must(make_host_device()), linux_file_system(), {.retain_kv_bytes = bytes}));
    const DeviceAddress address = must(memory_->allocate("kv_cache", "kv", bytes));
    content_ = {reinterpret_cast<std::byte*>(address), bytes};  // NOLINT(performance-no-int-to-ptr)
    std::memset(content_.data(), 7, bytes);
    must(memory_->set_kv_layout("kv_cache", {.num_blocks = blocks,
                                             .tensors = {{.address = address,
                                                          .layers = 1,
                                                          .layer_stride = block_bytes,
                                                          .block_stride = block_bytes,
                                                          .block_bytes = block_bytes}}}));
    save_.tags = kTags;
    save_.steps = 1;
    for (uint64_t i = 0; i < live; ++i) save_.blocks.push_back(static_cast<int32_t>(i * blocks / live));
    save_.versions.resize(live);
    change(1);
  }
  // Give the last live block of each `every` other content.
  void change(size_t every) {
    ++save_.steps;
    for (size_t i = every - 1; i < save_.versions.size(); i += every) save_.versions[i] = ++last_version_;
  }
  void plan() {
    orders::Save planned = save_;
    planned.stage = orders::Save::Stage::kPlan;
    call(planned);
  }
  // Return the bytes that were copied.
  uint64_t save() { return call(orders::Save(save_)).bytes; }
  void release() { call(orders::Detach{.tags = kTags}); }
  void restore() {
    call(orders::Restore{.tags = kTags});
    call(orders::Finish{.tags = kTags, .keep_backup = true});
  }
  void mark_dirty() { memory_->mark_dirty("kv_cache"); }
  std::span<std::byte> content() const { return content_; }
  const std::vector<int32_t>& live() const { return save_.blocks; }

 private:
  template <class Order>
  typename Order::Reply call(const Order& order) {
    return must(decode_reply<Order>(RankService(*memory_).call(encode_order(order))));
  }
  inline static const std::vector<std::string> kTags{"kv_cache"};
  std::unique_ptr<RankMemory> memory_;
  std::span<std::byte> content_;
  uint64_t last_version_ = 0;
  orders::Save save_;
};

}  // namespace torpor::bench
