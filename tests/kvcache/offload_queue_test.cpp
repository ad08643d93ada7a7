// SPDX-License-Identifier: Apache-2.0
// The rules of the queue by their numbers, without stores and ranks.
#include "kvcache/offload_queue.h"

#include <random>
#include <thread>

#include <fmt/core.h>

#include "base/event_ring.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using namespace std::chrono_literals;
using test::value_of;

TEST(OffloadQueueOptions, DefaultsAreThoseOfTheDesign) {
  const OffloadQueueOptions options;
  EXPECT_EQ(options.max_batch_size, 64);
  EXPECT_EQ(options.min_batch_size, 8);
  EXPECT_EQ(options.flush_interval, 10ms);
  EXPECT_EQ(options.policy_timeout, 100ms);
  EXPECT_EQ(options.sweep_interval, 10ms);
  EXPECT_EQ(options.max_concurrent_transfers, 1);
  EXPECT_EQ(options.on_deck_batches, 4);
  EXPECT_EQ(options.loading_batches, 64);
  EXPECT_EQ(options.queue_blocks, 65'536);
}

TEST(OffloadQueueOptions, EachBadOptionIsRefusedByName) {
  const auto refused = [](auto change, std::string_view name) {
    OffloadQueueOptions options;
    change(options);
    return test::failed_with(options.validate(), Code::kInvalidArgument, name);
  };
  EXPECT_TRUE(refused([](auto& options) { options.max_batch_size = 0; }, "max_batch_size"));
  EXPECT_TRUE(refused([](auto& options) { options.min_batch_size = 0; }, "min_batch_size"));
  EXPECT_TRUE(refused([](auto& options) { options.min_batch_size = 65; }, "min_batch_size is 65"));
  EXPECT_TRUE(refused([](auto& options) { options.flush_interval = -1ms; }, "flush_interval"));
  EXPECT_TRUE(refused([](auto& options) { options.policy_timeout = 0ms; }, "policy_timeout"));
  EXPECT_TRUE(refused([](auto& options) { options.sweep_interval = 0ms; }, "sweep_interval"));
  EXPECT_TRUE(refused([](auto& options) { options.max_concurrent_transfers = 0; }, "max_concurrent_transfers"));
  EXPECT_TRUE(refused([](auto& options) { options.on_deck_batches = 0; }, "on_deck_batches"));
  EXPECT_TRUE(refused([](auto& options) { options.loading_batches = 0; }, "loading_batches"));
  EXPECT_TRUE(refused([](auto& options) { options.queue_blocks = 0; }, "queue_blocks"));
}

// Each candidate's way, and how its blocks ended, as it is told.
TEST(OffloadQueueEvents, EachCandidateGoesOneWayOnce) {
  const auto ring = value_of(EventRing::in_memory({}, 256));
  OffloadQueue queue({.min_batch_size = 1}, EventPort(*ring, system_clock()));
  const auto add = [&](size_t count, OffloadQueue::Enqueue how) {
    const std::vector<QueuedBlock> blocks(count);
    return queue.enqueue(how, blocks, count + 1, BlockOutcome::kFiltered, 0ns);
  };
  (void)add(2, {.after_step = 1});
  TransferHandle cancelled = add(3, {.way = Way::kOnboard, .owner = 7});
  (void)queue.enqueue({}, {}, 4, BlockOutcome::kFiltered, 0ns);
  cancelled.cancel();
  queue.acknowledge(1, 0ns);
  OffloadQueue::Batch batch;
  queue.commit(Way::kOffload, queue.next(Way::kOffload, 0ns, true), batch);
  ASSERT_EQ(batch.owners.size(), 1u);
  queue.publish_planned(batch.owners[0].ticket, 99, 2);
  queue.end(batch.owners[0].ticket, Way::kOffload, BlockOutcome::kTransferred, 2);

  std::vector<Event> events;
  EventReader(*ring).read(events, true);
  std::map<uint64_t, std::string> ways;
  for (const Event& event : events) {
    std::string& way = ways[event.transfer];
    if (event.type == EventType::kCandidate)
      way += fmt::format("{} > {}, ", name(static_cast<CandidateState>(event.from)),
                         name(static_cast<CandidateState>(event.to)));
    if (event.type == EventType::kEnded)
      way += fmt::format("{} {}, ", event.a, name(static_cast<BlockOutcome>(event.to)));
    if (event.type == EventType::kPlanned) way += fmt::format("job {}, ", event.a);
    EXPECT_EQ(event.request,
              event.transfer == (static_cast<uint64_t>(Way::kOnboard) << 48 | 2) ? kOffloadRequest | 8 : 0);
  }
  const uint64_t down = static_cast<uint64_t>(Way::kOffload) << 48;
  EXPECT_EQ(ways[down | 1],
            "1 filtered, none > waiting, waiting > queued, queued > promoted, job 99, 2 transferred, "
            "promoted > completed, ");
  EXPECT_EQ(ways[static_cast<uint64_t>(Way::kOnboard) << 48 | 2],
            "1 filtered, none > queued, 3 cancelled, queued > skipped, ");
  EXPECT_EQ(ways[down | 3], "4 filtered, none > skipped, ");
}

class OffloadQueueTest : public ::testing::Test {
 protected:
  void use(OffloadQueueOptions options) { queue_ = std::make_unique<OffloadQueue>(options); }
  TransferHandle add(size_t count, OffloadQueue::Enqueue how = {}) {
    std::vector<QueuedBlock> blocks(count);
    for (QueuedBlock& block : blocks) block.block = next_++;
    TransferHandle handle = queue_->enqueue(how, blocks, count, BlockOutcome::kFiltered, now_);
    EXPECT_SUCCEEDS(queue_->check());
    return handle;
  }
  // Blocks of the next batch; none: no batch was due. Its job begins.
  std::vector<int32_t> commit(Way way = Way::kOffload, bool flush = false) {
    std::vector<int32_t> blocks;
    const OffloadQueue::Next next = queue_->next(way, now_, flush);
    if (next.blocks == 0) return blocks;
    queue_->commit(way, next, batch_);
    EXPECT_EQ(batch_.blocks.size(), next.blocks);
    EXPECT_EQ(batch_.owners.at(0).ticket->owner, next.owner);
    EXPECT_SUCCEEDS(queue_->check());
    queue_->job_began(way);
    for (const QueuedBlock& block : batch_.blocks) blocks.push_back(block.block);
    return blocks;
  }
  void end_batch(BlockOutcome outcome = BlockOutcome::kTransferred, Way way = Way::kOffload) {
    for (const auto& owner : batch_.owners) queue_->end(owner.ticket, way, outcome, owner.count);
    queue_->job_ended(way);
  }
  static std::vector<int32_t> numbers(int32_t first, int32_t end) {
    std::vector<int32_t> list;
    for (; first < end; ++first) list.push_back(first);
    return list;
  }
  std::unique_ptr<OffloadQueue> queue_ = std::make_unique<OffloadQueue>(OffloadQueueOptions{});
  OffloadQueue::Batch batch_;
  OffloadQueue::Time now_ = 1s;
  int32_t next_ = 0;
};

TEST_F(OffloadQueueTest, P1AContainerIsNeverSplitBeforeItIsCommitted) {
  use({.max_batch_size = 10, .min_batch_size = 1});
  add(6), add(6), add(25);
  EXPECT_EQ(commit(), numbers(0, 6));
  EXPECT_EQ(commit(), numbers(6, 12));
  EXPECT_EQ(commit(), numbers(12, 37));  // a batch of its own
}

TEST_F(OffloadQueueTest, P1CancellingTakesAllBlocksOfAContainerAndNoOther) {
  use({.min_batch_size = 1});
  add(2);
  TransferHandle second = add(3);
  add(1);
  second.cancel();
  EXPECT_EQ(commit(), (std::vector<int32_t>{0, 1, 5}));
  EXPECT_EQ(second.count(BlockOutcome::kCancelled), 3u);
  EXPECT_EQ(second.status(), TransferStatus::kDone);
}

TEST_F(OffloadQueueTest, P2TheTokenTravelsThroughEveryStage) {
  use({.min_batch_size = 1});
  TransferHandle waiting = add(1, {.after_step = 1});
  TransferHandle ready = add(1);
  TransferHandle both = add(1, {.after_step = 1});
  waiting.cancel();
  ready.cancel();
  queue_->acknowledge(1, now_);
  both.cancel();
  EXPECT_TRUE(commit().empty());
  for (const TransferHandle& handle : {waiting, ready, both}) EXPECT_EQ(handle.count(BlockOutcome::kCancelled), 1u);
  EXPECT_EQ(queue_->queued_blocks(), 0);
}

TEST_F(OffloadQueueTest, I4P3AfterTheCommitmentCancellingChangesNothing) {
  use({.min_batch_size = 1});
  TransferHandle handle = add(2);
  EXPECT_EQ(handle.status(), TransferStatus::kQueued);
  EXPECT_EQ(commit().size(), 2u);
  EXPECT_EQ(handle.status(), TransferStatus::kCommitted);
  handle.cancel();
  end_batch();
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 2u);
  EXPECT_EQ(handle.status(), TransferStatus::kDone);
}

