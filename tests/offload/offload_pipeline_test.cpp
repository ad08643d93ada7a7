// The rules of the pipeline by their numbers, on a route whose every step the test holds in its hand.
#include "offload/offload_pipeline.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "tests/support/failing_threads.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using namespace std::chrono_literals;
using test::ManualClock;
using test::value_of;

Digest key_of(int32_t id) {
  Digest digest;
  std::memcpy(digest.bytes.data(), &id, sizeof id);
  return digest;
}
BlockName block(int32_t id) { return {.id = id, .key = key_of(id)}; }
std::vector<BlockName> blocks(int32_t first, int32_t count) {
  std::vector<BlockName> list;
  for (int32_t id = first; id < first + count; ++id) list.push_back(block(id));
  return list;
}

// Records what it is asked; transfers wait at a gate; evicted blocks cannot be upgraded; chosen ones fail.
class ScriptedRoute final : public BlockRoute {
 public:
  std::string_view name() const override { return "scripted"; }
  bool present(const Digest& key) const override {
    const std::lock_guard lock(mutex_);
    return present_.contains(key.bytes);
  }
  bool upgrade(const BlockName& name) override {
    const std::lock_guard lock(mutex_);
    if (evicted_.contains(name.id)) return false;
    if (name.id == throwing_upgrade_) throw std::bad_alloc();
    upgraded_.push_back(name.id);
    ++kept_;
    return true;
  }
  void transfer(std::span<const BlockName> blocks, std::span<BlockOutcome> outcomes) override {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
    std::vector<int32_t> batch;
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (blocks[i].id == throwing_) {
        kept_ -= static_cast<int64_t>(blocks.size() - i);
        throw std::runtime_error("a route that throws");
      }
      batch.push_back(blocks[i].id);
      const auto failing = failing_.find(blocks[i].id);
      outcomes[i] = failing == failing_.end() ? BlockOutcome::kTransferred : failing->second;
      if (outcomes[i] == BlockOutcome::kTransferred) present_.insert(blocks[i].key.bytes);
      --kept_;
    }
    batches_.push_back(std::move(batch));
  }

  void close() { set_open(false); }
  void open() { set_open(true); }
  void wait_until_transferring(int count = 1) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ >= count; });
  }
  void evict(int32_t id) {
    const std::lock_guard lock(mutex_);
    evicted_.insert(id);
  }
  void fail(int32_t id, BlockOutcome outcome) { failing_[id] = outcome; }
  // The transfer of this block throws, its upgrade too if asked for.
  void throw_at(int32_t id) { throwing_ = id; }
  void throw_in_upgrade_of(int32_t id) { throwing_upgrade_ = id; }
  std::vector<std::vector<int32_t>> batches() const {
    const std::lock_guard lock(mutex_);
    return batches_;
  }
  std::vector<int32_t> upgraded() const {
    const std::lock_guard lock(mutex_);
    return upgraded_;
  }
  int64_t kept() const { return kept_; }

 private:
  void set_open(bool open) {
    {
      const std::lock_guard lock(mutex_);
      open_ = open;
    }
    changed_.notify_all();
  }
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int waiting_ = 0;
  std::atomic<int32_t> throwing_ = -1;
  std::atomic<int32_t> throwing_upgrade_ = -1;
  std::set<int32_t> evicted_;
  std::map<int32_t, BlockOutcome> failing_;
  std::set<std::array<uint8_t, 16>> present_;
  std::vector<int32_t> upgraded_;
  std::vector<std::vector<int32_t>> batches_;
  std::atomic<int64_t> kept_ = 0;
};

// Wants what the test says, block by block; looks at its clock after each.
class ScriptedPolicy final : public OffloadPolicy {
 public:
  explicit ScriptedPolicy(std::function<bool(const BlockName&)> wants, const Clock& clock = system_clock())
      : wants_(std::move(wants)), clock_(clock) {}
  std::string_view name() const override { return "scripted"; }
  bool evaluate(std::span<const BlockName> blocks, std::span<uint8_t> wanted,
                std::chrono::nanoseconds deadline) override {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (wanted[i] != 0 && !wants_(blocks[i])) wanted[i] = 0;
      if (clock_.now() > deadline) return false;
    }
    return true;
  }

 private:
  const std::function<bool(const BlockName&)> wants_;
  const Clock& clock_;
};
std::unique_ptr<OffloadPolicy> all_but(int32_t id) {
  return std::make_unique<ScriptedPolicy>([id](const BlockName& name) { return name.id != id; });
}

