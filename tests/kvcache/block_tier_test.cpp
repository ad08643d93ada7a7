// SPDX-License-Identifier: Apache-2.0
// A tier over real segments whose file operations can fail, and over a store that engines share.
#include "kvcache/block_tier.h"

#include <condition_variable>
#include <mutex>

#include "tests/kvcache/shared_store.h"
#include "tests/offload/disk_world.h"

namespace torpor {
namespace {

using namespace test;

// Another store, whose calls wait while a gate is shut.
class GatedStore final : public SlotStore {
 public:
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool shut = false;
    int waiting = 0;
    int passed = 0;
    void set(bool to) {
      const std::lock_guard lock(mutex);
      shut = to;
      changed.notify_all();
    }
    void pass() {
      std::unique_lock lock(mutex);
      ++waiting;
      changed.notify_all();
      changed.wait(lock, [&] { return !shut; });
      --waiting;
      ++passed;
      changed.notify_all();
    }
    void wait_for(int Gate::*number, int least) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return this->*number >= least; });
    }
    void wait_for_one() { wait_for(&Gate::waiting, 1); }
  };
  GatedStore(std::unique_ptr<SlotStore> inner, Gate& gate, Gate& puts)
      : inner_(std::move(inner)), gate_(gate), puts_(puts) {}
  const StoreTraits& traits() const override { return inner_->traits(); }
  StoreSlot first_slot() const override { return inner_->first_slot(); }
  void open_space(uint32_t space, const Digest& digest) override { inner_->open_space(space, digest); }
  bool accepting() const override { return inner_->accepting(); }
  void drop(std::span<const SlotRange> ranges) override { inner_->drop(ranges); }
  Status sync() override { return inner_->sync(); }
  Result<std::vector<RecoveredSlot>> recover(uint32_t space) override { return inner_->recover(space); }
  StoreHealth health() const override { return inner_->health(); }

 private:
  void do_put(std::span<RecordPart> parts) override {
    puts_.pass();
    inner_->put(parts);
  }
  void do_get(std::span<RecordPart> parts) override {
    gate_.pass();
    inner_->get(parts);
  }
  void do_find(std::span<RecordPart> parts) override {
    gate_.pass();
    inner_->find(parts);
  }
  const std::unique_ptr<SlotStore> inner_;
  Gate& gate_;  // of reads
  Gate& puts_;
};

constexpr int32_t kTierSlots = 4;
constexpr uint64_t kBlock = kContractRecord;

// Host memory of an engine: rows of one block each. Jobs under way at once share no row.
struct HostRows {
  static constexpr size_t kRows = 32;
  std::vector<std::byte> bytes = std::vector<std::byte>(kRows * kBlock);
  size_t next = 0;
  std::vector<std::span<std::byte>> take(size_t rows) {
    std::vector<std::span<std::byte>> taken;
    for (; rows > 0; --rows) taken.push_back(std::span(bytes).subspan(next++ % kRows * kBlock, kBlock));
    return taken;
  }
};

