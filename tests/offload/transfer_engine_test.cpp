// SPDX-License-Identifier: Apache-2.0
#include "offload/transfer_engine.h"

#include <future>
#include <numeric>

#include "offload/disk_tier.h"
#include "tests/offload/transfer_engine_scene.h"
#include "tests/support/chunk_files.h"
#include "tests/support/failing_threads.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

INSTANTIATE_TEST_SUITE_P(Device, TransferEngineTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "CopiesLate" : "CopiesAtOnce"; });

TEST_P(TransferEngineTest, BytesComeBackThroughTheHostTier) {
  HostTier tier(*arena_);
  const auto saved = value_of(blocking_->save(plans_, tier));
  std::memset(bytes(), 0, kBytes);
  ASSERT_SUCCEEDS(blocking_->restore(saved, plans_, tier));
  EXPECT_TRUE(content_is_original());
  const auto digests = value_of(blocking_->digests(plans_));
  for (uint64_t i = 0; i < kChunks; ++i) EXPECT_EQ(digests[i], saved[i].digest);
}

TEST_P(TransferEngineTest, BytesComeBackThroughAFile) {
  const test::TemporaryDirectory temporary;
  const auto directory = value_of(linux_file_system().open_directory(temporary.path(), false));
  std::vector<SavedChunk> saved;
  {
    const auto tier = value_of(DiskTier::create(*directory, "chunks", {.rank = 0}));
    saved = value_of(blocking_->save(plans_, *tier));
  }
  std::memset(bytes(), 0, kBytes);
  const auto tier = value_of(test::open_chunks(*directory, "chunks", 0));
  ASSERT_SUCCEEDS(blocking_->restore(saved, plans_, *tier));
  EXPECT_TRUE(content_is_original());
}

TEST_P(TransferEngineTest, AWrongByteIsFoundBeforeItGoesUpAndItsChunkIsNamed) {
  HostTier tier(*arena_);
  const auto saved = value_of(blocking_->save(plans_, tier));
  tier.view(saved[17])[100] ^= std::byte{1};
  EXPECT_FAILS(blocking_->restore(saved, plans_, tier), Code::kCorruption, "t/r[17]");
}

TEST_P(TransferEngineTest, ChunksThatDoNotFitThePlanAreRefused) {
  HostTier tier(*arena_);
  auto saved = value_of(blocking_->save(plans_, tier));
  std::swap(saved[0], saved[1]);
  EXPECT_FAILS(blocking_->restore(saved, plans_, tier), Code::kIncompatible, "t/r[0]");
  saved.pop_back();
  std::swap(saved[0], saved[1]);
  EXPECT_FAILS(blocking_->restore(saved, plans_, tier), Code::kIncompatible, "t/r[31]");
}

// A batch whose copy fails is tried chunk by chunk; a device that goes on failing is an error.
TEST_P(TransferEngineTest, WhereverTheDeviceStartsToFailItIsAnErrorAndARetryWorks) {
  int failed = 0;
  for (uint64_t n = 1;; ++n) {
    HostTier tier(*arena_);
    device_->fail_at(n, /*sticky=*/true);
    const auto saved = blocking_->save(plans_, tier);
    const bool fired = device_->fired();
    device_->fail_at(0);
    if (!fired) break;
    EXPECT_FAILS(saved, Code::kDevice, "injected") << n;
    ++failed;
  }
  EXPECT_GE(failed, 3);
  EXPECT_FALSE(transfers_->quarantined());
  HostTier tier(*arena_);
  const auto saved = value_of(blocking_->save(plans_, tier));
  device_->fail_at(1);
  EXPECT_SUCCEEDS(blocking_->restore(saved, plans_, tier));  // one failure, which trying again mends
  device_->fail_at(1, /*sticky=*/true);
  EXPECT_FAILS(blocking_->restore(saved, plans_, tier), Code::kDevice);
  device_->fail_at(0);
  std::memset(bytes(), 0, kBytes);
  ASSERT_SUCCEEDS(blocking_->restore(saved, plans_, tier));
  EXPECT_TRUE(content_is_original());
}