// Nothing is flushed by time unless a test wants it: batches form by size alone.
OffloadOptions by_size(int32_t min, int32_t max) {
  return {
      .max_batch_size = max, .min_batch_size = min, .flush_interval = 1h, .sweep_interval = 1ms, .on_deck_batches = 1};
}

class OffloadPipelineTest : public ::testing::Test {
 protected:
  std::unique_ptr<OffloadPipeline> make(OffloadOptions options,
                                        std::vector<std::unique_ptr<OffloadPolicy>> policies = {}) {
    return value_of(OffloadPipeline::create(route_, system_clock(), options, std::move(policies)));
  }
  template <class... Policies>
  static std::vector<std::unique_ptr<OffloadPolicy>> list(Policies... policies) {
    std::vector<std::unique_ptr<OffloadPolicy>> all;
    (all.push_back(std::move(policies)), ...);
    return all;
  }
  // One batch (block 0) in transfer, held at the gate, one (block 1) on deck: whatever comes now stays in the queue
  // until open().
  void occupy(OffloadPipeline& pipeline) {
    route_.close();
    pipeline.enqueue(blocks(0, 1));
    route_.wait_until_transferring();
    const OffloadHandle deck = pipeline.enqueue(blocks(1, 1));
    while (deck.status() != OffloadStatus::kCommitted) std::this_thread::yield();
  }
  void TearDown() override { EXPECT_EQ(route_.kept(), 0) << "blocks were kept and never let go"; }
  ScriptedRoute route_;
};

TEST_F(OffloadPipelineTest, BlocksArriveInTheNextTierAndAreCounted) {
  const auto pipeline = make(by_size(4, 8));
  const OffloadHandle handle = pipeline->enqueue(blocks(0, 4));
  handle.wait();
  EXPECT_EQ(handle.status(), OffloadStatus::kDone);
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 4u);
  EXPECT_TRUE(route_.present(key_of(3)));
  EXPECT_EQ(pipeline->counts()[0], 4u);
  EXPECT_EQ(pipeline->queued_blocks(), 0);
}

TEST_F(OffloadPipelineTest, WhoListensIsToldOfEachStageAndEachTransfer) {
  class Recorder final : public EventSink {
   public:
    void on_stage(const StageEvent& event) override { blocks[std::string(event.stage)] += event.items; }
    void on_transfer(const TransferEvent& event) override { transferred += event.transferred; }
    std::map<std::string, uint64_t> blocks;
    uint64_t transferred = 0;
  } recorder;
  route_.fail(2, BlockOutcome::kFailed);
  auto pipeline = value_of(OffloadPipeline::create(route_, system_clock(), by_size(1, 8), list(all_but(3)), &recorder));
  const auto met = std::make_shared<Precondition>();
  met->meet();
  pipeline->enqueue(blocks(0, 4), met).wait();
  pipeline->drain();
  EXPECT_EQ(recorder.blocks, (std::map<std::string, uint64_t>{{"enqueued", 4},
                                                              {"filtered", 1},
                                                              {"waiting", 3},
                                                              {"ready", 3},
                                                              {"committed", 3},
                                                              {"transferred", 2},
                                                              {"failed", 1}}));
  EXPECT_EQ(recorder.transferred, 2u);
}

TEST_F(OffloadPipelineTest, AnEmptyEnqueueIsDone) {
  const auto pipeline = make(by_size(1, 1));
  EXPECT_EQ(pipeline->enqueue({}).status(), OffloadStatus::kDone);
}