TEST_F(OffloadQueueTest, P4CancelledContainersAreSweptOutImmediatelyBeforeACommitment) {
  use({.min_batch_size = 1, .sweep_interval = 1h});
  TransferHandle first = add(1);
  add(1);
  first.cancel();
  queue_->sweep_if_due(now_);  // not due
  EXPECT_EQ(first.status(), TransferStatus::kQueued);
  EXPECT_EQ(commit(), std::vector<int32_t>{1});
  EXPECT_EQ(first.count(BlockOutcome::kCancelled), 1u);
}

TEST_F(OffloadQueueTest, P4WhereNothingIsCommittedTheyLeaveWithinTheSweepInterval) {
  use({.min_batch_size = 8, .flush_interval = 1h, .sweep_interval = 10ms});
  TransferHandle handle = add(1);
  queue_->sweep_if_due(now_);
  handle.cancel();
  now_ += 9ms;
  queue_->sweep_if_due(now_);
  EXPECT_EQ(handle.status(), TransferStatus::kQueued);
  now_ += 1ms;
  queue_->sweep_if_due(now_);
  EXPECT_EQ(handle.status(), TransferStatus::kDone);
}

TEST_F(OffloadQueueTest, P5AfterTheCommitmentAllBlocksOfABatchAreOneList) {
  use({.min_batch_size = 1});
  const std::vector<TransferHandle> handles = {add(2), add(1), add(3)};
  EXPECT_EQ(commit(), numbers(0, 6));
  EXPECT_EQ(batch_.owners.size(), 3u);
  end_batch(BlockOutcome::kFailed);
  EXPECT_EQ(handles[2].count(BlockOutcome::kFailed), 3u);
}

