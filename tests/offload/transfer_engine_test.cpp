#include "offload/transfer_engine.h"

#include <cstring>
#include <future>
#include <numeric>

#include "allocator/host_device.h"
#include "base/units.h"
#include "offload/disk_tier.h"
#include "offload/host_tier.h"
#include "tests/support/chunk_files.h"
#include "tests/support/failing_threads.h"
#include "tests/support/faulty_device.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::FaultyDevice;
using test::value_of;

constexpr uint64_t kBytes = 1 * kMiB;
constexpr uint64_t kChunks = 32;

// Keeps nothing; what is put into it stands still until let_go().
class HeldTier final : public Tier {
 public:
  std::string_view kind() const override { return "held"; }
  bool addressable() const override { return false; }
  Status prepare(uint64_t, uint64_t) override { return ok(); }
  Status finish() override { return ok(); }
  void put(std::span<TierPart> parts) override {
    const MutexLock lock(mutex_);
    puts_ += parts.size();
    changed_.notify_all();
    while (held_) changed_.wait(mutex_);
    for (TierPart& part : parts) part.status = ok();
  }
  void wait_until_held() {
    const MutexLock lock(mutex_);
    while (puts_ == 0) changed_.wait(mutex_);
  }
  void let_go() {
    const MutexLock lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  size_t puts() const {
    const MutexLock lock(mutex_);
    return puts_;
  }

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  bool held_ TORPOR_GUARDED_BY(mutex_) = true;
  size_t puts_ TORPOR_GUARDED_BY(mutex_) = 0;
};

// A megabyte of device memory in 32 chunks, each of two pieces that lie far apart.
class TransferEngineTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    device_ = std::make_unique<FaultyDevice>(value_of(make_host_device({.defer_copies = GetParam()})));
    arena_ = value_of(HostArena::create({.slab_bytes = kMiB}));
    transfers_ = value_of(TransferEngine::create(*device_, *arena_, {.threads = 3}));
    address_ = value_of(device_->reserve(kBytes));
    memory_ = value_of(device_->create(kBytes));
    ASSERT_SUCCEEDS(device_->map(address_, memory_));
    ASSERT_SUCCEEDS(device_->set_access(address_, kBytes, Access::kReadWrite));
    for (uint64_t i = 0; i < kBytes; ++i) bytes()[i] = static_cast<std::byte>(i * 2654435761u >> 13);
    for (uint64_t i = 0; i < kChunks; ++i) {
      const uint64_t half = kBytes / kChunks / 2;
      plans_.push_back({.key = {.tag = "t", .region = "r", .index = i},
                        .pieces = {{address_ + i * half, half}, {address_ + kBytes / 2 + i * half, half}}});
    }
    original_.assign(bytes(), bytes() + kBytes);
  }
  void TearDown() override {
    device_->fail_at(0);
    transfers_.reset();
    ASSERT_SUCCEEDS(device_->unmap(address_, kBytes));
    ASSERT_SUCCEEDS(device_->release(memory_));
    ASSERT_SUCCEEDS(device_->free_reservation(address_));
  }
  std::byte* bytes() const { return reinterpret_cast<std::byte*>(address_); }  // NOLINT(performance-no-int-to-ptr)
  void use(TransferEngineOptions options) {
    transfers_.reset();
    transfers_ = value_of(TransferEngine::create(*device_, *arena_, options));
  }
  Job job(JobKind kind, Tier* tier, std::span<const SavedChunk> saved = {}) const {
    Job made{.kind = kind, .tier = tier};
    made.chunks.resize(plans_.size());
    for (size_t i = 0; i < plans_.size(); ++i) {
      made.chunks[i].plan = &plans_[i];
      if (!saved.empty()) made.chunks[i].saved = saved[i];
    }
    return made;
  }
  uint64_t count(BlockOutcome outcome) const { return transfers_->counts()[static_cast<size_t>(outcome)]; }
  static size_t ended_as(const JobResult& result, BlockOutcome outcome) {
    return static_cast<size_t>(std::count_if(result.chunks.begin(), result.chunks.end(),
                                             [&](const auto& chunk) { return chunk.outcome == outcome; }));
  }
  bool content_is_original() const { return std::memcmp(bytes(), original_.data(), kBytes) == 0; }

  std::unique_ptr<FaultyDevice> device_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<TransferEngine> transfers_;
  DeviceAddress address_ = 0;
  PhysicalId memory_{};
  std::vector<ChunkPlan> plans_;
  std::vector<std::byte> original_;
};
INSTANTIATE_TEST_SUITE_P(Device, TransferEngineTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "CopiesLate" : "CopiesAtOnce"; });