TEST_F(OffloadPipelineTest, P1AContainerIsNeverSplitBeforeItIsCommitted) {
  const auto pipeline = make(by_size(1, 8));
  occupy(*pipeline);
  std::vector<OffloadHandle> handles;
  for (int32_t i = 0; i < 4; ++i) handles.push_back(pipeline->enqueue(blocks(100 + i * 10, 5)));
  handles.push_back(pipeline->enqueue(blocks(1000, 20)));  // larger than a batch: one of its own
  route_.open();
  for (const OffloadHandle& handle : handles) handle.wait();
  for (const std::vector<int32_t>& batch : route_.batches()) {
    for (const int32_t id : batch) {
      const int32_t begin = id >= 1000 ? 1000 : id >= 100 ? id / 10 * 10 : id;
      const int32_t count = id >= 1000 ? 20 : id >= 100 ? 5 : 1;
      for (int32_t other = begin; other < begin + count; ++other)
        EXPECT_NE(std::find(batch.begin(), batch.end(), other), batch.end()) << id << " without " << other;
    }
  }
}

TEST_F(OffloadPipelineTest, P1CancellingTakesAllBlocksOfAContainerAndNoOther) {
  const auto pipeline = make(by_size(100, 200));
  OffloadHandle cancelled = pipeline->enqueue(blocks(0, 5));
  const OffloadHandle stays = pipeline->enqueue(blocks(10, 5));
  cancelled.cancel();
  EXPECT_EQ(cancelled.count(BlockOutcome::kCancelled), 5u);
  EXPECT_EQ(stays.status(), OffloadStatus::kQueued);
  const OffloadHandle fills = pipeline->enqueue(blocks(100, 95));
  stays.wait();
  fills.wait();
  EXPECT_EQ(stays.count(BlockOutcome::kTransferred), 5u);
  for (const int32_t id : route_.upgraded()) EXPECT_GE(id, 10);
}

TEST_F(OffloadPipelineTest, P2TheTokenTravelsThroughEveryStage) {
  const auto gate = std::make_shared<Precondition>();
  const auto pipeline =
      make(by_size(100, 200), list(std::make_unique<ScriptedPolicy>([](const BlockName&) { return true; })));
  OffloadHandle waiting = pipeline->enqueue(blocks(0, 3), gate);
  OffloadHandle queued = pipeline->enqueue(blocks(10, 3));
  waiting.cancel();  // while it waits for its precondition
  queued.cancel();   // while it waits for a batch
  EXPECT_EQ(waiting.count(BlockOutcome::kCancelled), 3u);
  EXPECT_EQ(queued.count(BlockOutcome::kCancelled), 3u);
  gate->meet();
  pipeline->drain();
  EXPECT_TRUE(route_.upgraded().empty());
}

TEST_F(OffloadPipelineTest, P3AfterTheUpgradeCancellingOnlyWaits) {
  route_.close();
  const auto pipeline = make(by_size(1, 8));
  OffloadHandle handle = pipeline->enqueue(blocks(0, 4));
  route_.wait_until_transferring();
  EXPECT_EQ(handle.status(), OffloadStatus::kCommitted);
  std::thread opener([this] { route_.open(); });
  handle.cancel();
  opener.join();
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 4u);
  EXPECT_EQ(handle.count(BlockOutcome::kCancelled), 0u);
}

// In steps, so that the container is in the queue for certain when it is cancelled; and the periodic sweep never comes.
TEST_F(OffloadPipelineTest, P4CancelledContainersAreSweptOutImmediatelyBeforeTheUpgrade) {
  OffloadOptions options = by_size(6, 100);
  options.sweep_interval = 1h;
  options.own_threads = false;
  const auto pipeline = make(options);
  OffloadHandle cancelled = pipeline->enqueue(blocks(10, 5));
  pipeline->step();
  EXPECT_EQ(cancelled.status(), OffloadStatus::kQueued);  // too few for a batch
  cancelled.request_cancel();
  const OffloadHandle kept = pipeline->enqueue(blocks(20, 5));
  pipeline->step();
  EXPECT_EQ(cancelled.count(BlockOutcome::kCancelled), 5u);
  EXPECT_EQ(kept.count(BlockOutcome::kTransferred), 5u);
  EXPECT_EQ(route_.upgraded(), (std::vector<int32_t>{20, 21, 22, 23, 24}));
}

TEST_F(OffloadPipelineTest, WithoutThreadsOfItsOwnNothingMovesButInStepsAndDrain) {
  OffloadOptions options = by_size(100, 100);
  options.own_threads = false;
  auto pipeline = make(options);
  const OffloadHandle drained = pipeline->enqueue(blocks(0, 3));
  EXPECT_FALSE(pipeline->step());  // not a batch yet, and its time is not up
  EXPECT_EQ(drained.status(), OffloadStatus::kQueued);
  pipeline->drain();  // partial batches go
  EXPECT_EQ(drained.count(BlockOutcome::kTransferred), 3u);
  const OffloadHandle left = pipeline->enqueue(blocks(10, 2));
  pipeline.reset();
  EXPECT_EQ(left.count(BlockOutcome::kShutDown), 2u);
}

