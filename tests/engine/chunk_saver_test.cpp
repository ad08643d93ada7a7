// SPDX-License-Identifier: Apache-2.0
// What ChunkSaver has under way, and what it tells of what is saved.
#include "engine/chunk_saver.h"

#include <cstring>
#include <functional>
#include <utility>

#include "allocator/host_device.h"
#include "allocator/sleep_allocator.h"
#include "base/units.h"
#include "offload/host_tier.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

constexpr uint64_t kPiece = 64 * kKiB;
constexpr size_t kPieces = 8;

class ScriptedRelease final : public ReleaseGate {
 public:
  Status on_saved(std::span<const ChunkPlan> chunks) override {
    for (const ChunkPlan& chunk : chunks) saved.push_back(chunk.key.index);
    return when ? when() : ok();
  }
  uint64_t job_bytes() const override { return kPiece; }

  std::function<Status()> when;
  std::vector<uint64_t> saved;
};

// A place in host memory that cannot take what comes after the first `room` chunks, and counts what it is asked.
class ScriptedTier final : public RecordStore {
 public:
  explicit ScriptedTier(HostArena& arena) : inner_(arena) {}
  const StoreTraits& traits() const override { return inner_.traits(); }
  Status prepare(uint64_t bytes, uint64_t chunks) override {
    ++prepared;
    if (before) before();
    return inner_.prepare(bytes, chunks);
  }
  Result<std::span<std::byte>> place(SavedChunk& chunk) override {
    if (room == 0) return Error{.code = Code::kResourceExhausted, .what = "no room for a chunk"};
    --room;
    return inner_.place(chunk);
  }
  std::span<std::byte> view(const SavedChunk& chunk) override { return inner_.view(chunk); }
  Status finish() override {
    ++finished;
    return inner_.finish();
  }

  std::function<void()> before;  // it is made ready
  size_t room = kPieces;
  int prepared = 0;
  int finished = 0;

 private:
  HostTier inner_;
};

// Nothing is copied but where somebody waits for it: what has ended is what was waited for.
class ChunkSaverTest : public ::testing::Test {
 protected:
  ChunkSaverTest()
      : device_(value_of(make_host_device())),
        allocator_(value_of(SleepAllocator::create(*device_, {.handle_bytes = kPiece}))),
        arena_(value_of(HostArena::create({}))),
        transfers_(value_of(TransferEngine::create(*device_, *arena_, {.threads = 1, .own_threads = false}))),
        blocking_(*transfers_),
        tier_(*arena_),
        other_(*arena_) {
    const DeviceAddress memory = value_of(allocator_->allocate("weights", "w", kPieces * kPiece));
    for (size_t i = 0; i < kPieces; ++i) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr)
      std::memset(reinterpret_cast<char*>(memory + i * kPiece), static_cast<int>('a' + i), kPiece);
      plans_.push_back(
          {.key = {.tag = "weights", .region = "w", .index = i}, .pieces = {{memory + i * kPiece, kPiece}}});
    }
  }
  uint64_t ended() const {
    uint64_t all = 0;
    for (const uint64_t each : transfers_->counts()) all += each;
    return all;
  }
  // Whether these are the first chunks, each with its own bytes.
  bool are_saved(const std::vector<SavedChunk>& saved, size_t chunks, ScriptedTier& tier) {
    if (saved.size() != chunks) return false;
    for (size_t i = 0; i < chunks; ++i) {
      const std::span<const std::byte> bytes = tier.view(saved[i]);
      const auto expected = static_cast<std::byte>('a' + i);
      if (saved[i].key != plans_[i].key || bytes.size() != kPiece) return false;
      if (bytes.front() != expected || bytes.back() != expected) return false;
    }
    return true;
  }

  const std::unique_ptr<DeviceMemory> device_;
  const std::unique_ptr<SleepAllocator> allocator_;
  const std::unique_ptr<HostArena> arena_;
  const std::unique_ptr<TransferEngine> transfers_;
  BlockingTransfers blocking_;
  ScriptedTier tier_;
  ScriptedTier other_;
  ScriptedRelease gate_;
  std::vector<ChunkPlan> plans_;
  std::vector<SavedChunk> saved_;
};

TEST_F(ChunkSaverTest, WithoutAGateAllIsOneJob) {
  ChunkSaver saver(blocking_);
  ASSERT_SUCCEEDS(saver.copy(plans_, tier_, saved_));
  EXPECT_EQ(ended(), 0u);
  ASSERT_SUCCEEDS(saver.wait());
  EXPECT_TRUE(are_saved(saved_, kPieces, tier_));
  EXPECT_EQ(std::pair(tier_.prepared, tier_.finished), std::pair(1, 1));
}