TEST_P(TransferEngineTest, BytesComeBackThroughTheHostTier) {
  HostTier tier(*arena_);
  const auto saved = value_of(transfers_->save(plans_, tier));
  std::memset(bytes(), 0, kBytes);
  ASSERT_SUCCEEDS(transfers_->restore(saved, plans_, tier));
  EXPECT_TRUE(content_is_original());
  const auto digests = value_of(transfers_->digests(plans_));
  for (uint64_t i = 0; i < kChunks; ++i) EXPECT_EQ(digests[i], saved[i].digest);
}

TEST_P(TransferEngineTest, BytesComeBackThroughAFile) {
  const test::TemporaryDirectory temporary;
  const auto directory = value_of(linux_file_system().open_directory(temporary.path(), false));
  std::vector<SavedChunk> saved;
  {
    const auto tier = value_of(DiskTier::create(*directory, "chunks", {.rank = 0}));
    saved = value_of(transfers_->save(plans_, *tier));
  }
  std::memset(bytes(), 0, kBytes);
  const auto tier = value_of(test::open_chunks(*directory, "chunks", 0));
  ASSERT_SUCCEEDS(transfers_->restore(saved, plans_, *tier));
  EXPECT_TRUE(content_is_original());
}

TEST_P(TransferEngineTest, AWrongByteIsFoundBeforeItGoesUpAndItsChunkIsNamed) {
  HostTier tier(*arena_);
  const auto saved = value_of(transfers_->save(plans_, tier));
  tier.view(saved[17])[100] ^= std::byte{1};
  EXPECT_FAILS(transfers_->restore(saved, plans_, tier), Code::kCorruption, "t/r[17]");
}

TEST_P(TransferEngineTest, ChunksThatDoNotFitThePlanAreRefused) {
  HostTier tier(*arena_);
  auto saved = value_of(transfers_->save(plans_, tier));
  std::swap(saved[0], saved[1]);
  EXPECT_FAILS(transfers_->restore(saved, plans_, tier), Code::kIncompatible, "t/r[0]");
  saved.pop_back();
  std::swap(saved[0], saved[1]);
  EXPECT_FAILS(transfers_->restore(saved, plans_, tier), Code::kIncompatible, "t/r[31]");
}

// A batch whose copy fails is tried chunk by chunk; a device that goes on failing is an error.
TEST_P(TransferEngineTest, WhereverTheDeviceStartsToFailItIsAnErrorAndARetryWorks) {
  int failed = 0;
  for (uint64_t n = 1;; ++n) {
    HostTier tier(*arena_);
    device_->fail_at(n, /*sticky=*/true);
    const auto saved = transfers_->save(plans_, tier);
    const bool fired = device_->fired();
    device_->fail_at(0);
    if (!fired) break;
    EXPECT_FAILS(saved, Code::kDevice, "injected") << n;
    ++failed;
  }
  EXPECT_GE(failed, 3);
  EXPECT_FALSE(transfers_->quarantined());
  HostTier tier(*arena_);
  const auto saved = value_of(transfers_->save(plans_, tier));
  device_->fail_at(1);
  EXPECT_SUCCEEDS(transfers_->restore(saved, plans_, tier));  // one failure, which trying again mends
  device_->fail_at(1, /*sticky=*/true);
  EXPECT_FAILS(transfers_->restore(saved, plans_, tier), Code::kDevice);
  device_->fail_at(0);
  std::memset(bytes(), 0, kBytes);
  ASSERT_SUCCEEDS(transfers_->restore(saved, plans_, tier));
  EXPECT_TRUE(content_is_original());
}

TEST_P(TransferEngineTest, AnErrorThatIsProvenDrainedAllowsARetry) {
  HostTier tier(*arena_);
  device_->drain_as(Drain::kDrainedWithError);
  EXPECT_FAILS(transfers_->save(plans_, tier), Code::kDevice);
  device_->drain_as(Drain::kCompleted);
  EXPECT_FALSE(transfers_->quarantined());
  HostTier second(*arena_);
  EXPECT_SUCCEEDS(transfers_->save(plans_, second));
}

