// SPDX-License-Identifier: Apache-2.0
// Sleeps of one rank to disk, one after the other: the first, one after no step, one after steps that changed one block
// in a hundred; beside what their files cost without any content: as many files of a page, made durable and renamed.
#pragma once

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "allocator/host_device.h"
#include "checkpoint/checkpoint_manager.h"
#include "engine/rank_service.h"
#include "engine/tags.h"
#include "tools/bench/bench.h"

namespace torpor::bench {

// Half of it weights, half KV blocks.
class DiskSleeper {
 public:
  static constexpr uint64_t kBlockBytes = 512 * kKiB;

  DiskSleeper(uint64_t bytes, std::string directory)
      : manager_(must(CheckpointManager::open(linux_file_system(), std::move(directory), {.incremental = true}))),
        memory_(must(RankMemory::create(must(make_host_device()), linux_file_system()))) {
    const auto blocks = static_cast<uint32_t>(bytes / 2 / kBlockBytes);
    const uint64_t weight_bytes = bytes - blocks * kBlockBytes;
    fill(must(memory_->allocate(kWeightsTag, "w", weight_bytes)), weight_bytes, 3);
    kv_ = must(memory_->allocate(kKvCacheTag, "kv", blocks * kBlockBytes));
    must(memory_->set_kv_layout(kKvCacheTag, {.num_blocks = blocks,
                                              .tensors = {{.address = kv_,
                                                           .layers = 1,
                                                           .layer_stride = kBlockBytes,
                                                           .block_stride = kBlockBytes,
                                                           .block_bytes = kBlockBytes}}}));
    save_ = {.tags = kTags, .steps = 1, .as_proven = true};
    for (uint32_t block = 0; block < blocks; ++block) {
      save_.blocks.push_back(static_cast<int32_t>(block));
      save_.versions.push_back(0);
      write(block);
    }
  }
  void take_steps() {
    ++save_.steps;
    for (size_t block = 99; block < save_.versions.size(); block += 100) write(block);
  }
  // As SleepController does it; how many bytes were copied.
  uint64_t sleep() {
    call(orders::Describe{});
    PendingCheckpoint pending = must(manager_->begin(0));
    must(pending.write_state(EngineCheckpoint{}));
    save_.directory = pending.staging_path();
    save_.writing = pending.writing();
    orders::Save::Reply saved = call(orders::Save(save_));
    pending.add_rank(saved.saved);
    call(orders::Inform{.committed = must(pending.commit())});
    call(orders::Detach{.tags = kTags});
    pending.retire_older();
    return saved.bytes;
  }
  void wake() {
    call(orders::Restore{.tags = kTags});
    call(orders::Finish{.tags = kTags, .keep_backup = true});
  }

 private:
  void write(size_t block) {
    save_.versions[block] = ++last_version_;
    fill(kv_ + block * kBlockBytes, kBlockBytes, static_cast<int>(last_version_ % 251));
  }
  static void fill(DeviceAddress address, uint64_t bytes, int value) {
    std::memset(reinterpret_cast<void*>(address), value, bytes);  // NOLINT(performance-no-int-to-ptr)
  }
  template <class Order>
  typename Order::Reply call(const Order& order) {
    return must(decode_reply<Order>(RankService(*memory_).call(encode_order(order))));
  }
  inline static const std::vector<std::string> kTags{kWeightsTag, kKvCacheTag};
  std::unique_ptr<CheckpointManager> manager_;
  std::unique_ptr<RankMemory> memory_;
  DeviceAddress kv_ = 0;
  uint64_t last_version_ = 0;
  orders::Save save_;
};

// STATE, chunks, refs and MANIFEST, each a page, in a directory that is then renamed.
inline void commit_nothing(Directory& store, int number) {
  const std::string staging = fmt::format("n-{}", number);
  const auto directory = must(store.create_directory(staging));
  const std::vector<std::byte> page(kPage);
  for (const char* const name : {"STATE", "chunks", "refs", "MANIFEST"}) {
    const auto file = must(directory->create_file(name));
    must(file->pwrite(page, 0));
    must(file->sync());
  }
  must(directory->sync());
  must(store.rename_new(staging, fmt::format("c-{}", number)));
  must(store.sync());
}

struct DiskSleeps {
  struct One {
    std::vector<double> seconds;
    uint64_t bytes = 0;  // copied by the last
  };
  One first, second, after_steps, nothing;
};

inline DiskSleeps sleep_to_disk_again(uint64_t bytes, int rounds) {
  DiskSleeps all;
  std::string pattern = (std::filesystem::temp_directory_path() / "torpor-bench-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) must(Status(system_error(errno, "no directory")));
  for (int round = 0; round <= rounds; ++round) {
    if (round == 1) all = {};
    const std::string directory = fmt::format("{}/{}", pattern, round);
    DiskSleeper sleeper(bytes, directory);
    const auto timed = [&](DiskSleeps::One& one) {
      one.seconds.push_back(seconds([&] { one.bytes = sleeper.sleep(); }));
      sleeper.wake();
    };
    timed(all.first);
    timed(all.second);
    const auto store = must(linux_file_system().open_directory(directory, false));
    all.nothing.seconds.push_back(seconds([&] { commit_nothing(*store, round); }));
    sleeper.take_steps();
    timed(all.after_steps);
    std::filesystem::remove_all(directory);
  }
  std::filesystem::remove_all(pattern);
  return all;
}

}  // namespace torpor::bench
