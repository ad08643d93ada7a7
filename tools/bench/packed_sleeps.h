// SPDX-License-Identifier: Apache-2.0
// Sleeps of bf16 weights and KV, half and half, whose bytes in host memory are packed, beside such as are not: what
// they hold there, and how fast they are; the ceiling is all cores copying.
#pragma once

#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "allocator/host_device.h"
#include "engine/rank_service.h"
#include "tools/bench/bench.h"
#include "tools/bench/bf16_values.h"
#include "tools/bench/direct_sleeps.h"

namespace torpor::bench {

class Bf16Rank {
 public:
  static constexpr uint64_t kBlockBytes = 512 * kKiB;
  Bf16Rank(uint64_t bytes, Codec codec) : half_(bytes / 2 / kBlockBytes * kBlockBytes) {
    memory_ = must(RankMemory::create(
        must(make_host_device()), linux_file_system(),
        {.arena_keep_bytes = UINT64_MAX, .keep_backup = false, .retain_kv_bytes = 0, .host_compression = codec}));
    const DeviceAddress weights = must(memory_->allocate("weights", "all", half_));
    const DeviceAddress kv = must(memory_->allocate("kv_cache", "all", half_));
    const auto blocks = static_cast<uint32_t>(half_ / kBlockBytes);
    must(memory_->set_kv_layout("kv_cache", {.num_blocks = blocks,
                                             .tensors = {{.address = kv,
                                                          .layers = 1,
                                                          .layer_stride = kBlockBytes,
                                                          .block_stride = kBlockBytes,
                                                          .block_bytes = kBlockBytes}}}));
    for (uint32_t block = 0; block < blocks; ++block) save_.blocks.push_back(static_cast<int32_t>(block));
    fill_large(memory_at(weights), fill_weights);
    fill_large(memory_at(kv), fill_kv);
  }
  void sleep() {
    memory_->mark_dirty("weights");
    call(save_);
    call(orders::Detach{.tags = kTags});
    held_ = memory_->ledger();
  }
  void wake() {
    call(orders::Restore{.tags = kTags});
    call(orders::Finish{.tags = kTags, .keep_backup = false});
  }
  uint64_t bytes() const { return 2 * half_; }
  uint64_t held(const std::string& tag) const { return held_.tags.at(tag).backup_host_bytes; }  // in the last sleep
  uint64_t used() const { return held_.arena_used_bytes; }                                      // with all else

 private:
  std::span<std::byte> memory_at(DeviceAddress address) const {
    return {reinterpret_cast<std::byte*>(address), half_};  // NOLINT(performance-no-int-to-ptr)
  }
  template <class Order>
  void call(const Order& order) {
    must(decode_reply<Order>(RankService(*memory_).call(encode_order(order))));
  }
  inline static const std::vector<std::string> kTags{"weights", "kv_cache"};
  const uint64_t half_;
  std::unique_ptr<RankMemory> memory_;
  orders::Save save_{.tags = kTags};
  RankLedger held_;
};

inline void print_packed_sleeps(uint64_t bytes, int rounds, bool as_json) {
  Bf16Rank plain(bytes, Codec::kNone), packed(bytes, Codec::kBf16);
  Direct ceiling({plain.bytes()}, {.threads = cores(), .keep_host_memory = true});
  struct Times {
    std::vector<double> sleep, wake;
  } of_plain, of_packed, of_ceiling;
  for (int round = 0; round <= rounds; ++round) {
    const auto run = [round](auto& contestant, Times& times) {
      const double sleep = seconds([&] { contestant.sleep(); });
      const double wake = seconds([&] { contestant.wake(); });
      if (round > 0) times.sleep.push_back(sleep), times.wake.push_back(wake);
    };
    run(plain, of_plain);
    run(packed, of_packed);
    run(ceiling, of_ceiling);
  }
  const auto rate = [&](const std::vector<double>& times) {
    return static_cast<double>(plain.bytes()) / 1e9 / median(times);
  };
  const auto ratio = [](uint64_t of, uint64_t by) { return static_cast<double>(of) / static_cast<double>(by); };
  const auto row = [&](const Bf16Rank& rank, const Times& times) {
    return nlohmann::ordered_json{{"weights_bytes", rank.held("weights")},
                                  {"kv_bytes", rank.held("kv_cache")},
                                  {"arena_bytes", rank.used()},
                                  {"sleep", rate(times.sleep)},
                                  {"wake", rate(times.wake)},
                                  {"sleep_of_ceiling", rate(times.sleep) / rate(of_ceiling.sleep)},
                                  {"wake_of_ceiling", rate(times.wake) / rate(of_ceiling.wake)}};
  };
  nlohmann::ordered_json json{{"bytes", plain.bytes()},
                              {"rounds", rounds},
                              {"unit", "GB/s"},
                              {"plain", row(plain, of_plain)},
                              {"packed", row(packed, of_packed)},
                              {"ceiling", {{"sleep", rate(of_ceiling.sleep)}, {"wake", rate(of_ceiling.wake)}}},
                              {"weights_ratio", ratio(plain.held("weights"), packed.held("weights"))},
                              {"kv_ratio", ratio(plain.held("kv_cache"), packed.held("kv_cache"))},
                              {"arena_ratio", ratio(plain.used(), packed.used())}};
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return;
  }
  fmt::print("{} MiB of bf16 weights and KV, medians of {} rounds\n", plain.bytes() / kMiB, rounds);
  fmt::print("held: weights {:.3f} : 1, KV {:.3f} : 1; all of the arena, with staging, {} and {} MiB, {:.3f} : 1\n",
             json["weights_ratio"].get<double>(), json["kv_ratio"].get<double>(), plain.used() / kMiB,
             packed.used() / kMiB, json["arena_ratio"].get<double>());
  for (const char* how : {"plain", "packed"}) {
    fmt::print("{:<8} sleep {:5.2f} GB/s, {:.2f} of the ceiling; wake {:5.2f}, {:.2f}\n", how,
               json[how]["sleep"].get<double>(), json[how]["sleep_of_ceiling"].get<double>(),
               json[how]["wake"].get<double>(), json[how]["wake_of_ceiling"].get<double>());
  }
  fmt::print("ceiling  sleep {:5.2f} GB/s; wake {:5.2f}\n", rate(of_ceiling.sleep), rate(of_ceiling.wake));
}

}  // namespace torpor::bench