TEST_P(TransferEngineTest, AfterAnUnprovenCopyNothingMoreIsDoneAndItsMemoryIsKept) {
  HostTier tier(*arena_);
  device_->drain_as(Drain::kUnproven);
  EXPECT_FALSE(transfers_->digests(plans_).has_value());
  device_->drain_as(Drain::kCompleted);
  EXPECT_TRUE(transfers_->quarantined());
  EXPECT_GT(transfers_->counts()[static_cast<size_t>(BlockOutcome::kUnproven)], 0u);
  const uint64_t kept = arena_->info().used_bytes;
  EXPECT_GT(kept, 0u);
  transfers_->release_staging();
  EXPECT_FAILS(transfers_->save(plans_, tier), Code::kDevice, "quarantined");
  transfers_.reset();
  EXPECT_EQ(arena_->info().used_bytes, kept);
}

TEST_P(TransferEngineTest, EveryChunkIsCountedByItsOutcome) {
  HostTier tier(*arena_);
  const auto saved = value_of(transfers_->save(plans_, tier));
  EXPECT_EQ(transfers_->counts()[static_cast<size_t>(BlockOutcome::kTransferred)], kChunks);
  tier.view(saved[0])[0] ^= std::byte{1};
  EXPECT_FALSE(transfers_->restore(saved, plans_, tier).has_value());
  const OutcomeCounts counts = transfers_->counts();
  EXPECT_GE(counts[static_cast<size_t>(BlockOutcome::kFailed)], 1u);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), uint64_t{0}), 2 * kChunks);
}

TEST_P(TransferEngineTest, NothingToDoIsDone) {
  HostTier tier(*arena_);
  EXPECT_TRUE(value_of(transfers_->save({}, tier)).empty());
  EXPECT_SUCCEEDS(transfers_->restore({}, {}, tier));
}

TEST_P(TransferEngineTest, I5OneBadChunkMarksNoOtherAndNoOtherJob) {
  HostTier tier(*arena_), second(*arena_);
  const auto saved = value_of(transfers_->save(plans_, tier));
  tier.view(saved[17])[100] ^= std::byte{1};
  Job load = job(JobKind::kRestore, &tier, saved);  // of other memory than the job beside it
  Job save = job(JobKind::kSave, &second);
  load.chunks.erase(load.chunks.begin(), load.chunks.begin() + kChunks / 2);
  save.chunks.resize(kChunks / 2);
  const JobId up = value_of(transfers_->submit(std::move(load)));
  const JobId down = value_of(transfers_->submit(std::move(save)));
  const JobResult restored = transfers_->wait(up);
  EXPECT_FAILS(restored.status, Code::kCorruption, "t/r[17]");
  EXPECT_EQ(ended_as(restored, BlockOutcome::kTransferred), kChunks / 2 - 1);
  EXPECT_EQ(restored.chunks[17 - kChunks / 2].outcome, BlockOutcome::kFailed);
  const JobResult again = transfers_->wait(down);
  EXPECT_SUCCEEDS(again.status);
  EXPECT_EQ(ended_as(again, BlockOutcome::kTransferred), kChunks / 2);
}

TEST_P(TransferEngineTest, ManyJobsAtOnceFromManyThreads) {
  std::vector<std::future<bool>> all;
  for (int thread = 0; thread < 4; ++thread) {
    all.push_back(std::async(std::launch::async, [&] {
      HostTier tier(*arena_);
      for (int round = 0; round < 5; ++round) {
        const auto saved = transfers_->save(plans_, tier);
        if (!saved || saved->size() != kChunks) return false;
        const auto digests = transfers_->digests(plans_);
        if (!digests || (*digests)[3] != (*saved)[3].digest) return false;
      }
      return true;
    }));
  }
  for (auto& done : all) EXPECT_TRUE(done.get());
  EXPECT_EQ(count(BlockOutcome::kTransferred), 4 * 5 * 2 * kChunks);
}

// Also with a large chunk among them: batches are cut by bytes, not by the largest chunk.
TEST_P(TransferEngineTest, SmallChunksGoManyAtATime) {
  std::vector<ChunkPlan> plans(plans_.begin(), plans_.begin() + 16);
  plans.push_back({.key = {.tag = "t", .region = "large"}, .pieces = {{address_, kBytes / 2}}});
  HostTier tier(*arena_);
  device_->fail_at(0);
  value_of(transfers_->save(plans, tier));
  EXPECT_EQ(device_->calls(), 3u);
}

TEST_P(TransferEngineTest, TheNextBatchIsCopiedWhileOneIsWritten) {
  use({.threads = 1});
  HeldTier tier;
  device_->fail_at(0);
  const JobId id = value_of(transfers_->submit(job(JobKind::kSave, &tier)));
  tier.wait_until_held();
  EXPECT_EQ(device_->calls(), 2u);
  tier.let_go();
  EXPECT_SUCCEEDS(transfers_->wait(id).status);
}