class BlockTierTest : public ::testing::Test {
 protected:
  void open(int32_t segments = 3, const Digest& space = digest_of({})) {
    tier_.reset();
    SegmentStoreOptions options{.record_bytes = kBlock, .slots_per_segment = kTierSlots};
    options.budget_bytes = static_cast<uint64_t>(segments + 1) * SegmentStore::most_bytes_of_segment(options);
    std::unique_ptr<SlotStore> store = value_of(SegmentStore::open(files_, folder_ / "store", options, clock_));
    tier_ = value_of(BlockTier::create(
        {.block_bytes = kBlock, .disk_segments = segments, .segment_slots = kTierSlots, .remembered_removals = 64},
        std::make_unique<GatedStore>(std::move(store), gate_, puts_), space, clock_));
  }
  void open_shared(int32_t slots = 8, const Digest& space = digest_of({})) {
    tier_.reset();
    tier_ = value_of(BlockTier::create(
        {.block_bytes = kBlock, .remote_slots = slots},
        std::make_unique<GatedStore>(std::make_unique<SharedStore>(shared_, 0, kBlock), gate_, puts_), space, clock_));
  }
  // Puts these blocks; which of them are stored.
  std::vector<bool> store(const std::vector<uint64_t>& seeds) {
    begin_store(seeds);
    return only_result();
  }
  void begin_store(const std::vector<uint64_t>& seeds) {
    const std::vector<std::span<std::byte>> blocks = memory_.take(seeds.size());
    for (size_t i = 0; i < seeds.size(); ++i)
      std::memcpy(blocks[i].data(), some_bytes(seeds[i], kBlock).data(), kBlock);
    ASSERT_SUCCEEDS(tier_->store(++job_, keys(seeds), blocks));
  }
  // Loads them; which came, each byte for byte.
  std::vector<bool> load(const std::vector<uint64_t>& seeds) {
    const std::vector<std::span<std::byte>> blocks = begin_load(seeds);
    std::vector<bool> good = only_result();
    for (size_t i = 0; i < seeds.size(); ++i) {
      const std::vector<std::byte> bytes = some_bytes(seeds[i], kBlock);
      EXPECT_TRUE(!good[i] || std::memcmp(blocks[i].data(), bytes.data(), kBlock) == 0) << i;
    }
    return good;
  }
  std::vector<std::span<std::byte>> begin_load(const std::vector<uint64_t>& seeds) {
    std::vector<std::span<std::byte>> blocks = memory_.take(seeds.size());
    for (const std::span<std::byte> block : blocks) std::memset(block.data(), 0xee, kBlock);
    EXPECT_SUCCEEDS(tier_->load(++job_, "r", keys(seeds), blocks));
    return blocks;
  }
  std::vector<bool> only_result() {
    tier_->wait();
    std::vector<TierJobResult> results = tier_->finished();
    EXPECT_EQ(results.size(), 1u);
    EXPECT_EQ(results.at(0).job, job_);
    EXPECT_SUCCEEDS(tier_->check());
    return results.at(0).good;
  }
  static std::vector<BlockKey> keys(const std::vector<uint64_t>& seeds) {
    std::vector<BlockKey> made;
    for (const uint64_t seed : seeds) made.push_back(some_key(seed));
    return made;
  }
  std::string found(const std::vector<uint64_t>& seeds, const std::string& request = "r") {
    std::string text;
    for (const uint64_t seed : seeds) {
      const TierLookup each = tier_->lookup(some_key(seed), request);
      text += each == TierLookup::kHit ? 'h' : each == TierLookup::kMiss ? '-' : '?';
    }
    return text;
  }
  // What is found when all questions have been answered.
  std::string asked(const std::vector<uint64_t>& seeds, const std::string& request = "r") {
    (void)found(seeds, request);
    tier_->ask();
    tier_->wait();
    EXPECT_EQ(tier_->finished().size(), 0u);
    return found(seeds, request);
  }
  std::string file(uint64_t number) const { return folder_ / "store/r0/" + segment_name(number); }

  FaultyFileSystem files_;
  ManualClock clock_;
  TemporaryDirectory folder_;
  SharedBlocks shared_;
  GatedStore::Gate gate_;
  GatedStore::Gate puts_;
  HostRows memory_;
  uint64_t job_ = 0;
  std::unique_ptr<BlockTier> tier_;
};

const std::vector<bool> kBoth = {true, true};

TEST_F(BlockTierTest, WhatIsStoredIsFoundAndLoadedByteForByte) {
  open();
  EXPECT_EQ(found({1, 2, 3}), "---");
  EXPECT_EQ(store({1, 2}), kBoth);
  EXPECT_EQ(found({1, 2, 3}), "hh-");
  EXPECT_EQ(load({2, 1}), kBoth);
  EXPECT_EQ(load({2, 3}), (std::vector<bool>{true, false}));
  EXPECT_EQ(store({1, 2}), kBoth);  // nothing to do
  EXPECT_EQ(tier_->health().put_bytes, 2 * kBlock);
}

TEST_F(BlockTierTest, ARestartFindsThemAndOnlyOfItsKeySpace) {
  open(4);
  EXPECT_EQ(store({1, 2, 3, 4, 5}), std::vector<bool>(5, true));
  open(4);
  EXPECT_EQ(tier_->recovered(), 5);
  EXPECT_EQ(load({1, 5}), kBoth);
  EXPECT_EQ(store({6, 7}), kBoth);
  open(4);
  EXPECT_EQ(found({1, 2, 3, 4, 5, 6, 7}), "hhhhhhh");
  const Digest other = digest_of(std::as_bytes(std::span("other weights")));
  open(4, other);
  EXPECT_EQ(found({1, 6}), "--");
  EXPECT_EQ(tier_->recovered(), 0);
}

