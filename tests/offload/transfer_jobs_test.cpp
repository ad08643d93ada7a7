// SPDX-License-Identifier: Apache-2.0
// Jobs of the transfer engine: lanes that are full, what goes first, and what is cancelled.
#include "tests/offload/transfer_engine_scene.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

// Keeps nothing; whoever watches cancels when the first chunks come.
class CancellingTier final : public RecordStore {
 public:
  explicit CancellingTier(ProgressFile& progress) : progress_(progress) {}
  const StoreTraits& traits() const override { return traits_; }
  void put(std::span<RecordPart> parts) override {
    for (RecordPart& part : parts) part.status = ok();
    progress_.cancel();
  }

 private:
  const StoreTraits traits_{.kind = "cancelling"};
  ProgressFile& progress_;
};

// Keeps nothing; counts the calls.
class CountingTier final : public RecordStore {
 public:
  explicit CountingTier(uint64_t bytes_per_put) : traits_{.kind = "counting", .bytes_per_put = bytes_per_put} {}
  const StoreTraits& traits() const override { return traits_; }
  void put(std::span<RecordPart> parts) override {
    ++calls;
    for (RecordPart& part : parts) part.status = ok();
  }

  std::atomic<int> calls = 0;

 private:
  const StoreTraits traits_;
};

TEST_P(TransferEngineTest, AStoreWhosePutsAreDearGetsAJobInOne) {
  CountingTier cheap(0);
  CountingTier dear(kBytes);
  for (CountingTier* const tier : {&cheap, &dear})
    EXPECT_SUCCEEDS(transfers_->wait(value_of(transfers_->submit(job(JobKind::kSave, tier)))).status);
  EXPECT_GT(cheap.calls, 1);
  EXPECT_EQ(dear.calls, 1);
}

TEST_P(TransferEngineTest, WhoWaitsForTheDeviceDoesNotWaitForMovesBetweenStores) {
  HostTier host(*arena_);
  const JobResult saved = transfers_->wait(value_of(transfers_->submit(job(JobKind::kSave, &host))));
  std::vector<SavedChunk> chunks;
  for (const ChunkTransfer& chunk : saved.chunks) chunks.push_back(chunk.saved);
  HeldTier slow;
  Job move = job(JobKind::kMove, &slow, chunks);
  move.source = &host;
  const JobId moves = value_of(transfers_->submit(std::move(move)));
  slow.wait_until_held();
  EXPECT_SUCCEEDS(transfers_->wait(value_of(transfers_->submit(job(JobKind::kDigest, nullptr)))).status);
  EXPECT_EQ(transfers_->drain(true).drain, Drain::kCompleted);
  slow.resume();
  EXPECT_SUCCEEDS(transfers_->wait(moves).status);
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
  slow.resume();
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
  tier.resume();
  const JobResult result = transfers_->wait(id);
  EXPECT_FAILS(result.status, Code::kAborted);
  EXPECT_EQ(ended_as(result, BlockOutcome::kTransferred), 512u);
  EXPECT_EQ(ended_as(result, BlockOutcome::kCancelled), 256u);
  EXPECT_EQ(tier.puts(), 512u);
}

TEST_P(TransferEngineTest, WhoWatchesSeesWhatWasMovedAndCancelsTheRest) {
  use({.own_threads = false});
  const test::TemporaryDirectory temporary;
  const auto progress = value_of(ProgressFile::create(temporary / "progress"));
  blocking_->watch(progress);
  HostTier host(*arena_);
  ASSERT_SUCCEEDS(blocking_->save(plans_, host));
  EXPECT_EQ(progress->read().bytes_total, kBytes);
  EXPECT_EQ(progress->read().bytes_done, kBytes);

  CancellingTier tier(*progress);
  EXPECT_FAILS(blocking_->save(plans_, tier), Code::kAborted, "who watches");
  EXPECT_EQ(progress->read().bytes_total, 2 * kBytes);
  EXPECT_EQ(progress->read().bytes_done, kBytes + kBytes / 2);  // the batch that was under way
  EXPECT_EQ(count(BlockOutcome::kCancelled), kChunks / 2);
  EXPECT_FAILS(blocking_->digests(plans_), Code::kAborted);
  EXPECT_EQ(progress->read().bytes_total, 2 * kBytes);

  blocking_->watch(nullptr);
  EXPECT_SUCCEEDS(blocking_->digests(plans_));
}

TEST_P(TransferEngineTest, AllOrNothingEndsAfterTheFirstFailure) {
  use({.own_threads = false});
  HostTier tier(*arena_);
  const auto saved = value_of(blocking_->save(plans_, tier));
  tier.view(saved[0])[0] ^= std::byte{1};
  EXPECT_FAILS(blocking_->restore(saved, plans_, tier), Code::kCorruption, "t/r[0]");
  EXPECT_EQ(count(BlockOutcome::kFailed), 1u);
  EXPECT_GE(count(BlockOutcome::kCancelled), kChunks / 2);
}

TEST_P(TransferEngineTest, LoadsGoBeforeWhatWaitsAlready) {
  use({.own_threads = false});
  HostTier tier(*arena_);
  const auto saved = value_of(blocking_->save(plans_, tier));
  HostTier target(*arena_);
  Job offload = job(JobKind::kSave, &target);
  Job load = job(JobKind::kRestore, &tier, saved);
  offload.polled = load.polled = true;
  load.priority = TransferPriority::kLoad;
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

// An engine's steps have the device's processors meanwhile.
TEST_P(TransferEngineTest, WhatMovesBesideAnEngineIsCopiedByTheCopyEngines) {
  HostTier tier(*arena_);
  const auto saved = value_of(blocking_->save(plans_, tier));
  EXPECT_EQ(device_->copied_by(), CopyBy::kFastest);
  HostTier kept(*arena_);
  ASSERT_SUCCEEDS(blocking_->put(plans_, kept));
  EXPECT_EQ(device_->copied_by(), CopyBy::kEngines);
  ASSERT_SUCCEEDS(blocking_->restore(saved, plans_, tier));
  EXPECT_EQ(device_->copied_by(), CopyBy::kFastest);
  const JobId load = value_of(transfers_->submit(job(JobKind::kRestore, &tier, saved)));  // as a KV connector's
  ASSERT_SUCCEEDS(transfers_->wait(load).status);
  EXPECT_EQ(device_->copied_by(), CopyBy::kEngines);
}

}  // namespace
}  // namespace torpor