TEST_F(OffloadPipelineTest, P5AfterTheUpgradeAllBlocksOfABatchAreOneList) {
  const auto pipeline = make(by_size(1, 100));
  occupy(*pipeline);
  std::vector<OffloadHandle> handles;
  for (int32_t i = 0; i < 5; ++i) handles.push_back(pipeline->enqueue(blocks(10 + 10 * i, 3)));
  route_.open();
  for (const OffloadHandle& handle : handles) handle.wait();
  ASSERT_EQ(route_.batches().size(), 3u);
  EXPECT_EQ(route_.batches()[2].size(), 15u);
}

TEST_F(OffloadPipelineTest, P6AContainerThatWaitsForItsPreconditionCanBeCancelledAndAFailedOneEnds) {
  const auto never = std::make_shared<Precondition>();
  const auto later = std::make_shared<Precondition>();
  const auto fails = std::make_shared<Precondition>();
  const auto pipeline = make(by_size(1, 8));
  OffloadHandle cancelled = pipeline->enqueue(blocks(0, 2), never);
  const OffloadHandle met = pipeline->enqueue(blocks(10, 2), later);
  const OffloadHandle failed = pipeline->enqueue(blocks(20, 2), fails);
  EXPECT_FALSE(met.wait(5ms));
  cancelled.cancel();
  later->meet();
  fails->fail();
  met.wait();
  failed.wait();
  EXPECT_EQ(cancelled.count(BlockOutcome::kCancelled), 2u);
  EXPECT_EQ(met.count(BlockOutcome::kTransferred), 2u);
  EXPECT_EQ(failed.count(BlockOutcome::kPreconditionFailed), 2u);
  EXPECT_EQ(route_.upgraded(), (std::vector<int32_t>{10, 11}));
  never->meet();  // whoever it would have woken is gone
}

TEST_F(OffloadPipelineTest, APreconditionThatIsMetAlreadyDoesNotWait) {
  const auto met = std::make_shared<Precondition>();
  met->meet();
  const auto pipeline = make(by_size(1, 8));
  EXPECT_TRUE(pipeline->enqueue(blocks(0, 2), met).wait(10s));
}

TEST_F(OffloadPipelineTest, APartialBatchGoesWhenItsTimeIsUp) {
  OffloadOptions options = by_size(64, 64);
  options.flush_interval = 5ms;
  const auto pipeline = make(options);
  const OffloadHandle handle = pipeline->enqueue(blocks(0, 1));
  EXPECT_TRUE(handle.wait(10s));
}

TEST_F(OffloadPipelineTest, HigherPrioritiesGoFirst) {
  const auto pipeline = make(by_size(1, 2));
  occupy(*pipeline);
  const OffloadHandle low = pipeline->enqueue(blocks(10, 2), nullptr, -1);
  const OffloadHandle normal = pipeline->enqueue(blocks(20, 2));
  const OffloadHandle high = pipeline->enqueue(blocks(30, 2), nullptr, 5);
  route_.open();
  low.wait();
  EXPECT_EQ(route_.batches(), (std::vector<std::vector<int32_t>>{{0}, {1}, {30, 31}, {20, 21}, {10, 11}}));
}

TEST_F(OffloadPipelineTest, I5TheFailureOfOneBlockMarksNoOther) {
  route_.fail(1, BlockOutcome::kFailed);
  route_.fail(2, BlockOutcome::kUnproven);
  route_.fail(3, BlockOutcome::kNoRoom);
  route_.evict(4);
  const auto pipeline = make(by_size(1, 8));
  const OffloadHandle handle = pipeline->enqueue(blocks(0, 8));
  handle.wait();
  for (const auto outcome :
       {BlockOutcome::kFailed, BlockOutcome::kUnproven, BlockOutcome::kNoRoom, BlockOutcome::kEvicted}) {
    EXPECT_EQ(handle.count(outcome), 1u) << name(outcome);
  }
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 4u);
}

