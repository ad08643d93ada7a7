// SPDX-License-Identifier: Apache-2.0
// What ChunkRestorer has under way while its gate makes it wait.
#include "engine/chunk_restorer.h"

#include <cstring>
#include <functional>

#include "allocator/host_device.h"
#include "base/units.h"
#include "offload/host_tier.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

constexpr uint64_t kChunk = 64 * kKiB;
constexpr size_t kChunks = 8;

// Calls `before` for each chunk that is waited for. Memory comes one chunk at a time.
class ScriptedGate final : public RestoreGate {
 public:
  Status wait_for(const ChunkPlan& chunk) override {
    waited_for.push_back(chunk.key.index);
    return before ? before(waited_for.size() - 1) : ok();
  }
  Status wait_for_all() override { return ok(); }
  bool all_there() const override { return all; }
  uint64_t job_bytes() const override { return most; }
  bool by_address() const override { return sorted; }

  std::function<Status(size_t)> before;
  std::vector<uint64_t> waited_for;
  uint64_t most = kChunk;
  bool all = false;
  bool sorted = false;
};

// Nothing is copied but where somebody waits for it: what has ended is what was waited for.
class ChunkRestorerTest : public ::testing::Test {
 protected:
  ChunkRestorerTest()
      : device_(value_of(make_host_device())),
        allocator_(value_of(SleepAllocator::create(*device_, {.handle_bytes = kChunk}))),
        arena_(value_of(HostArena::create({}))),
        transfers_(value_of(TransferEngine::create(*device_, *arena_, {.threads = 1, .own_threads = false}))),
        blocking_(*transfers_),
        backup_(*arena_) {
    memory_ = value_of(allocator_->allocate("weights", "w", kChunks * kChunk));
    for (size_t i = 0; i < kChunks; ++i) {
      std::memset(bytes(i), static_cast<int>('a' + i), kChunk);
      plans_.push_back(
          {.key = {.tag = "weights", .region = "w", .index = i}, .pieces = {{memory_ + i * kChunk, kChunk}}});
    }
    saved_ = value_of(blocking_.save(plans_, backup_));
    std::memset(bytes(0), 0, kChunks * kChunk);
    before_ = ended();
  }
  ChunkRestorer::Locate locate() const {
    return [this](std::span<const SavedChunk> saved) -> Result<std::vector<ChunkPlan>> {
      std::vector<ChunkPlan> plans;
      for (const SavedChunk& chunk : saved) plans.push_back(plans_[chunk.key.index]);
      return plans;
    };
  }
  char* bytes(size_t chunk) {
    return reinterpret_cast<char*>(memory_ + chunk * kChunk);  // NOLINT(performance-no-int-to-ptr)
  }
  uint64_t ended() const {
    uint64_t all = 0;
    for (const uint64_t each : transfers_->counts()) all += each;
    return all;
  }
  uint64_t copied() const { return ended() - before_; }
  bool all_back() {
    for (size_t i = 0; i < kChunks; ++i) {
      if (bytes(i)[0] != static_cast<char>('a' + i) || bytes(i)[kChunk - 1] != static_cast<char>('a' + i)) return false;
    }
    return true;
  }
  const std::unique_ptr<DeviceMemory> device_;
  const std::unique_ptr<SleepAllocator> allocator_;
  const std::unique_ptr<HostArena> arena_;
  const std::unique_ptr<TransferEngine> transfers_;
  BlockingTransfers blocking_;
  HostTier backup_;
  DeviceAddress memory_ = 0;
  std::vector<ChunkPlan> plans_;
  std::vector<SavedChunk> saved_;
  uint64_t before_ = 0;
  ScriptedGate gate_;
};

TEST_F(ChunkRestorerTest, TwoJobsAreUnderWayWhileTheGateIsWaitedFor) {
  std::vector<uint64_t> ended;
  gate_.before = [&](size_t) {
    ended.push_back(copied());
    return ok();
  };
  ChunkRestorer restorer(blocking_, gate_, locate());
  ASSERT_SUCCEEDS(restorer.copy(saved_, backup_));
  EXPECT_EQ(ended, (std::vector<uint64_t>{0, 0, 0, 1, 2, 3, 4, 5}));
  ASSERT_SUCCEEDS(restorer.wait());
  EXPECT_EQ(copied(), kChunks);
  EXPECT_TRUE(all_back());
}

