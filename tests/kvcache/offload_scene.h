// SPDX-License-Identifier: Apache-2.0
// A scheduler over ranks with real stores, driven step by step; the device blocks are numbers with versions.
#pragma once

#include <map>

#include "kvcache/offload_scheduler.h"
#include "tests/kvcache/offload_rank.h"

namespace torpor::test {

class FakeDeviceBlocks final : public DeviceBlocks {
 public:
  explicit FakeDeviceBlocks(int32_t blocks)
      : versions_(static_cast<size_t>(blocks)), holds_(static_cast<size_t>(blocks)) {}
  ContentVersion version(int32_t block) const override { return versions_[static_cast<size_t>(block)]; }
  void hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
            std::span<uint8_t> held) override {
    for (size_t i = 0; i < blocks.size(); ++i) {
      held[i] = version(blocks[i]) == versions[i] ? 1 : 0;
      holds_[static_cast<size_t>(blocks[i])] += held[i];
    }
  }
  void release(std::span<const int32_t> blocks) override {
    for (const int32_t block : blocks) EXPECT_GE(--holds_[static_cast<size_t>(block)], 0) << "block " << block;
  }
  int holds(int32_t block) const { return holds_[static_cast<size_t>(block)]; }
  void write(int32_t block) { versions_[static_cast<size_t>(block)] = static_cast<ContentVersion>(++last_); }
  void clear(int32_t block) { versions_[static_cast<size_t>(block)] = ContentVersion::kNone; }

 private:
  std::vector<ContentVersion> versions_;
  std::vector<int> holds_;
  uint64_t last_ = 0;
};

struct OffloadSceneOptions {
  int32_t ranks = 2;
  OffloadRankOptions rank;
  OffloadSchedulerOptions scheduler;
  PlacementOptions placement;
  EventPort events;
};

class OffloadScene {
 public:
  explicit OffloadScene(OffloadSceneOptions options)
      : options_(std::move(options)), device(options_.rank.blocks), placement_(make_placement(options_.placement)) {
    for (int32_t rank = 0; rank < options_.ranks; ++rank) {
      options_.rank.rank = rank;
      ranks.push_back(std::make_unique<OffloadRank>(options_.rank));
    }
    OffloadSchedulerOptions& with = options_.scheduler;
    with.index = {.host_slots = options_.rank.host_slots,
                  .disk_segments = options_.rank.disk_segments,
                  .segment_slots = options_.rank.segment_slots,
                  .remote_slots = options_.rank.remote_slots,
                  .device_blocks = options_.rank.blocks};
    with.ranks = options_.ranks;
    with.block_tokens = 4;
    start();
  }
  // A new scheduler over workers that find what is on disk.
  void start() {
    scheduler = value_of(OffloadScheduler::create(options_.scheduler, device, *placement_, clock, options_.events));
    std::vector<std::vector<RecoveredBlock>> found;
    for (const auto& rank : ranks) {
      rank->worker().open_space(scheduler->space(), {});
      found.push_back(value_of(rank->worker().recover(scheduler->space())));
    }
    const std::vector<AdoptedBlock> adopted = scheduler->adopt(found);
    for (const auto& rank : ranks) rank->worker().adopt(adopted);
  }
  void restart() {
    for (const auto& rank : ranks) rank->open();
    start();
  }

  // New content in a block, on every rank the same number.
  void compute(int32_t block, uint32_t value) {
    device.write(block);
    for (const auto& rank : ranks) rank->fill(block, value);
  }
  bool all_have(int32_t block, uint32_t value) const {
    return std::all_of(ranks.begin(), ranks.end(), [&](const auto& rank) { return rank->has(block, value); });
  }
  TransferHandle offer(const std::vector<uint32_t>& keys, const std::vector<int32_t>& blocks, uint64_t after_step = 0,
                       int32_t priority = 0) {
    const std::vector<BlockKey> named = keys_of(keys);
    return scheduler->offer({.keys = named, .blocks = blocks, .after_step = after_step, .priority = priority});
  }
  std::vector<BlockKey> keys_of(const std::vector<uint32_t>& numbers) const {
    std::vector<BlockKey> keys;
    for (const uint32_t number : numbers) keys.push_back(key_number(number, scheduler->space()));
    return keys;
  }
  // One step: the plan to every rank, by way of its bytes. False: there was nothing to send.
  bool send(bool flush = true, bool of_device = false) {
    const TransferPlan& plan = of_device ? scheduler->plan_device() : scheduler->plan_step(flush);
    if (plan.empty()) return false;
    const TransferPlan read = value_of(TransferPlan::decode(plan.encode()));
    for (const auto& rank : ranks) EXPECT_SUCCEEDS(rank->worker().run(read));
    return true;
  }
  TransferReport report_of(size_t rank) {
    ranks[rank]->worker().wait();
    return value_of(TransferReport::decode(ranks[rank]->worker().poll().encode()));
  }
  // Until nothing is queued or under way.
  void drain() {
    for (int step = 0; step < 100 && scheduler->busy(); ++step) {
      send();
      for (size_t rank = 0; rank < ranks.size(); ++rank) EXPECT_SUCCEEDS(scheduler->apply(report_of(rank)));
      EXPECT_SUCCEEDS(scheduler->check());
    }
    EXPECT_FALSE(scheduler->busy());
  }
  // Keys up into these blocks. How many came.
  int32_t load(const std::vector<uint32_t>& keys, const std::vector<int32_t>& blocks) {
    const uint32_t request = scheduler->begin_request("r");
    const int32_t found = scheduler->match(request, keys_of(keys), 0);
    const auto count = std::min(static_cast<size_t>(found), blocks.size());
    (void)scheduler->allocated(request, std::span(blocks).first(count));
    int32_t good = 0;
    if (count > 0) {
      drain();
      const std::vector<EndedLoad> ended = scheduler->take_loads();
      EXPECT_EQ(ended.size(), 1u);
      good = ended.at(0).good_blocks;
      for (int32_t i = 0; i < good; ++i) device.write(blocks[static_cast<size_t>(i)]);
      scheduler->loaded(request, std::span(blocks).first(static_cast<size_t>(good)));
    }
    EXPECT_TRUE(scheduler->finished(request));
    return good;
  }
  int32_t hits(const std::vector<uint32_t>& keys) {
    const uint32_t request = scheduler->begin_request("r");
    const int32_t found = scheduler->match(request, keys_of(keys), 0);
    EXPECT_TRUE(scheduler->finished(request));
    return found;
  }

 private:
  OffloadSceneOptions options_;

 public:
  ManualClock clock;
  FakeDeviceBlocks device;
  std::vector<std::unique_ptr<OffloadRank>> ranks;

 private:
  std::unique_ptr<Placement> placement_;

 public:
  std::unique_ptr<OffloadScheduler> scheduler;
};

}  // namespace torpor::test