TEST_P(TransferEngineTest, WithStagingMemoryForOneBatchTheyGoOneAfterTheOther) {
  const auto small = value_of(HostArena::create({.budget_bytes = 520 * kKiB, .slab_bytes = 4 * kKiB}));
  const auto transfers = value_of(TransferEngine::create(*device_, *small, {.threads = 1}));
  HeldTier tier;
  tier.let_go();
  EXPECT_EQ(value_of(transfers->save(plans_, tier)).size(), kChunks);
  EXPECT_EQ(tier.puts(), kChunks);
}

TEST_P(TransferEngineTest, AFullLaneSaysSoAndTheOtherOneTakesJobs) {
  use({.queued_jobs = 1, .own_threads = false});
  HeldTier slow;
  HostTier tier(*arena_);
  const JobId first = value_of(transfers_->submit(job(JobKind::kSave, &slow)));
  EXPECT_FAILS(transfers_->submit(job(JobKind::kSave, &slow)), Code::kResourceExhausted, "disk lane is full: 1 jobs");
  const JobId other = value_of(transfers_->submit(job(JobKind::kSave, &tier)));
  EXPECT_FAILS(transfers_->submit(job(JobKind::kDigest, nullptr)), Code::kResourceExhausted, "memory lane");
  EXPECT_SUCCEEDS(transfers_->wait(other).status);
  slow.let_go();
  EXPECT_SUCCEEDS(transfers_->wait(first).status);
  EXPECT_FALSE(transfers_->pump());
}

TEST_P(TransferEngineTest, CancelledBeforeAnythingMovedNothingMoves) {
  use({.own_threads = false});
  HostTier tier(*arena_);
  device_->fail_at(0);
  const JobId id = value_of(transfers_->submit(job(JobKind::kSave, &tier)));
  EXPECT_TRUE(transfers_->cancel(id));
  EXPECT_FALSE(transfers_->cancel(id));
  EXPECT_FALSE(transfers_->pump());
  const JobResult result = transfers_->wait(id);
  EXPECT_FAILS(result.status, Code::kAborted);
  EXPECT_EQ(ended_as(result, BlockOutcome::kCancelled), kChunks);
  EXPECT_EQ(count(BlockOutcome::kCancelled), kChunks);
  EXPECT_EQ(device_->calls(), 0u);
}

TEST_P(TransferEngineTest, CancelledInTheMiddleWhatHasBegunEnds) {
  use({.threads = 1});
  HeldTier tier;
  Job large = job(JobKind::kSave, &tier);
  while (large.chunks.size() < 24 * kChunks) large.chunks.push_back({.plan = &plans_[0]});  // 3 batches of 256
  const JobId id = value_of(transfers_->submit(std::move(large)));
  tier.wait_until_held();
  EXPECT_FALSE(transfers_->cancel(id));
  tier.let_go();
  const JobResult result = transfers_->wait(id);
  EXPECT_FAILS(result.status, Code::kAborted);
  EXPECT_EQ(ended_as(result, BlockOutcome::kTransferred), 512u);
  EXPECT_EQ(ended_as(result, BlockOutcome::kCancelled), 256u);
  EXPECT_EQ(tier.puts(), 512u);
}

TEST_P(TransferEngineTest, AllOrNothingEndsAfterTheFirstFailure) {
  use({.own_threads = false});
  HostTier tier(*arena_);
  const auto saved = value_of(transfers_->save(plans_, tier));
  tier.view(saved[0])[0] ^= std::byte{1};
  EXPECT_FAILS(transfers_->restore(saved, plans_, tier), Code::kCorruption, "t/r[0]");
  EXPECT_EQ(count(BlockOutcome::kFailed), 1u);
  EXPECT_GE(count(BlockOutcome::kCancelled), kChunks / 2);
}

TEST_P(TransferEngineTest, LoadsGoBeforeWhatWaitsAlready) {
  use({.own_threads = false});
  HostTier tier(*arena_);
  const auto saved = value_of(transfers_->save(plans_, tier));
  HostTier target(*arena_);
  Job offload = job(JobKind::kSave, &target);
  Job load = job(JobKind::kRestore, &tier, saved);
  offload.polled = load.polled = true;
  load.urgency = Urgency::kLoad;
  const JobId later = value_of(transfers_->submit(std::move(offload)));
  ASSERT_TRUE(transfers_->pump());  // a batch of it is over when the load comes
  const JobId first = value_of(transfers_->submit(std::move(load)));
  std::vector<JobResult> finished;
  while (transfers_->poll(finished) == 0) ASSERT_TRUE(transfers_->pump());
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0].id, first);
  while (transfers_->poll(finished) == 0) ASSERT_TRUE(transfers_->pump());
  EXPECT_EQ(finished[1].id, later);
  EXPECT_FAILS(transfers_->wait(later).status, Code::kNotFound);
}