// 1, 1, 2 and 4 chunks: a job is begun before the next chunk is waited for, and it ends when two others are begun.
TEST_F(ChunkRestorerTest, JobsGrowFromTheFirstToTheGates) {
  for (const uint64_t most : {8 * kChunk, 2 * kChunk}) {
    SCOPED_TRACE(most / kChunk);
    before_ = ended();
    std::vector<uint64_t> ended;
    gate_.most = most;
    gate_.before = [&](size_t) {
      ended.push_back(copied());
      return ok();
    };
    ChunkRestorer restorer(blocking_, gate_, locate(), kChunk);
    ASSERT_SUCCEEDS(restorer.copy(saved_, backup_));
    EXPECT_EQ(ended, most == 8 * kChunk ? (std::vector<uint64_t>{0, 0, 0, 0, 1, 1, 1, 1})
                                        : (std::vector<uint64_t>{0, 0, 0, 0, 1, 1, 2, 2}));
    ASSERT_SUCCEEDS(restorer.wait());
  }
}

TEST_F(ChunkRestorerTest, NothingDrainsFromOneSourceToTheNext) {
  ChunkRestorer restorer(blocking_, gate_, locate());
  const std::span<const SavedChunk> saved = saved_;
  ASSERT_SUCCEEDS(restorer.copy(saved.first(1), backup_));
  ASSERT_SUCCEEDS(restorer.copy(saved.subspan(1, 1), backup_));
  EXPECT_EQ(copied(), 0u);
  ASSERT_SUCCEEDS(restorer.copy(saved.subspan(2), backup_));
  ASSERT_SUCCEEDS(restorer.wait());
  EXPECT_TRUE(all_back());
}

TEST_F(ChunkRestorerTest, WhereAllIsThereTheRestIsOneJob) {
  gate_.before = [&](size_t chunk) {
    gate_.all = chunk >= 1;
    return ok();
  };
  ChunkRestorer restorer(blocking_, gate_, locate());
  ASSERT_SUCCEEDS(restorer.copy(saved_, backup_));
  EXPECT_EQ(copied(), 0u);  // two jobs
  ASSERT_SUCCEEDS(restorer.wait());
  EXPECT_TRUE(all_back());
}

TEST_F(ChunkRestorerTest, AGateThatFailsEndsWhatIsUnderWay) {
  gate_.before = [](size_t chunk) -> Status {
    if (chunk < 2) return ok();
    return Error{.code = Code::kResourceExhausted, .what = "no memory comes any more"};
  };
  {
    ChunkRestorer restorer(blocking_, gate_, locate());
    EXPECT_FAILS(restorer.copy(saved_, backup_), Code::kResourceExhausted, "no memory comes any more");
    EXPECT_EQ(copied(), 0u);
  }
  EXPECT_EQ(copied(), 2u);
}

TEST_F(ChunkRestorerTest, ADamagedChunkIsNamedAndTheJobsBesideItEnd) {
  saved_[1].digest = saved_[2].digest;
  ChunkRestorer restorer(blocking_, gate_, locate());
  EXPECT_FAILS(restorer.copy(saved_, backup_), Code::kCorruption, "weights/w[1]");
  EXPECT_SUCCEEDS(transfers_->usable());
}

TEST_F(ChunkRestorerTest, ChunksThatWereNotSavedAreRefused) {
  plans_[3].key.region = "other";
  ChunkRestorer restorer(blocking_, gate_, locate());
  EXPECT_FAILS(restorer.copy(saved_, backup_), Code::kIncompatible, "weights/other[3]");
}

TEST_F(ChunkRestorerTest, ByAddressWhereMemoryComesInThatOrder) {
  gate_.sorted = true;
  std::reverse(saved_.begin(), saved_.end());
  ChunkRestorer restorer(blocking_, gate_, locate());
  ASSERT_SUCCEEDS(restorer.copy(saved_, backup_));
  ASSERT_SUCCEEDS(restorer.wait());
  EXPECT_EQ(gate_.waited_for, (std::vector<uint64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_TRUE(all_back());
}

TEST_F(ChunkRestorerTest, InTurnNothingIsUnderWayBesideAJob) {
  std::vector<uint64_t> ended;
  gate_.before = [&](size_t) {
    ended.push_back(copied());
    return ok();
  };
  ChunkRestorer restorer(blocking_, gate_, locate());
  const std::span<const SavedChunk> saved = saved_;
  ASSERT_SUCCEEDS(restorer.copy(saved.first(2), backup_));
  ended.clear();
  ASSERT_SUCCEEDS(restorer.copy_in_turn(saved.subspan(2), backup_, 3 * kChunk));
  EXPECT_EQ(ended, (std::vector<uint64_t>{2, 2, 2, 5, 5, 5}));
  EXPECT_EQ(copied(), kChunks);
  ASSERT_SUCCEEDS(restorer.wait());
  EXPECT_TRUE(all_back());
}

}  // namespace
}  // namespace torpor