TEST_F(ChunkSaverTest, TheGateIsToldOfEachJobWhileTheNextIsUnderWay) {
  std::vector<size_t> had;  // saved when the gate was told, beside those it was told
  gate_.when = [&] {
    had.push_back(saved_.size());
    return ok();
  };
  ChunkSaver saver(blocking_, &gate_);
  ASSERT_SUCCEEDS(saver.copy(plans_, tier_, saved_));
  EXPECT_EQ(gate_.saved, (std::vector<uint64_t>{0, 1, 2, 3, 4, 5}));  // two jobs are under way
  ASSERT_SUCCEEDS(saver.wait());
  EXPECT_EQ(gate_.saved, (std::vector<uint64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(had, (std::vector<size_t>{1, 2, 3, 4, 5, 6, 7, 8}));  // a page goes when its image has it
  EXPECT_TRUE(are_saved(saved_, kPieces, tier_));
}

TEST_F(ChunkSaverTest, WithAGateNothingDrainsFromOneTierToTheNext) {
  std::vector<SavedChunk> others;
  const std::span<const ChunkPlan> plans = plans_;
  ChunkSaver saver(blocking_, &gate_);
  ASSERT_SUCCEEDS(saver.copy(plans.first(1), tier_, saved_));
  ASSERT_SUCCEEDS(saver.copy(plans.subspan(1, 1), other_, others));
  EXPECT_EQ(ended(), 0u);
  EXPECT_EQ(tier_.finished + other_.finished, 0);
  ASSERT_SUCCEEDS(saver.wait());
  EXPECT_EQ(std::pair(tier_.finished, other_.finished), std::pair(1, 1));
  EXPECT_TRUE(are_saved(saved_, 1, tier_));
  EXPECT_EQ(others.size(), 1u);
}

TEST_F(ChunkSaverTest, WithoutAGateATierIsMadeReadyWhenTheOneBeforeHasItsMemory) {
  std::vector<SavedChunk> others;
  const std::span<const ChunkPlan> plans = plans_;
  other_.before = [&] { EXPECT_EQ(ended(), 3u); };
  ChunkSaver saver(blocking_);
  ASSERT_SUCCEEDS(saver.copy(plans.first(3), tier_, saved_));
  ASSERT_SUCCEEDS(saver.copy(plans.subspan(3), other_, others));
  EXPECT_EQ(other_.prepared, 1);
  ASSERT_SUCCEEDS(saver.wait());
  EXPECT_EQ(std::pair(tier_.finished, other_.finished), std::pair(1, 1));
  EXPECT_TRUE(are_saved(saved_, 3, tier_));
  EXPECT_EQ(others.size(), kPieces - 3);
}

TEST_F(ChunkSaverTest, AJobThatFailsLeavesWhatWasSavedBeforeIt) {
  tier_.room = 2;
  {
    ChunkSaver saver(blocking_, &gate_);
    const Status copied = saver.copy(plans_, tier_, saved_);
    ASSERT_FALSE(copied);
    EXPECT_EQ(copied.error().code, Code::kResourceExhausted);
  }
  EXPECT_EQ(gate_.saved, (std::vector<uint64_t>{0, 1}));
  EXPECT_TRUE(are_saved(saved_, 2, tier_));
  EXPECT_EQ(transfers_->counts()[static_cast<size_t>(BlockOutcome::kCancelled)], 1u);  // the one beside it
  EXPECT_EQ(tier_.finished, 0);
}

TEST_F(ChunkSaverTest, AGateThatFailsEndsTheSave) {
  gate_.when = [&]() -> Status {
    if (gate_.saved.size() < 3) return ok();
    return Error{.code = Code::kDevice, .what = "a page does not go"};
  };
  Status copied;
  {
    ChunkSaver saver(blocking_, &gate_);
    copied = saver.copy(plans_, tier_, saved_);
  }
  ASSERT_FALSE(copied);
  EXPECT_EQ(copied.error().what, "a page does not go");
  EXPECT_TRUE(are_saved(saved_, 3, tier_));
  EXPECT_EQ(transfers_->counts()[static_cast<size_t>(BlockOutcome::kCancelled)], 1u);
}

TEST_F(ChunkSaverTest, InTurnNothingIsUnderWayBesideAJob) {
  ASSERT_SUCCEEDS(ChunkSaver(blocking_).copy_in_turn(plans_, tier_, 3 * kPiece, saved_));
  EXPECT_EQ(std::pair(tier_.prepared, tier_.finished), std::pair(3, 3));
  EXPECT_TRUE(are_saved(saved_, kPieces, tier_));
}

}  // namespace
}  // namespace torpor
