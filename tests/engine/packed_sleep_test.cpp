// SPDX-License-Identifier: Apache-2.0
// What sleeps in host memory is packed there: the same tokens, less memory, and no more than the budget.
#include <boost/filesystem.hpp>

#include "allocator/host_device.h"
#include "base/units.h"
#include "engine/tag_sleep.h"
#include "tests/engine/sleep_failure.h"
#include "tests/support/rank_call.h"

namespace torpor {
namespace {

using namespace test;

class PackedSleep : public SleepFailure {
 protected:
  static TestEngineOptions options(int ranks = 1) {
    return {.ranks = ranks, .retain_kv_bytes = kMiB, .host_compression = Codec::kBf16, .bf16 = true, .mix_steps = true};
  }
};

TEST_F(PackedSleep, I10TheSameTokensComeFromThreeQuartersOfTheMemory) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    SleepingEngine slept = make(options(ranks));
    begin(slept.engine);
    for (int again = 0; again < 3; ++again) {
      const SleepPlan plan = value_of(slept.controller.plan_sleep(to_host()));
      const SleepReport report = value_of(slept.controller.sleep(to_host()));
      EXPECT_EQ(plan.host_bytes, report.host_bytes);
      EXPECT_GT(again == 0 ? report.saved_bytes : report.reused_bytes, 0u);
      uint64_t held = 0;
      for (const RankLedger& ledger : report.ledgers) {
        for (const auto& [tag, entry] : ledger.tags) held += tag == "runtime" ? 0 : entry.backup_host_bytes;
      }
      const uint64_t values = report.host_bytes - static_cast<uint64_t>(ranks) * kRuntimeBytes;  // which are noise
      EXPECT_LE(held, values * 80 / 100) << "small blocks save a little less";
      EXPECT_GT(held, values * 70 / 100);
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      slept.engine.step();
    }
    EXPECT_EQ(finish(slept.engine), uninterrupted(options(ranks)));
    EXPECT_EQ(slept.engine.recomputed(), 0);
  }
}

// --- one rank, and content of some size ---

class PackedRank : public SleepFailure {
 protected:
  static constexpr uint64_t kBytes = 48 * kMiB;
  static constexpr uint64_t kRoomIfPacked = 46 * kMiB;  // with staging memory for a thread
  static constexpr uint64_t kStaging = 8 * kMiB;

  std::unique_ptr<RankMemory> make(uint64_t budget, bool spills = false, Codec codec = Codec::kBf16) {
    auto memory = value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(),
                                              {.arena_budget_bytes = budget,
                                               .arena_slab_bytes = kMiB,
                                               .threads = 1,
                                               .keep_backup = false,
                                               .host_compression = codec,
                                               .spill_dir = spills ? temporary_.path() + "/spill" : "",
                                               .spill_staging_bytes = 4 * kMiB}));
    weights_ = value_of(memory->allocate("weights", "w", kBytes));
    return memory;
  }
  std::span<std::byte> content() const {
    return {reinterpret_cast<std::byte*>(weights_), kBytes};  // NOLINT(performance-no-int-to-ptr)
  }
  // Values of bf16, or noise: the same MiB again and again, numbered. Each byte by itself takes a minute where a
  // sanitizer watches.
  void fill(RankMemory& memory, bool bf16) const {
    uint64_t random = 1;
    std::vector<std::byte> values(kMiB);
    for (uint64_t i = 0; i < kMiB; i += 2) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      values[i] = static_cast<std::byte>(random >> 56);
      const auto upper = static_cast<std::byte>(random >> 48);
      values[i + 1] = bf16 ? (upper & std::byte{0x81}) | std::byte{0x3c} : upper;
    }
    for (uint64_t at = 0; at < kBytes; at += kMiB) {
      values[0] = static_cast<std::byte>(at / kMiB);
      std::copy(values.begin(), values.end(), content().begin() + static_cast<std::ptrdiff_t>(at));
    }
    memory.mark_dirty("weights");
    digest_ = digest_of(content());
  }
  void expect_content() const { EXPECT_EQ(digest_of(content()), digest_); }
  static uint64_t on_disk(const RankMemory& memory) { return memory.ledger().tags.at("weights").backup_disk_bytes; }

  DeviceAddress weights_ = 0;
  mutable Digest digest_;
};

TEST_F(PackedRank, ASleepForWhichOnlyPackedBytesHaveRoom) {
  {
    const auto plain = make(kRoomIfPacked, /*spills=*/false, Codec::kNone);
    fill(*plain, /*bf16=*/true);
    EXPECT_FALSE(value_of(TagSleep(*plain).plan_sleep({}, {"weights"})).obstacle.empty());
    EXPECT_FAILS(TagSleep(*plain).sleep({}, {"weights"}), Code::kResourceExhausted, "budget");
  }
  for (const bool spills : {false, true}) {
    SCOPED_TRACE(spills);
    const auto memory = make(kRoomIfPacked, spills);
    fill(*memory, /*bf16=*/true);
    TagSleep tags(*memory);
    for (int again = 0; again < 2; ++again) {
      EXPECT_EQ(value_of(tags.plan_sleep({}, {"weights"})).obstacle, "");
      EXPECT_EQ(value_of(tags.sleep({}, {"weights"})).copied_bytes, kBytes);
      const RankLedger ledger = memory->ledger();
      EXPECT_LE(ledger.tags.at("weights").backup_host_bytes, kBytes * 77 / 100);
      EXPECT_LE(ledger.arena_used_bytes, kBytes * 77 / 100 + kStaging);
      EXPECT_LE(ledger.arena_held_bytes, kRoomIfPacked);
      EXPECT_EQ(on_disk(*memory), 0u);
      ASSERT_SUCCEEDS(tags.wake({}));
      expect_content();
      EXPECT_EQ(memory->ledger().arena_used_bytes, 0u) << "staging memory is kept only for the wake";
    }
  }
}