TEST_F(OffloadQueueTest, P6AContainerThatWaitsForItsPreconditionIsDroppedTheMomentItIsCancelled) {
  use({.min_batch_size = 1});
  TransferHandle cancelled = add(2, {.after_step = 5});
  TransferHandle failed = add(1, {.after_step = 5});
  TransferHandle kept = add(1, {.after_step = 6});
  EXPECT_TRUE(commit().empty());
  cancelled.cancel();
  EXPECT_EQ(cancelled.status(), TransferStatus::kDone);  // before any tick
  EXPECT_EQ(queue_->queued_blocks(), 2);
  queue_->fail_step(5);
  EXPECT_EQ(failed.count(BlockOutcome::kPreconditionFailed), 1u);
  queue_->acknowledge(6, now_);
  EXPECT_EQ(commit(), std::vector<int32_t>{3});
  EXPECT_EQ(kept.status(), TransferStatus::kCommitted);
}

TEST_F(OffloadQueueTest, APreconditionThatIsMetAlreadyDoesNotWait) {
  use({.min_batch_size = 1});
  queue_->acknowledge(7, now_);
  add(1, {.after_step = 7});
  EXPECT_EQ(commit().size(), 1u);
}

TEST_F(OffloadQueueTest, APartialBatchGoesWhenItsTimeIsUpOrItIsAskedFor) {
  add(7);
  EXPECT_TRUE(commit().empty());
  now_ += 10ms;
  EXPECT_EQ(commit().size(), 7u);
  add(1);
  EXPECT_TRUE(commit().empty());
  EXPECT_EQ(commit(Way::kOffload, true).size(), 1u);
  add(8);
  EXPECT_EQ(commit().size(), 8u);
}