TEST_F(BlockTierTest, WhatIsForgottenIsNotFoundAndNotServedToWhoLoadsIt) {
  open();
  EXPECT_EQ(store({1, 2}), kBoth);
  const Digest other = digest_of(std::as_bytes(std::span("other weights")));
  ASSERT_SUCCEEDS(tier_->forget(other));
  EXPECT_EQ(found({1, 2}), "--");
  EXPECT_EQ(load({1, 2}), std::vector<bool>(2, false));
  EXPECT_EQ(store({1, 3}), kBoth);
  EXPECT_EQ(found({1, 2, 3}), "h-h");
  open(3, other);
  EXPECT_EQ(found({1, 2, 3}), "h-h");
}

TEST_F(BlockTierTest, ADamagedBlockIsAMissFromThenOnAndOthersAreNot) {
  open();
  EXPECT_EQ(store({1, 2}), kBoth);
  flip(file(0), 2 * kPage + 100);  // in the first record
  EXPECT_EQ(found({1, 2}), "hh");
  EXPECT_EQ(load({1, 2}), (std::vector<bool>{false, true}));
  EXPECT_EQ(found({1, 2}), "-h");
  EXPECT_EQ(store({1, 2}), kBoth);
  EXPECT_EQ(load({1, 2}), kBoth);
}

TEST_F(BlockTierTest, WithoutRoomTheOldestSegmentGoes) {
  open();
  for (uint64_t first = 0; first < 12; first += 2) EXPECT_EQ(store({first, first + 1}), kBoth);
  EXPECT_EQ(found({0, 3, 4, 11}), "hhhh");
  EXPECT_EQ(store({12, 13}), kBoth);
  EXPECT_EQ(found({0, 3, 4, 11, 12, 13}), "--hhhh");
  EXPECT_EQ(tier_->take_removed().blocks.size(), 4u);
  EXPECT_EQ(load({4, 13}), kBoth);
  open();  // a segment is left for what comes
  EXPECT_EQ(found({0, 3, 4, 8, 11, 12, 13}), "---hhhh");
}

TEST_F(BlockTierTest, ASegmentThatIsReadStaysWhileOthersGo) {
  open();
  for (uint64_t first = 0; first < 12; first += 2) EXPECT_EQ(store({first, first + 1}), kBoth);
  gate_.set(true);
  begin_load({0, 1});
  const uint64_t loading = job_;
  gate_.wait_for_one();
  begin_store({12, 13, 14, 15, 16});  // of two segments
  gate_.set(false);
  tier_->wait();
  std::vector<TierJobResult> results = tier_->finished();
  ASSERT_EQ(results.size(), 2u);
  for (const TierJobResult& each : results) {
    EXPECT_EQ(each.good, std::vector<bool>(each.job == loading ? 2 : 5, true));
  }
  EXPECT_EQ(found({0, 4, 8, 12, 16}), "h--hh");
}

TEST_F(BlockTierTest, ABlockThatGoesBetweenLookupAndLoadDoesNotCome) {
  open();
  EXPECT_EQ(store({0, 1}), kBoth);
  EXPECT_EQ(found({0, 1}), "hh");
  for (uint64_t first = 2; first < 14; first += 2) EXPECT_EQ(store({first, first + 1}), kBoth);
  EXPECT_EQ(load({0, 1}), std::vector<bool>(2, false));
}

TEST_F(BlockTierTest, AFullDiskCostsBlocksAndNothingElse) {
  open();
  EXPECT_EQ(store({1, 2}), kBoth);
  files_.plan.set(Fault::kError, 1, ENOSPC, /*all_after=*/true);
  EXPECT_EQ(store({3, 4}), std::vector<bool>(2, false));
  EXPECT_EQ(found({1, 2, 3, 4}), "hh--");
  EXPECT_EQ(store({5, 6}), std::vector<bool>(2, false));  // not tried: no file is called
  files_.plan.clear();
  EXPECT_EQ(load({1, 2}), kBoth);
  clock_.advance(std::chrono::seconds(10));
  EXPECT_EQ(store({3, 4}), kBoth);
  EXPECT_EQ(load({3, 4}), kBoth);
}

TEST_F(BlockTierTest, ADiskThatCannotBeReadIsAMiss) {
  open();
  EXPECT_EQ(store({1, 2}), kBoth);
  files_.plan.set(Fault::kError, 1, EIO, /*all_after=*/true);
  EXPECT_EQ(load({1, 2}), std::vector<bool>(2, false));
  files_.plan.clear();
  EXPECT_EQ(found({1, 2}), "--");
}