TEST_F(PackedRank, WhatDoesNotGetSmallerGoesToTheFileOrFailsAndNothingIsLost) {
  {
    const auto memory = make(kRoomIfPacked);
    fill(*memory, /*bf16=*/false);
    EXPECT_FAILS(TagSleep(*memory).sleep({}, {"weights"}), Code::kResourceExhausted, "budget");
    expect_content();
    EXPECT_EQ(memory->ledger().arena_used_bytes, 0u);
    fill(*memory, /*bf16=*/true);
    ASSERT_SUCCEEDS(TagSleep(*memory).sleep({}, {"weights"}));
    ASSERT_SUCCEEDS(TagSleep(*memory).wake({}));
    expect_content();
  }
  const auto memory = make(kRoomIfPacked, /*spills=*/true);
  TagSleep tags(*memory);
  for (const bool bf16 : {false, false, true, false}) {
    fill(*memory, bf16);
    ASSERT_SUCCEEDS(tags.sleep({}, {"weights"}));
    EXPECT_LE(memory->ledger().arena_held_bytes, kRoomIfPacked);
    if (!bf16) {
      EXPECT_GT(on_disk(*memory), 0u);
    }
    ASSERT_SUCCEEDS(tags.wake({}));
    expect_content();
  }
}

TEST_F(PackedRank, WhatIsSavedCanBeReadWhileItSleeps) {
  const auto memory = make(0);
  fill(*memory, /*bf16=*/true);
  const std::vector<std::byte> all(content().begin(), content().end());
  ASSERT_SUCCEEDS(TagSleep(*memory).sleep({}, {"weights"}));
  std::vector<std::byte> read(10 * kMiB);
  for (const uint64_t offset : {uint64_t{0}, 4 * kMiB - 5, kBytes - 10 * kMiB}) {
    ASSERT_SUCCEEDS(memory->read_saved(weights_ + offset, read));
    EXPECT_TRUE(std::equal(read.begin(), read.end(), all.begin() + static_cast<std::ptrdiff_t>(offset))) << offset;
  }
}

TEST_F(PackedRank, ABudgetForRetainedBlocksCountsWhatTheyTake) {
  constexpr uint64_t kBlock = 256 * kKiB;
  constexpr uint32_t kBlocks = 16;
  const auto memory = value_of(RankMemory::create(
      value_of(make_host_device()), linux_file_system(),
      {.threads = 1, .retain_kv_bytes = kBlocks * kBlock * 78 / 100, .host_compression = Codec::kBf16}));
  const DeviceAddress kv = value_of(memory->allocate("kv_cache", "kv", kBlocks * kBlock));
  auto* const words = reinterpret_cast<uint16_t*>(kv);  // NOLINT(performance-no-int-to-ptr)
  for (size_t i = 0; i < kBlocks * kBlock / 2; ++i)
    words[i] = static_cast<uint16_t>(0x3c00 | (i * 2654435761u >> 7 & 0x1ff));
  ASSERT_SUCCEEDS(memory->set_kv_layout(
      "kv_cache",
      {.num_blocks = kBlocks,
       .tensors = {{.address = kv, .layers = 1, .layer_stride = 1, .block_stride = kBlock, .block_bytes = kBlock}}}));
  const Digest digest = digest_of({reinterpret_cast<const std::byte*>(kv), kBlocks * kBlock});  // NOLINT
  const std::vector<std::string> tags{"kv_cache"};
  orders::Save order{.tags = tags, .steps = 1};
  for (uint32_t block = 0; block < kBlocks; ++block) {
    order.blocks.push_back(static_cast<int32_t>(block));
    order.versions.push_back(block + 1);
  }
  for (int again = 0; again < 3; ++again) {
    const auto saved = value_of(call_rank(*memory, order));
    EXPECT_EQ(again == 0 ? saved.bytes : saved.reused_bytes, kBlocks * kBlock);
    value_of(call_rank(*memory, orders::Detach{.tags = tags}));
    value_of(call_rank(*memory, orders::Restore{.tags = tags}));
    value_of(call_rank(*memory, orders::Finish{.tags = tags, .keep_backup = true}));
    EXPECT_EQ(digest_of({reinterpret_cast<const std::byte*>(kv), kBlocks * kBlock}), digest);  // NOLINT
    EXPECT_LE(memory->ledger().tags.at("kv_cache").backup_host_bytes, kBlocks * kBlock * 78 / 100);
  }
}

TEST_F(PackedRank, AnotherCodecIsRefused) {
  EXPECT_FAILS(
      RankMemory::create(value_of(make_host_device()), linux_file_system(), {.host_compression = Codec::kZstd}),
      Code::kInvalidArgument, "zstd");
}

}  // namespace
}  // namespace torpor