TEST_F(OffloadQueueTest, HigherPrioritiesGoFirstAndEqualOnesInOrder) {
  use({.max_batch_size = 1, .min_batch_size = 1});
  for (const int32_t priority : {0, 5, -1, 5, 0}) add(1, {.priority = priority});
  std::vector<int32_t> order;
  for (int i = 0; i < 5; ++i) order.push_back(commit().at(0));
  EXPECT_EQ(order, (std::vector<int32_t>{1, 3, 0, 4, 2}));
}

TEST_F(OffloadQueueTest, OnlySoManyJobsAreUnderWayAndLoadsHaveRoomOfTheirOwn) {
  use({.max_batch_size = 1,
       .min_batch_size = 1,
       .max_concurrent_transfers = 1,
       .on_deck_batches = 1,
       .loading_batches = 1});
  for (int i = 0; i < 3; ++i) add(1), add(1, {.way = Way::kOnboard});
  EXPECT_FALSE(commit().empty());
  EXPECT_FALSE(commit().empty());
  EXPECT_TRUE(commit().empty());
  EXPECT_FALSE(commit(Way::kOnboard).empty());
  EXPECT_TRUE(commit(Way::kOnboard).empty());
  queue_->job_ended(Way::kOffload);
  EXPECT_FALSE(commit().empty());
}

TEST_F(OffloadQueueTest, I9AFullQueueRefusesAtOnceAndSaysSo) {
  use({.min_batch_size = 1, .queue_blocks = 4});
  add(3);
  const TransferHandle refused = add(2);
  EXPECT_EQ(refused.count(BlockOutcome::kQueueFull), 2u);
  EXPECT_EQ(add(1).status(), TransferStatus::kQueued);
}

TEST_F(OffloadQueueTest, HandlesOutliveTheQueueAndWhatIsLeftEndsAsShutDown) {
  TransferHandle waiting = add(1, {.after_step = 1});
  TransferHandle ready = add(2);
  TransferHandle cancelled = add(1);
  cancelled.cancel();
  queue_.reset();
  EXPECT_EQ(waiting.count(BlockOutcome::kShutDown), 1u);
  EXPECT_EQ(ready.count(BlockOutcome::kShutDown), 2u);
  EXPECT_EQ(cancelled.count(BlockOutcome::kCancelled), 1u);
  ready.cancel();
}

TEST_F(OffloadQueueTest, AnotherThreadWaitsUntilEachBlockHasEndedAndIsToldHow) {
  use({.min_batch_size = 1});
  const TransferHandle handle = add(3);
  EXPECT_FAILS(handle.wait(0ns), Code::kTimeout, "has not ended");
  Result<TransferResult> first = TransferResult{};
  Result<TransferResult> second = TransferResult{};
  std::thread one([&] { first = handle.wait(10min); });
  std::thread two([&] { second = TransferHandle(handle).wait(10min); });
  (void)commit();
  EXPECT_FAILS(handle.wait(1ns), Code::kTimeout);  // it is under way
  queue_->end(batch_.owners[0].ticket, Way::kOffload, BlockOutcome::kTransferred, 2);
  EXPECT_FAILS(handle.wait(1ns), Code::kTimeout);  // one block is left
  queue_->end(batch_.owners[0].ticket, Way::kOffload, BlockOutcome::kFailed, 1,
              Error{.code = Code::kIo, .what = "the disk"});
  one.join();
  two.join();
  for (const TransferResult& result : {value_of(first), value_of(second), value_of(handle.wait(0ns))}) {
    EXPECT_EQ(result.blocks, 3u);
    EXPECT_EQ(result.count(BlockOutcome::kTransferred), 2u);
    EXPECT_EQ(result.count(BlockOutcome::kFailed), 1u);
    EXPECT_EQ(result.cause.error().what, "the disk");
  }
  TransferHandle cancelled = add(2, {.after_step = 1});
  std::thread three([&] { first = cancelled.wait(10min); });
  cancelled.cancel();
  three.join();
  EXPECT_EQ(value_of(first).count(BlockOutcome::kCancelled), 2u);
  EXPECT_EQ(value_of(TransferHandle().wait(0ns)).blocks, 0u);
  EXPECT_EQ(value_of(add(0).wait(0ns)).blocks, 0u);  // nothing is offered
}