TEST_F(BlockTierTest, TheEndDoesNotWaitForWhatIsNotBegun) {
  open();
  EXPECT_EQ(store({1}), std::vector<bool>(1, true));
  gate_.set(true);
  const int threads = BlockTierOptions{}.threads;
  for (int i = 0; i < 3 * threads; ++i) begin_load({1});
  gate_.wait_for(&GatedStore::Gate::waiting, threads);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // in which the end begins
    gate_.set(false);
  });
  tier_.reset();
  opener.join();
  EXPECT_EQ(gate_.passed, threads);
}

TEST_F(BlockTierTest, LoadsDoNotWaitForStores) {
  open();
  EXPECT_EQ(store({1}), std::vector<bool>(1, true));
  puts_.set(true);
  for (uint64_t seed = 2; seed < 10; ++seed) begin_store({seed});
  puts_.wait_for(&GatedStore::Gate::waiting, 3);  // one thread is never used by stores
  begin_load({1});
  gate_.wait_for(&GatedStore::Gate::passed, 1);
  puts_.set(false);
  tier_->wait();
  EXPECT_EQ(tier_->finished().size(), 9u);
}

TEST_F(BlockTierTest, OptionsThatDoNotFitTheStoreAreRefused) {
  const auto made = [&](BlockTierOptions options) {
    return BlockTier::create(options, std::make_unique<SharedStore>(shared_, 0, kBlock), {}, clock_);
  };
  EXPECT_FAILS(made({.block_bytes = kBlock, .disk_segments = 2, .segment_slots = 4}), Code::kInvalidArgument, "remote");
  EXPECT_FAILS(made({.block_bytes = kBlock + 1, .remote_slots = 4}), Code::kInvalidArgument, "bytes");
  EXPECT_FAILS(made({.block_bytes = kBlock, .remote_slots = 4, .threads = 1}), Code::kInvalidArgument, "threads");
  EXPECT_SUCCEEDS(made({.block_bytes = kBlock, .remote_slots = 4}));
}

// ---- a store that others fill, too

TEST_F(BlockTierTest, WhatAnotherEngineStoredIsFoundWhenItWasAsked) {
  open_shared();
  EXPECT_EQ(store({1, 2}), kBoth);
  open_shared();
  EXPECT_EQ(found({1, 2, 3}), "???");
  EXPECT_EQ(found({1, 2, 3}), "???");  // one question
  EXPECT_EQ(asked({1, 2, 3}), "hh-");
  EXPECT_EQ(load({1, 2}), kBoth);
  EXPECT_EQ(found({3}, "other"), "-");
  tier_->request_finished("r");
  tier_->request_finished("other");
  EXPECT_EQ(found({1, 3}, "later"), "h?");  // asked anew
}

TEST_F(BlockTierTest, ARequestDoesNotWaitForAnAnswerForLong) {
  open_shared();
  gate_.set(true);
  EXPECT_EQ(found({1}), "?");
  tier_->ask();
  gate_.wait_for_one();
  clock_.advance(std::chrono::milliseconds(100));
  EXPECT_EQ(found({1}), "?");
  clock_.advance(std::chrono::milliseconds(1));
  EXPECT_EQ(found({1}), "-");
  tier_->request_finished("r");
  gate_.set(false);
  tier_->wait();
  EXPECT_EQ(tier_->finished().size(), 0u);
  EXPECT_EQ(found({1}, "later"), "?");
}

// vLLM asks several times for one request, and goes on without a block that was a miss.
TEST_F(BlockTierTest, AMissStaysAMissForItsRequestThoughTheAnswerComesLater) {
  open_shared();
  EXPECT_EQ(store({1, 2}), kBoth);
  open_shared();
  gate_.set(true);
  EXPECT_EQ(found({1}), "?");
  tier_->ask();
  gate_.wait_for_one();
  clock_.advance(std::chrono::milliseconds(101));
  EXPECT_EQ(found({1}), "-");
  gate_.set(false);
  tier_->wait();
  EXPECT_EQ(tier_->finished().size(), 0u);
  EXPECT_EQ(found({1}), "-");
  EXPECT_EQ(found({1}, "other"), "h");
  tier_->request_finished("r");
  EXPECT_EQ(found({1}), "h");
  shared_.refusing = true;
  EXPECT_EQ(found({2}), "-");
  shared_.refusing = false;
  EXPECT_EQ(found({2}), "-");
  EXPECT_EQ(asked({2}, "other"), "h");
  EXPECT_EQ(found({2}), "-");
  tier_->request_finished("r");
  tier_->request_finished("other");
  EXPECT_EQ(found({1, 2}), "hh");
}