TEST_F(OffloadPipelineTest, WhereNoThreadStartsThereIsNoPipelineAndWithFewerItGoesOn) {
  for (const uint64_t n : {1, 2}) {  // the deciding one, the first that transfers
    test::fail_thread_start(n);
    EXPECT_FAILS(OffloadPipeline::create(route_, system_clock(), {.max_concurrent_transfers = 3}),
                 Code::kResourceExhausted, "thread");
  }
  test::fail_thread_start(3);
  const auto pipeline = value_of(OffloadPipeline::create(route_, system_clock(), {.max_concurrent_transfers = 3}));
  test::fail_thread_start(0);
  OffloadHandle handle = pipeline->enqueue(blocks(0, 10));
  EXPECT_TRUE(handle.wait(20s));
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 10u);
}

TEST_F(OffloadPipelineTest, ATransferThatThrowsFailsItsBlocksAndTheNextOnesGo) {
  const auto pipeline = make(by_size(1, 4));
  route_.throw_at(2);
  OffloadHandle thrown = pipeline->enqueue(blocks(0, 4));
  ASSERT_TRUE(thrown.wait(20s));
  EXPECT_EQ(thrown.count(BlockOutcome::kTransferred), 2u);  // those that had arrived
  EXPECT_EQ(thrown.count(BlockOutcome::kFailed), 2u);
  EXPECT_SUCCEEDS(pipeline->usable());
  route_.throw_at(-1);
  OffloadHandle again = pipeline->enqueue(blocks(2, 4));
  ASSERT_TRUE(again.wait(20s));
  EXPECT_EQ(again.count(BlockOutcome::kTransferred), 4u);
}

class ThrowingPolicy final : public OffloadPolicy {
 public:
  std::string_view name() const override { return "throwing"; }
  bool evaluate(std::span<const BlockName> blocks, std::span<uint8_t>, std::chrono::nanoseconds) override {
    if (blocks[0].id == 7) throw std::runtime_error("a policy that throws");
    return true;
  }
};

TEST_F(OffloadPipelineTest, APolicyThatThrowsFailsItsContainerAndNoOther) {
  const auto pipeline = make(by_size(1, 4), list(std::make_unique<ThrowingPolicy>()));
  OffloadHandle thrown = pipeline->enqueue(blocks(7, 2));
  OffloadHandle other = pipeline->enqueue(blocks(1, 2));
  ASSERT_TRUE(thrown.wait(20s));
  ASSERT_TRUE(other.wait(20s));
  EXPECT_EQ(thrown.count(BlockOutcome::kFailed), 2u);
  EXPECT_EQ(other.count(BlockOutcome::kTransferred), 2u);
}

// What decides fails half-way through a batch: what was committed is transferred, all else ends, and it says so.
TEST_F(OffloadPipelineTest, APipelineThatCannotDecideEndsEveryBlockAndSaysThatItIsOver) {
  const auto pipeline = make(by_size(4, 8));
  route_.throw_in_upgrade_of(2);
  const auto never = std::make_shared<Precondition>();
  OffloadHandle waiting = pipeline->enqueue(blocks(20, 2), never);
  OffloadHandle half = pipeline->enqueue(blocks(0, 4));
  ASSERT_TRUE(half.wait(20s));
  ASSERT_TRUE(waiting.wait(20s));
  EXPECT_EQ(half.count(BlockOutcome::kTransferred), 2u);
  EXPECT_EQ(half.count(BlockOutcome::kFailed), 2u);
  EXPECT_EQ(waiting.count(BlockOutcome::kFailed), 2u);
  EXPECT_FAILS(pipeline->usable(), Code::kResourceExhausted, "scripted");
  OffloadHandle late = pipeline->enqueue(blocks(10, 2));
  ASSERT_TRUE(late.wait(20s));
  EXPECT_EQ(late.count(BlockOutcome::kFailed), 2u);
  pipeline->drain();
  EXPECT_EQ(pipeline->queued_blocks(), 0);
}

class ThrowingSink final : public EventSink {
 public:
  void on_stage(const StageEvent&) override { throw std::runtime_error("a sink that throws"); }
  void on_transfer(const TransferEvent&) override { throw std::runtime_error("a sink that throws"); }
};