TEST_P(TransferEngineTest, DrainTellsTheWorstOfTheCopiesSinceTheLast) {
  HostTier tier(*arena_);
  device_->drain_as(Drain::kDrainedWithError);
  const JobId id = value_of(transfers_->submit(job(JobKind::kSave, &tier)));
  const DrainResult drained = transfers_->drain();
  EXPECT_EQ(drained.drain, Drain::kDrainedWithError);
  EXPECT_NE(drained.error.what.find("injected"), std::string::npos);
  EXPECT_FAILS(transfers_->wait(id).status, Code::kDevice);
  device_->drain_as(Drain::kCompleted);
  EXPECT_EQ(transfers_->drain().drain, Drain::kCompleted);
}

TEST_P(TransferEngineTest, I3AnUnprovenCopyInOneLaneWhileTheOtherWorks) {
  HeldTier slow;
  Job writing = job(JobKind::kSave, &slow);
  writing.chunks.resize(8);  // one batch
  const JobId id = value_of(transfers_->submit(std::move(writing)));
  slow.wait_until_held();
  device_->drain_as(Drain::kUnproven);
  EXPECT_FALSE(transfers_->digests(plans_).has_value());
  device_->drain_as(Drain::kCompleted);
  slow.let_go();
  const JobResult result = transfers_->wait(id);  // its copies were proven
  EXPECT_SUCCEEDS(result.status);
  EXPECT_EQ(ended_as(result, BlockOutcome::kTransferred), 8u);
  EXPECT_EQ(transfers_->drain().drain, Drain::kUnproven);
  EXPECT_EQ(transfers_->drain().drain, Drain::kUnproven);  // for ever
  EXPECT_FAILS(transfers_->submit(job(JobKind::kSave, &slow)), Code::kDevice, "quarantined");
}

TEST_P(TransferEngineTest, AtItsEndWhatHasBegunIsFinishedAndTheRestDoesNotBegin) {
  use({.threads = 1});
  HeldTier first, second;
  Job begun = job(JobKind::kSave, &first);
  begun.chunks.resize(4);
  (void)value_of(transfers_->submit(std::move(begun)));
  first.wait_until_held();
  (void)value_of(transfers_->submit(job(JobKind::kSave, &second)));
  TransferEngine* const ending = transfers_.get();
  std::future<void> ended = std::async(std::launch::async, [this] { transfers_.reset(); });
  while (ending->counts()[static_cast<size_t>(BlockOutcome::kShutDown)] == 0) std::this_thread::yield();
  first.let_go();
  ended.get();
  EXPECT_EQ(first.puts(), 4u);
  EXPECT_EQ(second.puts(), 0u);
}

TEST(TransferEngine, AThreadThatCannotStartIsAnErrorAndARetryWorks) {
  const auto device = value_of(make_host_device({.defer_copies = true}));
  const auto arena = value_of(HostArena::create());
  for (uint64_t n = 1; n <= 6; ++n) {
    test::fail_thread_start(n, /*sticky=*/true);
    EXPECT_FAILS(TransferEngine::create(*device, *arena, {.threads = 3}), Code::kResourceExhausted, "thread") << n;
  }
  test::fail_thread_start(7, /*sticky=*/true);
  EXPECT_SUCCEEDS(TransferEngine::create(*device, *arena, {.threads = 3}));
  EXPECT_EQ(test::thread_starts(), 6u);
  test::fail_thread_start(0);
}

TEST(TransferEngine, OptionsThatMakeNoSenseAreRefused) {
  const auto device = value_of(make_host_device());
  const auto arena = value_of(HostArena::create());
  EXPECT_FAILS(TransferEngine::create(*device, *arena, {.threads = -1}), Code::kInvalidArgument);
  EXPECT_FAILS(TransferEngine::create(*device, *arena, {.queued_jobs = 0}), Code::kInvalidArgument);
  const auto transfers = value_of(TransferEngine::create(*device, *arena));
  EXPECT_FAILS(transfers->submit({.kind = JobKind::kSave}), Code::kInvalidArgument);
  EXPECT_FAILS(transfers->submit({.kind = JobKind::kDigest, .chunks = {ChunkTransfer()}}), Code::kInvalidArgument);
}

}  // namespace
}  // namespace torpor