// Answers that were dropped and asked for anew count each request that waits for them once.
TEST_F(BlockTierTest, ARequestThatEndsTakesNoAnswerFromOthers) {
  open_shared(1);
  EXPECT_EQ(store({1}), std::vector<bool>(1, true));
  open_shared(1);
  EXPECT_EQ(asked({1}), "h");
  EXPECT_EQ(asked({2}, "other"), "-");
  EXPECT_EQ(store({3}), std::vector<bool>(1, true));  // takes the only slot
  shared_.gone = true;
  EXPECT_EQ(asked({1}, "other"), "-");
  shared_.gone = false;
  tier_->request_finished("r");
  EXPECT_EQ(found({1}, "other"), "-");
}

// One request has heard of a miss and goes on. The block comes for others, the index evicts it, and the store has
// it still.
TEST_F(BlockTierTest, ABlockThatTheIndexHasEvictedIsAskedForAgain) {
  open_shared(1);
  EXPECT_EQ(store({1}), std::vector<bool>(1, true));
  open_shared(1);
  shared_.refusing = true;
  EXPECT_EQ(found({1}), "-");
  shared_.refusing = false;
  EXPECT_EQ(asked({1}, "other"), "h");
  EXPECT_EQ(store({3}), std::vector<bool>(1, true));  // takes the only slot
  EXPECT_EQ(asked({1}, "third"), "h");
  EXPECT_EQ(found({1}), "-");
}

TEST_F(BlockTierTest, AStoreThatIsGoneIsAMiss) {
  open_shared();
  EXPECT_EQ(store({1, 2}), kBoth);
  shared_.gone = true;
  EXPECT_EQ(load({1, 2}), std::vector<bool>(2, false));
  EXPECT_EQ(found({1, 2}), "--");
  EXPECT_EQ(store({3}), std::vector<bool>(1, false));
  EXPECT_EQ(asked({4}), "-");
  shared_.refusing = true;
  EXPECT_EQ(found({5}), "-");  // nobody asks
  shared_.gone = shared_.refusing = false;
  EXPECT_EQ(tier_->finished().size(), 0u);
  EXPECT_EQ(found({1, 2}), "--");  // for this request
  tier_->request_finished("r");
  EXPECT_EQ(asked({1, 2, 3}), "hh-");
  EXPECT_EQ(load({1, 2}), kBoth);
}

TEST_F(BlockTierTest, ABlockThatIsRemovedOrDamagedThereIsAMissForWhoAskedForIt) {
  open_shared();
  EXPECT_EQ(store({1, 2, 3}), std::vector<bool>(3, true));
  shared_.blocks.begin()->second.second[5] ^= std::byte{1};
  shared_.blocks.erase(std::prev(shared_.blocks.end()));
  const std::vector<bool> came = load({1, 2, 3});
  EXPECT_EQ(std::count(came.begin(), came.end(), true), 1);
  EXPECT_EQ(found({1, 2, 3}).find('?'), std::string::npos);  // it is not asked again and again
  EXPECT_EQ(load({1, 2, 3}), came);
}

TEST_F(BlockTierTest, WhatDoesNotComeForARequestThatHasEndedIsAskedForByOthers) {
  open_shared();
  EXPECT_EQ(store({1}), std::vector<bool>(1, true));
  shared_.gone = true;
  gate_.set(true);
  begin_load({1});
  gate_.wait_for_one();
  tier_->request_finished("r");
  gate_.set(false);
  EXPECT_EQ(only_result(), std::vector<bool>(1, false));
  shared_.gone = false;
  EXPECT_EQ(asked({1}, "later"), "h");
}

TEST_F(BlockTierTest, MoreBlocksThanAreRememberedAreFoundByAsking) {
  open_shared(4);
  EXPECT_EQ(store({1, 2, 3, 4}), std::vector<bool>(4, true));
  EXPECT_EQ(store({5, 6}), kBoth);
  EXPECT_EQ(shared_.blocks.size(), 6u);
  EXPECT_EQ(asked({1, 5}), "hh");
  EXPECT_EQ(load({1, 5}), kBoth);
  const Digest other = digest_of(std::as_bytes(std::span("other weights")));
  ASSERT_SUCCEEDS(tier_->forget(other));
  EXPECT_EQ(asked({1, 5}, "after"), "--");
}

}  // namespace
}  // namespace torpor