TEST_F(OffloadPipelineTest, WhoListensAndThrowsStopsNothing) {
  ThrowingSink sink;
  const auto pipeline = value_of(OffloadPipeline::create(route_, system_clock(), by_size(1, 4), {}, &sink));
  OffloadHandle handle = pipeline->enqueue(blocks(0, 4));
  ASSERT_TRUE(handle.wait(20s));
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 4u);
}

TEST_F(OffloadPipelineTest, ABlockThatIsOnItsWayIsNotSentTwice) {
  route_.close();
  const auto pipeline = make(by_size(1, 8));
  const OffloadHandle first = pipeline->enqueue(blocks(0, 2));
  route_.wait_until_transferring();
  const OffloadHandle second = pipeline->enqueue(blocks(1, 2));
  while (second.status() == OffloadStatus::kQueued) std::this_thread::yield();
  route_.open();
  second.wait();
  EXPECT_EQ(second.count(BlockOutcome::kPresent), 1u);
  EXPECT_EQ(second.count(BlockOutcome::kTransferred), 1u);
}

TEST_F(OffloadPipelineTest, I9AFullQueueRefusesAtOnceAndSaysSo) {
  OffloadOptions options = by_size(100, 100);
  options.queue_blocks = 10;
  const auto pipeline = make(options);
  const OffloadHandle fits = pipeline->enqueue(blocks(0, 10));
  const OffloadHandle refused = pipeline->enqueue(blocks(10, 1));
  EXPECT_EQ(refused.status(), OffloadStatus::kDone);
  EXPECT_EQ(refused.count(BlockOutcome::kQueueFull), 1u);
  EXPECT_EQ(fits.status(), OffloadStatus::kQueued);
  EXPECT_EQ(pipeline->queued_blocks(), 10);
}

TEST_F(OffloadPipelineTest, ShuttingDownFinishesWhatIsCommittedAndEndsTheRest) {
  route_.close();
  auto pipeline = make(by_size(1, 4));
  const OffloadHandle committed = pipeline->enqueue(blocks(0, 2));
  route_.wait_until_transferring();
  const OffloadHandle waiting = pipeline->enqueue(blocks(10, 2), std::make_shared<Precondition>());
  std::thread opener([this] { route_.open(); });
  pipeline.reset();
  opener.join();
  EXPECT_EQ(committed.count(BlockOutcome::kTransferred), 2u);
  EXPECT_EQ(waiting.count(BlockOutcome::kShutDown), 2u);
  EXPECT_EQ(waiting.status(), OffloadStatus::kDone);
}

TEST_F(OffloadPipelineTest, AHandleThatOutlivesThePipelineCanStillBeCancelledAndAsked) {
  auto clock = std::make_unique<ManualClock>();
  auto pipeline = value_of(OffloadPipeline::create(route_, *clock, by_size(100, 100)));
  OffloadHandle handle = pipeline->enqueue(blocks(0, 1));
  pipeline.reset();
  clock.reset();
  handle.cancel();
  EXPECT_EQ(handle.count(BlockOutcome::kShutDown), 1u);
}

TEST_F(OffloadPipelineTest, PoliciesFilterInsideAContainerAndAllMustAgree) {
  auto frequency = std::make_unique<FrequencyPolicy>(2);
  for (const int32_t id : {1, 1, 2, 3, 3, 3}) frequency->used(key_of(id));
  const auto pipeline = make(by_size(1, 8), list(std::unique_ptr<OffloadPolicy>(std::move(frequency)), all_but(3)));
  const OffloadHandle handle = pipeline->enqueue(blocks(0, 5));
  handle.wait();
  EXPECT_EQ(handle.count(BlockOutcome::kFiltered), 4u);
  EXPECT_EQ(route_.batches(), (std::vector<std::vector<int32_t>>{{1}}));
}

TEST_F(OffloadPipelineTest, PresenceLooksAtTheTarget) {
  const auto pipeline = make(by_size(1, 8), list(make_presence_policy(route_)));
  pipeline->enqueue(blocks(0, 2)).wait();
  const OffloadHandle again = pipeline->enqueue(blocks(0, 3));
  again.wait();
  EXPECT_EQ(again.count(BlockOutcome::kFiltered), 2u);
  EXPECT_EQ(again.count(BlockOutcome::kTransferred), 1u);
}