TEST_P(TransferEngineTest, AnErrorThatIsProvenDrainedAllowsARetry) {
  HostTier tier(*arena_);
  device_->drain_as(Drain::kDrainedWithError);
  EXPECT_FAILS(blocking_->save(plans_, tier), Code::kDevice);
  device_->drain_as(Drain::kCompleted);
  EXPECT_FALSE(transfers_->quarantined());
  HostTier second(*arena_);
  EXPECT_SUCCEEDS(blocking_->save(plans_, second));
}

TEST_P(TransferEngineTest, AfterAnUnprovenCopyNothingMoreIsDoneAndItsMemoryIsKept) {
  HostTier tier(*arena_);
  device_->drain_as(Drain::kUnproven);
  EXPECT_FALSE(blocking_->digests(plans_).has_value());
  device_->drain_as(Drain::kCompleted);
  EXPECT_TRUE(transfers_->quarantined());
  EXPECT_GT(transfers_->counts()[static_cast<size_t>(BlockOutcome::kUnproven)], 0u);
  const uint64_t kept = arena_->info().used_bytes;
  EXPECT_GT(kept, 0u);
  transfers_->release_staging();
  EXPECT_FAILS(blocking_->save(plans_, tier), Code::kDevice, "quarantined");
  transfers_.reset();
  EXPECT_EQ(arena_->info().used_bytes, kept);
}

TEST_P(TransferEngineTest, EveryChunkIsCountedByItsOutcome) {
  HostTier tier(*arena_);
  const auto saved = value_of(blocking_->save(plans_, tier));
  EXPECT_EQ(transfers_->counts()[static_cast<size_t>(BlockOutcome::kTransferred)], kChunks);
  tier.view(saved[0])[0] ^= std::byte{1};
  EXPECT_FALSE(blocking_->restore(saved, plans_, tier).has_value());
  const OutcomeCounts counts = transfers_->counts();
  EXPECT_GE(counts[static_cast<size_t>(BlockOutcome::kFailed)], 1u);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), uint64_t{0}), 2 * kChunks);
}

TEST_P(TransferEngineTest, NothingToDoIsDone) {
  HostTier tier(*arena_);
  EXPECT_TRUE(value_of(blocking_->save({}, tier)).empty());
  EXPECT_SUCCEEDS(blocking_->restore({}, {}, tier));
}

TEST_P(TransferEngineTest, I5OneBadChunkMarksNoOtherAndNoOtherJob) {
  HostTier tier(*arena_), second(*arena_);
  const auto saved = value_of(blocking_->save(plans_, tier));
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
        const auto saved = blocking_->save(plans_, tier);
        if (!saved || saved->size() != kChunks) return false;
        const auto digests = blocking_->digests(plans_);
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
  value_of(blocking_->save(plans, tier));
  EXPECT_EQ(device_->calls(), 3u);
}

TEST_P(TransferEngineTest, TheNextBatchIsCopiedWhileOneIsWritten) {
  use({.threads = 1});
  HeldTier tier;
  device_->fail_at(0);
  const JobId id = value_of(transfers_->submit(job(JobKind::kSave, &tier)));
  tier.wait_until_held();
  EXPECT_EQ(device_->calls(), 2u);
  tier.resume();
  EXPECT_SUCCEEDS(transfers_->wait(id).status);
}

TEST_P(TransferEngineTest, WithStagingMemoryForOneBatchTheyGoOneAfterTheOther) {
  const auto small = value_of(HostArena::create({.budget_bytes = 520 * kKiB, .slab_bytes = 4 * kKiB}));
  const auto transfers = value_of(TransferEngine::create(*device_, *small, {.threads = 1}));
  HeldTier tier;
  tier.resume();
  EXPECT_EQ(value_of(BlockingTransfers(*transfers).save(plans_, tier)).size(), kChunks);
  EXPECT_EQ(tier.puts(), kChunks);
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
  EXPECT_FALSE(blocking_->digests(plans_).has_value());
  device_->drain_as(Drain::kCompleted);
  slow.resume();
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
  first.resume();
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