TEST_F(OffloadQueueTest, WhoWaitsIsToldThatTheQueueHasEnded) {
  use({.min_batch_size = 1});
  const TransferHandle under_way = add(1);
  (void)commit();
  const TransferHandle queued = add(1);
  Result<TransferResult> ended = TransferResult{};
  Result<TransferResult> left = TransferResult{};
  std::thread one([&] { ended = queued.wait(10min); });
  std::thread two([&] { left = under_way.wait(10min); });
  queue_.reset();
  one.join();
  two.join();
  EXPECT_EQ(value_of(ended).count(BlockOutcome::kShutDown), 1u);
  EXPECT_FAILS(left, Code::kUnavailable, "has ended before");
}

TEST_F(OffloadQueueTest, ASkippedLoadIsCommittedWithTheMarkAndOnlyOnce) {
  const TransferHandle load = add(2, {.way = Way::kOnboard, .owner = 7});
  const TransferHandle other = add(1);
  EXPECT_EQ(queue_->skip(other.number()), 0u);
  EXPECT_EQ(queue_->skip(load.number()), 2u);
  EXPECT_EQ(queue_->skip(load.number()), 0u);
  EXPECT_EQ(load.status(), TransferStatus::kQueued);
  const OffloadQueue::Next next = queue_->next(Way::kOnboard, now_, false);
  EXPECT_TRUE(next.skip);
  EXPECT_EQ(next.blocks, 2u);
  (void)commit(Way::kOnboard);
  EXPECT_EQ(queue_->skip(load.number()), 0u);
  add(1, {.way = Way::kOnboard, .owner = 8});  // in the same container
  EXPECT_FALSE(queue_->next(Way::kOnboard, now_, false).skip);
}

TEST_F(OffloadQueueTest, I6S12UnderRandomUseEveryBlockEndsOnce) {
  std::mt19937 random(5);
  const auto below = [&](uint32_t n) { return random() % n; };
  for (int round = 0; round < 200; ++round) {
    use({.max_batch_size = static_cast<int32_t>(1 + below(16)), .min_batch_size = 1, .queue_blocks = 64});
    std::vector<std::pair<TransferHandle, uint64_t>> handles;
    std::vector<std::pair<OffloadQueue::Batch, Way>> under_way;
    uint64_t step = 0;
    const auto end_one = [&](size_t which) {
      for (const auto& owner : under_way[which].first.owners)
        queue_->end(owner.ticket, under_way[which].second, BlockOutcome::kTransferred, owner.count);
      queue_->job_ended(under_way[which].second);
      under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(which));
    };
    for (int move = 0; move < 60; ++move) {
      now_ += std::chrono::milliseconds(below(8));
      switch (below(6)) {
        case 0:
        case 1: {
          const uint64_t count = below(7);
          handles.emplace_back(add(count, {.way = static_cast<Way>(below(3)),
                                           .after_step = below(2) * (step + below(3)),
                                           .priority = static_cast<int32_t>(below(3))}),
                               count);
          break;
        }
        case 2:
          if (!handles.empty()) handles[below(static_cast<uint32_t>(handles.size()))].first.cancel();
          break;
        case 3: {
          const Way way = static_cast<Way>(below(3));
          if (!commit(way).empty()) under_way.emplace_back(batch_, way);
          break;
        }
        case 4:
          if (!under_way.empty()) end_one(below(static_cast<uint32_t>(under_way.size())));
          break;
        case 5: below(3) == 0 ? queue_->fail_step(step + 1) : queue_->acknowledge(++step, now_); break;
      }
      ASSERT_SUCCEEDS(queue_->check());
    }
    while (!under_way.empty()) end_one(0);
    OutcomeCounts all{};
    for (const Way way : {Way::kOnboard, Way::kOffload, Way::kDemote}) {
      for (size_t i = 0; i < all.size(); ++i) all[i] += queue_->counts(way)[i];
    }
    queue_.reset();
    uint64_t sum = 0;
    for (const auto& [handle, count] : handles) {
      uint64_t ended = 0;
      for (const uint64_t each : handle.counts()) ended += each;
      ASSERT_EQ(ended, count);
      ASSERT_EQ(handle.status(), TransferStatus::kDone);
      sum += ended - handle.count(BlockOutcome::kShutDown);
    }
    uint64_t counted = 0;
    for (const uint64_t each : all) counted += each;
    EXPECT_LE(counted, sum);
    EXPECT_GE(counted + 64, sum);  // those cancelled at the very end
  }
}

}  // namespace
}  // namespace torpor