TEST(OffloadPolicy, APolicyThatIsTooSlowLetsNothingGoAndIsCounted) {
  ManualClock clock;
  ScriptedRoute route;
  std::vector<std::unique_ptr<OffloadPolicy>> policies;
  policies.push_back(std::make_unique<ScriptedPolicy>(
      [&](const BlockName&) {
        clock.advance(60ms);
        return true;
      },
      clock));
  const auto pipeline = value_of(OffloadPipeline::create(route, clock, by_size(1, 8), std::move(policies)));
  const OffloadHandle slow = pipeline->enqueue(blocks(0, 3));
  slow.wait();
  EXPECT_EQ(slow.count(BlockOutcome::kPolicyTimeout), 3u);
  const OffloadHandle quick = pipeline->enqueue(blocks(0, 1));
  quick.wait();
  EXPECT_EQ(quick.count(BlockOutcome::kTransferred), 1u);
}

TEST(OffloadOptions, EachBadOptionIsRefusedByName) {
  const auto refused = [](OffloadOptions options, std::string_view part) {
    EXPECT_FAILS(options.validate(), Code::kInvalidArgument, part);
  };
  EXPECT_SUCCEEDS(OffloadOptions{}.validate());
  refused({.max_batch_size = 0}, "max_batch_size is 0");
  refused({.min_batch_size = 0}, "min_batch_size is 0");
  refused({.max_batch_size = 4, .min_batch_size = 5}, "not larger");
  refused({.flush_interval = -1ms}, "flush_interval");
  refused({.policy_timeout = 0ms}, "policy_timeout");
  refused({.sweep_interval = 0ms}, "sweep_interval");
  refused({.max_concurrent_transfers = 0}, "max_concurrent_transfers");
  refused({.on_deck_batches = 0}, "on_deck_batches");
  refused({.queue_blocks = 0}, "queue_blocks");
}

// I4 and I6 under load: many threads enqueue, cancel, meet and fail preconditions. Every block ends once, under one
// reason; a cancelled container goes as a whole or not at all.
TEST_F(OffloadPipelineTest, I4I6UnderRandomUseEveryBlockEndsOnceAndCancellationIsExact) {
  OffloadOptions options{.max_batch_size = 16,
                         .min_batch_size = 4,
                         .flush_interval = 1ms,
                         .sweep_interval = 1ms,
                         .max_concurrent_transfers = 2};
  const auto pipeline =
      make(options, list(std::make_unique<ScriptedPolicy>([](const BlockName& name) { return name.id % 7 != 0; })));
  std::atomic<uint64_t> enqueued = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 300; ++i) {
        const auto count = static_cast<int32_t>(1 + random() % 20);
        const int32_t first = (t * 300 + i) * 20;
        const auto precondition = random() % 2 == 0 ? std::make_shared<Precondition>() : nullptr;
        OffloadHandle handle =
            pipeline->enqueue(blocks(first, count), precondition, static_cast<int32_t>(random() % 3));
        enqueued += static_cast<uint64_t>(count);
        const bool cancel = random() % 3 == 0;
        if (precondition != nullptr && random() % 4 != 0) precondition->meet();
        if (cancel) handle.cancel();
        if (precondition != nullptr) random() % 8 == 0 ? precondition->fail() : precondition->meet();
        if (!cancel) continue;
        const uint64_t cancelled = handle.count(BlockOutcome::kCancelled);
        const uint64_t filtered = handle.count(BlockOutcome::kFiltered);
        EXPECT_TRUE(cancelled == 0 || cancelled + filtered == static_cast<uint64_t>(count)) << "a container was split";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  pipeline->drain();
  const OutcomeCounts counts = pipeline->counts();
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), uint64_t{0}), enqueued.load());
  EXPECT_EQ(pipeline->queued_blocks(), 0);
  std::set<int32_t> seen;
  for (const auto& batch : route_.batches()) {
    for (const int32_t id : batch) EXPECT_TRUE(seen.insert(id).second) << id << " went twice";
  }
  EXPECT_EQ(seen.size(), counts[static_cast<size_t>(BlockOutcome::kTransferred)]);
}

}  // namespace
}  // namespace torpor
