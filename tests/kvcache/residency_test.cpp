// SPDX-License-Identifier: Apache-2.0
// Sessions that are demoted, prefetched, retained, pinned and evicted, over ranks with real stores. In no step is a
// block nowhere.
#include "kvcache/residency.h"

#include "tests/kvcache/offload_scene.h"
#include "tests/kvcache/shared_store.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using namespace test;
using namespace std::chrono_literals;

// A device block has the key that was computed into it last.
class FakeDeviceCache final : public DeviceCache {
 public:
  explicit FakeDeviceCache(FakeDeviceBlocks& blocks) : blocks_(blocks) {}
  int32_t find(const BlockKey& key) const override {
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? -1 : found->second;
  }
  Evicted evict(const BlockKey& key) override {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return {};
    if (in_use_.contains(found->second)) return {.in_use = 1};
    EXPECT_EQ(blocks_.holds(found->second), 0) << "a copy still reads the block";
    blocks_.clear(found->second);
    by_key_.erase(found);
    return {.blocks = 1};
  }
  size_t free_blocks() const override { return free_.size(); }
  std::vector<int32_t> take(size_t blocks) override {
    if (blocks > free_.size()) return {};
    std::vector<int32_t> taken(free_.begin(), free_.begin() + static_cast<std::ptrdiff_t>(blocks));
    free_.erase(free_.begin(), free_.begin() + static_cast<std::ptrdiff_t>(blocks));
    for (const int32_t block : taken) {
      EXPECT_FALSE(in_use_.contains(block)) << "block " << block << " is a request's";
      std::erase_if(by_key_, [&](const auto& entry) { return entry.second == block; });
      blocks_.clear(block);
      in_use_.insert(block);
    }
    return taken;
  }
  void use(std::span<const int32_t> blocks) override {
    for (const int32_t block : blocks) {
      std::erase(free_, block);
      in_use_.insert(block);
    }
  }
  bool enter(std::span<const BlockKey> prefix, int32_t block) override {
    EXPECT_TRUE(in_use_.contains(block));
    if (refuses_) return false;
    blocks_.write(block);
    by_key_[prefix.back()] = block;
    return true;
  }
  void release(std::span<const int32_t> blocks) override {
    for (const int32_t block : blocks) {
      EXPECT_EQ(in_use_.erase(block), 1u) << "block " << block << " is not taken";
      free_.push_back(block);
    }
  }
  // A free block that has this key.
  void enter_free(const BlockKey& key, int32_t block) {
    by_key_[key] = block;
    free_.push_back(block);
  }
  void give(const std::vector<int32_t>& blocks) { free_.insert(free_.end(), blocks.begin(), blocks.end()); }
  const std::vector<int32_t>& free() const { return free_; }
  void refuse() { refuses_ = true; }
  void enter(const BlockKey& key, int32_t block) { by_key_[key] = block; }
  void use(int32_t block) { in_use_.insert(block); }

 private:
  FakeDeviceBlocks& blocks_;
  std::map<BlockKey, int32_t, BlockKeyLess> by_key_;
  std::set<int32_t> in_use_;
  std::vector<int32_t> free_;
  bool refuses_ = false;
};

class ResidencyTest : public ::testing::Test {
 protected:
  // The placement stores nothing by itself where a test has not asked for it.
  void open(OffloadRankOptions rank, ResidencyOptions options = {}, PlacementOptions placement = {}) {
    rank.directory = temporary_ / "store";
    OffloadSceneOptions with{.rank = std::move(rank), .placement = placement};
    with.scheduler.queue.min_batch_size = 1;
    with.scheduler.queue.max_batch_size = 2;
    scene_ = std::make_unique<OffloadScene>(std::move(with));
    device_ = std::make_unique<FakeDeviceCache>(scene_->device);
    residency_ = value_of(Residency::create(options, *scene_->scheduler, *device_, scene_->clock));
  }
  void TearDown() override {
    if (residency_ == nullptr) return;
    EXPECT_SUCCEEDS(residency_->check());
    EXPECT_SUCCEEDS(scene_->scheduler->check());
    EXPECT_EQ(residency_->counts().held, held_at_end_);
    residency_.reset();
  }
  // A request of the session computes these blocks, key n in device block n, and ends.
  void compute(const SessionName& name, const std::vector<uint32_t>& numbers) {
    residency_->begin(name);
    std::vector<BlockHash> chain;
    for (const uint32_t number : numbers) {
      const BlockKey key = scene_->keys_of({number})[0];
      if (device_->find(key) < 0) scene_->compute(static_cast<int32_t>(number), 100 + number);
      device_->enter(key, static_cast<int32_t>(number));
      chain.push_back(key.hash);
      known_.insert(number);
    }
    residency_->finished(name, chain, 0);
  }
  // Return the sessions, the most recently used first, from pages that look at so many blocks.
  std::vector<SessionView> list(const std::string* tenant, size_t most = Residency::kPageBlocks) {
    std::vector<SessionView> views;
    SessionCursor from;
    for (int pages = 0; pages < 1000; ++pages) {
      SessionPage page = residency_->list(tenant, from, most);
      std::move(page.views.begin(), page.views.end(), std::back_inserter(views));
      if (!page.next) break;
      from = *page.next;
    }
    std::sort(views.begin(), views.end(), [](const auto& a, const auto& b) { return a.used > b.used; });
    return views;
  }
  SessionAnswer call(SessionCall call) { return value_of(residency_->call(call, 0)); }
  // Take steps until nothing is left to do. Return the action's answer.
  SessionAnswer finish(const SessionAnswer& begun, const std::string& tenant = "t") {
    for (int step = 0; step < 200 && (residency_->busy() || scene_->scheduler->busy()); ++step) take_step();
    EXPECT_FALSE(residency_->busy());
    return value_of(residency_->answer(tenant, begun.action));
  }
  void take_step() {
    residency_->advance(0);
    scene_->send();
    for (size_t rank = 0; rank < scene_->ranks.size(); ++rank)
      EXPECT_SUCCEEDS(scene_->scheduler->apply(scene_->report_of(rank)));
    for (const EndedLoad& load : scene_->scheduler->take_loads()) EXPECT_TRUE(residency_->loaded(load));
    EXPECT_SUCCEEDS(scene_->scheduler->check());
    EXPECT_SUCCEEDS(residency_->check());
    for (const uint32_t number : known_) EXPECT_TRUE(is_somewhere(number)) << "block " << number;
  }
  BlockLocations places_of(uint32_t number) const {
    std::vector<BlockLocations> places(1);
    scene_->scheduler->index().find_each(scene_->keys_of({number}), places);
    return places[0];
  }
  bool on_device(uint32_t number) const { return device_->find(scene_->keys_of({number})[0]) >= 0; }
  bool is_somewhere(uint32_t number) const { return on_device(number) || places_of(number).anywhere(); }
  void expect_loads(const std::vector<uint32_t>& numbers) {
    std::vector<int32_t> blocks;
    for (size_t i = 0; i < numbers.size(); ++i) blocks.push_back(static_cast<int32_t>(10 + i));
    EXPECT_EQ(scene_->load(numbers, blocks), static_cast<int32_t>(numbers.size()));
    for (size_t i = 0; i < numbers.size(); ++i) EXPECT_TRUE(scene_->all_have(blocks[i], 100 + numbers[i]));
  }

  const SessionName a_{.tenant = "t", .id = "a"};
  const SessionName b_{.tenant = "t", .id = "b"};
  TemporaryDirectory temporary_;
  SharedBlocks shared_;
  std::unique_ptr<OffloadScene> scene_;
  std::unique_ptr<FakeDeviceCache> device_;
  std::unique_ptr<Residency> residency_;
  std::set<uint32_t> known_;
  uint64_t held_at_end_ = 0;
};

TEST_F(ResidencyTest, ADemotionCopiesProvesAndThenFrees) {
  open({.disk_segments = 4, .segment_slots = 4});
  compute(a_, {0, 1, 2});
  const SessionAnswer begun = call({.name = a_, .to = StoreId::kHost});
  EXPECT_FALSE(begun.done);
  EXPECT_TRUE(on_device(0));  // nothing is freed before it is copied
  SessionAnswer done = finish(begun);
  EXPECT_EQ(std::tuple(done.outcome, done.blocks, done.freed, done.kept),
            std::tuple(SessionOutcome::kAccepted, 3u, 3u, 0u));
  for (const uint32_t number : {0, 1, 2}) {
    EXPECT_FALSE(on_device(number));
    EXPECT_GE(places_of(number).host, 0);
  }
  done = finish(call({.name = a_, .to = StoreId::kDisk}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kAccepted, 3u));
  for (const uint32_t number : {0, 1, 2}) {
    EXPECT_EQ(places_of(number).host, -1);
    EXPECT_GE(places_of(number).disk, 0);
  }
  expect_loads({0, 1, 2});
  const std::vector<SessionView> views = list(&a_.tenant);
  ASSERT_EQ(views.size(), 1u);
  EXPECT_EQ(std::tuple(views[0].residence, views[0].blocks, views[0].device, views[0].host, views[0].disk),
            std::tuple(Residence::kDisk, 3u, 0u, 0u, 3u));
}

TEST_F(ResidencyTest, FromTheDeviceToDiskInOneCallAndBackToHostMemory) {
  open({.disk_segments = 4, .segment_slots = 4});
  compute(a_, {0, 1, 2});
  SessionAnswer done = finish(call({.name = a_, .to = StoreId::kDisk}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks, done.freed), std::tuple(SessionOutcome::kAccepted, 3u, 3u));
  EXPECT_EQ(places_of(1).host, -1);
  done = finish(call({.verb = SessionVerb::kPrefetch, .name = a_}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kAccepted, 3u));
  for (const uint32_t number : {0, 1, 2}) EXPECT_GE(places_of(number).host, 0);
  EXPECT_EQ(list(nullptr)[0].residence, Residence::kHost);
  const ResidencyCounts counts = residency_->counts();
  EXPECT_EQ(counts.blocks[static_cast<size_t>(SessionVerb::kDemote)][static_cast<size_t>(Residence::kDisk)], 3u);
  EXPECT_EQ(counts.blocks[static_cast<size_t>(SessionVerb::kPrefetch)][static_cast<size_t>(Residence::kHost)], 3u);
}

TEST_F(ResidencyTest, ADemotionToTheSharedStoreAndBack) {
  open({.remote_slots = 8, .remote = &shared_});
  compute(a_, {0, 1});
  SessionAnswer done = finish(call({.name = a_, .to = StoreId::kRemote}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks, done.freed), std::tuple(SessionOutcome::kAccepted, 2u, 2u));
  EXPECT_EQ(places_of(0).host, -1);
  EXPECT_EQ(shared_.blocks.size(), 4u);  // of two ranks
  done = finish(call({.verb = SessionVerb::kPrefetch, .name = a_}));
  EXPECT_EQ(done.blocks, 2u);
  shared_.gone = true;
  expect_loads({0, 1});
}

TEST_F(ResidencyTest, WhatCannotBeCopiedStays) {
  open({.remote_slots = 8, .remote = &shared_});
  compute(a_, {0, 1});
  shared_.gone = true;
  const SessionAnswer done = finish(call({.name = a_, .to = StoreId::kRemote}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks, done.freed), std::tuple(SessionOutcome::kClipped, 0u, 0u));
  EXPECT_NE(done.reason.find("2 of 2 blocks were not copied"), std::string::npos) << done.reason;
  EXPECT_TRUE(on_device(0) && on_device(1));
}

TEST_F(ResidencyTest, ABlockThatAnotherSessionWantsNearerStaysThere) {
  open({.disk_segments = 4, .segment_slots = 4});
  compute(a_, {0, 1});
  compute(b_, {0, 2});
  SessionAnswer done = finish(call({.name = a_, .to = StoreId::kDisk}));
  EXPECT_EQ(std::tuple(done.blocks, done.freed, done.kept), std::tuple(2u, 1u, 1u));
  EXPECT_TRUE(on_device(0));
  EXPECT_FALSE(on_device(1));
  done = finish(call({.name = b_, .to = StoreId::kHost}));
  EXPECT_EQ(done.freed, 2u);  // the last that wanted it there
  EXPECT_GE(places_of(0).host, 0);
}

TEST_F(ResidencyTest, ABlockThatARequestUsesStays) {
  open({});
  compute(a_, {0, 1});
  device_->use(1);
  const SessionAnswer done = finish(call({.name = a_}));
  EXPECT_EQ(std::tuple(done.outcome, done.freed, done.kept), std::tuple(SessionOutcome::kAccepted, 1u, 1u));
}

TEST_F(ResidencyTest, ARunningRequestDefersADemotionAndOneThatComesMeanwhileKeepsItsBlocks) {
  open({});
  compute(a_, {0, 1});
  residency_->begin(a_);
  EXPECT_EQ(call({.name = a_}).outcome, SessionOutcome::kDeferred);
  EXPECT_EQ(call({.verb = SessionVerb::kEvict, .name = a_}).outcome, SessionOutcome::kDeferred);
  residency_->finished(a_, {}, 0);
  const SessionAnswer begun = call({.name = a_});
  residency_->begin(a_);
  const SessionAnswer done = finish(begun);
  EXPECT_EQ(std::tuple(done.outcome, done.freed), std::tuple(SessionOutcome::kClipped, 0u));
  EXPECT_TRUE(on_device(0) && on_device(1));
}

TEST_F(ResidencyTest, ARequestThatBeginsAndEndsDuringADemotionKeepsItsBlocks) {
  open({});
  compute(a_, {0, 1});
  const SessionAnswer begun = call({.name = a_});
  EXPECT_FALSE(begun.done);
  compute(a_, {0, 1, 2});
  const SessionAnswer done = finish(begun);
  EXPECT_EQ(std::tuple(done.outcome, done.freed), std::tuple(SessionOutcome::kClipped, 0u));
  EXPECT_TRUE(on_device(0) && on_device(1) && on_device(2));
  EXPECT_EQ(list(nullptr)[0].residence, Residence::kDevice);
}

TEST_F(ResidencyTest, AnActionHasOneAnswerAndATenantSeesItsOwnSessionsAlone) {
  open({});
  compute(a_, {0});
  const SessionCall demote{.name = a_, .action = "act-1"};
  const SessionAnswer done = finish(call(demote));
  const SessionAnswer again = call(demote);
  EXPECT_TRUE(again.repeated && again.done);
  EXPECT_EQ(std::tuple(again.blocks, again.freed, again.epoch), std::tuple(done.blocks, done.freed, done.epoch));
  SessionCall other = demote;
  other.verb = SessionVerb::kPrefetch;
  EXPECT_FAILS(residency_->call(other, 0), Code::kInvalidArgument, "act-1");
  const SessionName theirs{.tenant = "u", .id = "a"};
  EXPECT_EQ(call({.name = theirs, .action = "act-1"}).outcome, SessionOutcome::kMissing);
  EXPECT_FAILS(residency_->answer("u", "act-1"), Code::kNotFound, "act-1");
  EXPECT_TRUE(list(&theirs.tenant).empty());
  EXPECT_EQ(list(nullptr).size(), 1u);
}

TEST_F(ResidencyTest, ACallWithoutAnIdGetsOneThatNoOtherCallHas) {
  open({.disk_segments = 4, .segment_slots = 4});
  compute(a_, {0, 1});
  const SessionAnswer named = call({.name = a_, .to = StoreId::kDisk, .action = "#1"});
  EXPECT_FALSE(named.done);
  EXPECT_EQ(call({.verb = SessionVerb::kPrefetch, .name = a_}).action, "#2");
  EXPECT_EQ(finish(named).outcome, SessionOutcome::kAccepted);
}

TEST_F(ResidencyTest, TooManyCallsAtATimeAreDeferred) {
  open({.host_slots = 4}, {.index = {.tenant_share = 1}, .pin_share = 1});
  compute(a_, {0});
  const SessionCall retain{.verb = SessionVerb::kRetain, .name = a_, .seconds = 60s};
  for (size_t i = 0; i < Residency::kMostPending; ++i) EXPECT_FALSE(call(retain).done);
  const SessionAnswer deferred = call(retain);
  EXPECT_EQ(deferred.outcome, SessionOutcome::kDeferred);
  EXPECT_EQ(deferred.reason, "too many calls of sessions are under way");
  EXPECT_SUCCEEDS(scene_->scheduler->reset());
  residency_->reset();
  known_.clear();
}

TEST_F(ResidencyTest, CallsThatAreWrongSaySo) {
  open({});
  compute(a_, {0});
  EXPECT_FAILS(residency_->call({.verb = SessionVerb::kPin, .name = a_}, 0), Code::kInvalidArgument, "ttl");
  EXPECT_FAILS(residency_->call({.name = {.tenant = "t", .id = ""}}, 0), Code::kInvalidArgument, "session id");
  EXPECT_FAILS(residency_->call({.verb = SessionVerb::kPrefetch, .name = a_, .seconds = -1s}, 0),
               Code::kInvalidArgument, "deadline");
  const SessionAnswer refused = call({.name = a_, .to = StoreId::kDisk});
  EXPECT_EQ(refused.outcome, SessionOutcome::kRejected);
  EXPECT_EQ(refused.reason, "this engine has no tier disk");
  EXPECT_FAILS(ResidencyOptions{.pin_share = 2}.validate(), Code::kInvalidArgument, "pin_share");
  EXPECT_FAILS(ResidencyOptions{.most_ttl = 2000000000s}.validate(), Code::kInvalidArgument, "most_ttl");
}

TEST_F(ResidencyTest, APinHoldsItsBlocksUntilItsTimeIsOver) {
  open({.host_slots = 4}, {.index = {.tenant_share = 1}, .pin_share = 1});
  compute(a_, {0, 1});
  SessionAnswer done = finish(call({.verb = SessionVerb::kPin, .name = a_, .seconds = 60s}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kAccepted, 2u));
  EXPECT_EQ(residency_->counts().held, 2u);
  known_.clear();  // what follows makes room
  const auto fill = [&](std::vector<uint32_t> numbers) {
    for (const uint32_t number : numbers) {
      scene_->compute(7, number);
      (void)scene_->offer({number}, {7});
      scene_->drain();
    }
  };
  fill({50, 51, 52, 53, 54});
  EXPECT_GE(places_of(0).host, 0);
  EXPECT_GE(places_of(1).host, 0);
  EXPECT_NEAR(list(nullptr)[0].seconds_left, 60, 1);
  scene_->clock.advance(61s);
  EXPECT_FALSE(list(nullptr)[0].held);  // also where no step is taken
  residency_->advance(0);
  EXPECT_EQ(residency_->counts().held, 0u);
  fill({60, 61, 62, 63});
  EXPECT_EQ(places_of(0).host, -1);
}

TEST_F(ResidencyTest, APinIsClippedToTheBudgetAndATtlToItsMost) {
  open({.host_slots = 8}, {.index = {.tenant_share = 0.5}, .pin_share = 0.5, .most_ttl = 100s});
  compute(a_, {0, 1, 2});
  SessionAnswer done = finish(call({.verb = SessionVerb::kPin, .name = a_, .seconds = 60s}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kClipped, 2u));
  EXPECT_EQ(done.reason, "the budget of what sessions hold has room for 2 of 3 blocks");
  EXPECT_GE(places_of(0).host, 0);  // its beginning
  compute(b_, {4});
  EXPECT_EQ(finish(call({.verb = SessionVerb::kPin, .name = b_, .seconds = 1s})).blocks, 0u);  // the tenant's share
  const SessionName theirs{.tenant = "u", .id = "a"};
  compute(theirs, {5});
  done = finish(call({.verb = SessionVerb::kPin, .name = theirs, .seconds = 1000s}), "u");
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kClipped, 1u));
  EXPECT_EQ(done.reason, "the ttl is 100 s at most");
  EXPECT_NEAR(list(&theirs.tenant)[0].seconds_left, 100, 1);
  held_at_end_ = 3;
}

TEST_F(ResidencyTest, PinsWhoseBlocksHaveNotComeCountWithWhatTheyWereGranted) {
  open({.host_slots = 16}, {.index = {.tenant_share = 0.5}, .pin_share = 0.5});
  std::vector<SessionAnswer> begun;
  for (uint32_t i = 0; i < 5; ++i) {
    const SessionName name{.tenant = "t", .id = std::to_string(i)};
    compute(name, {i * 2, i * 2 + 1});
    begun.push_back(call({.verb = SessionVerb::kPin, .name = name, .seconds = 60s}));
  }
  uint64_t blocks = 0;
  for (const SessionAnswer& each : begun) blocks += finish(each).blocks;
  EXPECT_EQ(blocks, 4u);  // the tenant's budget
  EXPECT_EQ(residency_->counts().held, 4u);
  held_at_end_ = 4;
}

TEST_F(ResidencyTest, WhatAPinWasGrantedAndDidNotGetIsFreeForOthers) {
  open({.host_slots = 8}, {.index = {.tenant_share = 1}, .pin_share = 0.5});
  compute(a_, {0, 1, 2});
  device_->use(1);
  const SessionAnswer first = call({.verb = SessionVerb::kPin, .name = a_, .seconds = 60s});
  for (const uint32_t number : {1u, 2u}) (void)device_->evict(scene_->keys_of({number})[0]);
  known_.clear();
  const uint64_t got = finish(first).blocks;
  compute(b_, {4, 5, 6, 7});
  EXPECT_EQ(finish(call({.verb = SessionVerb::kPin, .name = b_, .seconds = 60s})).blocks, 4u - got);
  held_at_end_ = 4;
}

TEST_F(ResidencyTest, RetainedBlocksMakeRoomByPriority) {
  open({.host_slots = 4}, {.index = {.tenant_share = 1}, .pin_share = 1});
  compute(a_, {0, 1});
  compute(b_, {2, 3});
  (void)finish(call({.verb = SessionVerb::kRetain, .name = a_, .seconds = 60s, .priority = 5}));
  const SessionAnswer done = finish(call({.verb = SessionVerb::kRetain, .name = b_, .seconds = 60s, .priority = 1}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kAccepted, 2u));
  EXPECT_EQ(residency_->counts().held, 4u);
  scene_->compute(7, 50);
  (void)scene_->offer({50}, {7});
  scene_->drain();
  EXPECT_GE(places_of(50).host, 0);  // soft: others are not kept out
  EXPECT_GE(places_of(0).host, 0);
  EXPECT_EQ(residency_->counts().held, 2u);  // those of the higher priority
  held_at_end_ = 2;
}

TEST_F(ResidencyTest, APinHasRetainedBlocksOfOthersMakeRoomAndIsExtendedByNewBlocks) {
  open({.host_slots = 4}, {.index = {.tenant_share = 1}, .pin_share = 0.5});
  compute(a_, {0, 1});
  compute(b_, {2});
  (void)finish(call({.verb = SessionVerb::kRetain, .name = a_, .seconds = 60s}));
  EXPECT_EQ(finish(call({.verb = SessionVerb::kPin, .name = b_, .seconds = 60s})).blocks, 1u);
  EXPECT_EQ(residency_->counts().held, 1u);
  compute(b_, {2, 3});
  for (int step = 0; step < 50 && residency_->busy(); ++step) take_step();
  EXPECT_EQ(residency_->counts().held, 2u);
  EXPECT_EQ(finish(call({.name = b_, .to = StoreId::kHost})).freed, 2u);
  EXPECT_EQ(residency_->counts().held, 2u);  // it stays in host memory
  held_at_end_ = 2;
}

TEST_F(ResidencyTest, APinBeyondItsTenantsShareLeavesOtherTenantsWhatTheyRetain) {
  open({.host_slots = 8}, {.index = {.tenant_share = 0.5}, .pin_share = 1});
  const SessionName theirs{.tenant = "u", .id = "a"};
  compute(theirs, {0, 1});
  compute(b_, {2});
  compute(a_, {3, 4, 5, 6, 7});
  (void)finish(call({.verb = SessionVerb::kRetain, .name = theirs, .seconds = 60s}), "u");
  (void)finish(call({.verb = SessionVerb::kRetain, .name = b_, .seconds = 60s}));
  const SessionAnswer done = finish(call({.verb = SessionVerb::kPin, .name = a_, .seconds = 60s}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kClipped, 4u));
  EXPECT_EQ(list(&theirs.tenant)[0].held_blocks, 2u);
  EXPECT_EQ(residency_->counts().held, 6u);  // b_, of the same tenant, made room
  held_at_end_ = 6;
}

TEST_F(ResidencyTest, APrefetchThatIsLateIsClipped) {
  open({.disk_segments = 4, .segment_slots = 4});
  compute(a_, {0, 1, 2, 3, 4});
  (void)finish(call({.name = a_, .to = StoreId::kDisk}));
  const SessionAnswer begun = call({.verb = SessionVerb::kPrefetch, .name = a_, .seconds = 1s});
  scene_->clock.advance(2s);
  const SessionAnswer done = finish(begun);
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kClipped, 0u));
  EXPECT_EQ(done.reason, "the deadline has passed");
}

TEST_F(ResidencyTest, EvictionDropsWhatNoOtherSessionWantsAndForgetsTheSession) {
  open({.disk_segments = 4, .segment_slots = 4}, {.index = {.tenant_share = 1}, .pin_share = 1});
  compute(a_, {0, 1});
  compute(b_, {0, 2});
  (void)finish(call({.verb = SessionVerb::kPin, .name = a_, .seconds = 60s}));
  const SessionAnswer done = call({.verb = SessionVerb::kEvict, .name = a_, .action = "e"});
  EXPECT_EQ(std::tuple(done.outcome, done.blocks, done.freed, done.kept),
            std::tuple(SessionOutcome::kAccepted, 1u, 1u, 1u));
  const ResidencyCounts counts = residency_->counts();
  const auto& counted = counts.blocks[static_cast<size_t>(SessionVerb::kEvict)];
  EXPECT_EQ(counted[static_cast<size_t>(Residence::kDevice)], 1u);
  EXPECT_EQ(counted[static_cast<size_t>(Residence::kHost)], 1u);
  EXPECT_FALSE(is_somewhere(1));
  EXPECT_TRUE(is_somewhere(0));
  EXPECT_TRUE(call({.verb = SessionVerb::kEvict, .name = a_, .action = "e"}).repeated);
  EXPECT_EQ(call({.verb = SessionVerb::kEvict, .name = a_}).outcome, SessionOutcome::kMissing);
}

TEST_F(ResidencyTest, AnEvictionIsDeferredWhileBlocksOfTheSessionAreCopied) {
  open({.host_slots = 4}, {.index = {.tenant_share = 1}, .pin_share = 1});
  compute(a_, {0, 1});
  (void)scene_->offer({0, 1}, {0, 1});
  scene_->send();
  const SessionAnswer early = call({.verb = SessionVerb::kEvict, .name = a_});
  EXPECT_EQ(early.outcome, SessionOutcome::kDeferred);
  EXPECT_EQ(early.reason, "blocks of the session are being copied");
  scene_->drain();
  known_.clear();
  EXPECT_EQ(call({.verb = SessionVerb::kEvict, .name = a_}).outcome, SessionOutcome::kAccepted);
  for (const uint32_t number : {0u, 1u}) EXPECT_FALSE(is_somewhere(number)) << number;
}

TEST_F(ResidencyTest, NewWeightsForgetSessionsAndEndTheirActions) {
  open({.disk_segments = 4, .segment_slots = 4}, {.index = {.tenant_share = 1}, .pin_share = 1});
  compute(a_, {0, 1});
  (void)finish(call({.verb = SessionVerb::kPin, .name = a_, .seconds = 60s}));
  const SessionAnswer begun = call({.name = a_, .to = StoreId::kDisk});
  EXPECT_SUCCEEDS(scene_->scheduler->reset());
  residency_->reset();
  known_.clear();
  EXPECT_FALSE(residency_->busy());
  EXPECT_EQ(value_of(residency_->answer("t", begun.action)).outcome, SessionOutcome::kRejected);
  EXPECT_EQ(call({.name = a_}).outcome, SessionOutcome::kMissing);
}

TEST_F(ResidencyTest, ADemotionToHostMemoryCountsNoBlockThatOnlyTheSharedStoreHas) {
  open({.remote_slots = 8, .remote = &shared_});
  compute(a_, {0, 1});
  (void)finish(call({.name = a_, .to = StoreId::kRemote}));
  SessionAnswer done = finish(call({.name = a_, .to = StoreId::kHost}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks, done.freed), std::tuple(SessionOutcome::kAccepted, 0u, 0u));
  EXPECT_EQ(list(nullptr)[0].residence, Residence::kRemote);
  EXPECT_EQ(places_of(0).host, -1);  // a demotion brings nothing nearer
  compute(a_, {0, 1, 2});            // on the device again, and 0 and 1 in the store
  done = finish(call({.name = a_, .to = StoreId::kHost}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks, done.freed), std::tuple(SessionOutcome::kAccepted, 3u, 3u));
  for (const uint32_t number : {0, 1, 2}) EXPECT_GE(places_of(number).host, 0);
}

TEST_F(ResidencyTest, AListInPagesHasEachSessionOnceAndCountsAllOfIt) {
  open({.host_slots = 8});
  compute(a_, {0, 1, 2, 3});
  compute(a_, {0, 1, 4});  // a branch
  compute(b_, {5});
  const SessionName theirs{.tenant = "u", .id = "a"};
  compute(theirs, {6, 7});
  (void)finish(call({.name = b_}));
  const auto numbers = [](const std::vector<SessionView>& views) {
    std::vector<std::tuple<std::string, std::string, uint64_t, uint64_t, uint64_t>> found;
    for (const SessionView& each : views)
      found.emplace_back(each.name.tenant, each.name.id, each.blocks, each.device, each.host);
    return found;
  };
  const auto whole = numbers(list(nullptr));
  EXPECT_EQ(whole, (decltype(whole){{"t", "b", 1, 0, 1}, {"u", "a", 2, 2, 0}, {"t", "a", 5, 5, 0}}));
  for (const size_t most : {1, 2, 3, 4, 5, 6}) EXPECT_EQ(numbers(list(nullptr, most)), whole) << most;
  EXPECT_EQ(numbers(list(&theirs.tenant, 1)), (decltype(whole){{"u", "a", 2, 2, 0}}));
  EXPECT_EQ(residency_->list(nullptr, {}, 3).views.size(), 0u);  // a page looks at so many blocks
  EXPECT_EQ(residency_->tenants_of("a"), (std::vector<std::string>{"t", "u"}));
  EXPECT_EQ(residency_->tenants_of("c"), std::vector<std::string>{});
}

TEST_F(ResidencyTest, ASessionThatChangesWhileItIsListedIsCountedAnewAndAListEnds) {
  open({.host_slots = 8});
  compute(a_, {0, 1, 2});
  compute(b_, {5});
  SessionPage page = residency_->list(nullptr, {}, 2);
  ASSERT_TRUE(page.next && page.views.empty());
  compute(a_, {0, 1, 2, 3});
  page = residency_->list(nullptr, *page.next, 10);
  ASSERT_EQ(page.views.size(), 2u);
  EXPECT_EQ(page.views[0].blocks, 4u);
  page = residency_->list(nullptr, {}, 1);
  for (uint32_t number = 10; page.views.empty(); ++number) {  // it changes before each page
    ASSERT_LT(number, 10 + Residency::kMostBegun);
    compute(a_, {0, 1, 2, 3, number});
    page = residency_->list(nullptr, *page.next, 1);
  }
  EXPECT_EQ(page.views[0].name, a_);
  SessionPage gone = residency_->list(nullptr, {}, 1);
  EXPECT_EQ(call({.verb = SessionVerb::kEvict, .name = a_}).outcome, SessionOutcome::kAccepted);
  known_.clear();
  gone = residency_->list(nullptr, *gone.next, 10);
  ASSERT_EQ(gone.views.size(), 1u);
  EXPECT_EQ(gone.views[0].name, b_);
}

TEST_F(ResidencyTest, APrefetchToTheDeviceLoadsIntoFreeBlocksAndIsFoundThere) {
  open({.disk_segments = 4, .segment_slots = 4});
  compute(a_, {0, 1, 2});
  (void)finish(call({.name = a_, .to = StoreId::kDisk}));
  device_->give({9, 8, 7, 6, 5, 4});
  const SessionAnswer begun = call({.verb = SessionVerb::kPrefetch, .name = a_, .device = true});
  EXPECT_FALSE(begun.done);
  EXPECT_TRUE(residency_->is_loading(a_));
  EXPECT_FALSE(on_device(0));  // nothing is found before it is there
  const SessionAnswer done = finish(begun);
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kAccepted, 3u)) << done.reason;
  EXPECT_FALSE(residency_->is_loading(a_));
  const int32_t places[] = {9, 8, 7};
  for (const uint32_t number : {0, 1, 2}) {
    EXPECT_EQ(device_->find(scene_->keys_of({number})[0]), places[number]);
    EXPECT_TRUE(scene_->all_have(places[number], 100 + number));
    EXPECT_GE(scene_->scheduler->index().backing(places[number], scene_->device.version(places[number])).disk, 0);
  }
  EXPECT_EQ(device_->free(), (std::vector<int32_t>{6, 5, 4, 7, 8, 9}));  // its end goes first
  EXPECT_EQ(list(nullptr)[0].residence, Residence::kDevice);
  const ResidencyCounts counts = residency_->counts();
  EXPECT_EQ(counts.blocks[static_cast<size_t>(SessionVerb::kPrefetch)][static_cast<size_t>(Residence::kDevice)], 3u);
}

TEST_F(ResidencyTest, APrefetchToTheDeviceTakesAShareOfTheFreeBlocksAndNoneOfItsOwn) {
  open({.host_slots = 8}, {.prefetch_share = 0.5});
  compute(a_, {0, 1, 2, 3});
  (void)finish(call({.name = a_}));
  scene_->compute(0, 100);
  device_->enter_free(scene_->keys_of({0})[0], 0);  // the first block of the session is there, and would be taken first
  device_->give({9, 8, 7, 6});
  const SessionAnswer done = finish(call({.verb = SessionVerb::kPrefetch, .name = a_, .device = true}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kClipped, 3u));
  EXPECT_EQ(done.reason, "1 of 4 blocks are not on the device: the budget of free blocks has room for 2 of 3 blocks");
  EXPECT_TRUE(on_device(0) && on_device(1) && on_device(2) && !on_device(3));
  EXPECT_EQ(device_->free(), (std::vector<int32_t>{7, 6, 8, 9, 0}));
}

TEST_F(ResidencyTest, WithoutAFreeBlockNothingIsPrefetchedToTheDevice) {
  open({.host_slots = 8});
  compute(a_, {0, 1});
  (void)finish(call({.name = a_}));
  const SessionAnswer done = finish(call({.verb = SessionVerb::kPrefetch, .name = a_, .device = true}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kClipped, 0u));
  EXPECT_NE(done.reason.find("room for 0 of 2 blocks"), std::string::npos) << done.reason;
  EXPECT_EQ(list(nullptr)[0].residence, Residence::kHost);
}

TEST_F(ResidencyTest, WhatTheEngineRefusesIsNotOnTheDeviceAndItsBlocksAreFreeAgain) {
  open({.host_slots = 8});
  compute(a_, {0, 1});
  (void)finish(call({.name = a_}));
  device_->give({9, 8, 7, 6});
  device_->refuse();
  const SessionAnswer done = finish(call({.verb = SessionVerb::kPrefetch, .name = a_, .device = true}));
  EXPECT_EQ(std::tuple(done.outcome, done.blocks), std::tuple(SessionOutcome::kClipped, 0u));
  EXPECT_EQ(device_->free().size(), 4u);
  EXPECT_GE(places_of(0).host, 0);
}

TEST_F(ResidencyTest, NewWeightsDuringAPrefetchToTheDeviceLeaveNothingThere) {
  open({.host_slots = 8});
  compute(a_, {0, 1});
  (void)finish(call({.name = a_}));
  device_->give({9, 8, 7, 6});
  const SessionAnswer begun = call({.verb = SessionVerb::kPrefetch, .name = a_, .device = true});
  scene_->send();
  const BlockKey old = scene_->keys_of({0})[0];
  EXPECT_SUCCEEDS(scene_->scheduler->reset());
  residency_->reset();
  known_.clear();
  EXPECT_EQ(device_->free().size(), 2u);  // a copy may still write into the others
  EXPECT_EQ(finish(begun).outcome, SessionOutcome::kRejected);
  for (size_t rank = 0; rank < scene_->ranks.size(); ++rank)
    EXPECT_SUCCEEDS(scene_->scheduler->apply(scene_->report_of(rank)));
  for (const EndedLoad& load : scene_->scheduler->take_loads()) EXPECT_TRUE(residency_->loaded(load));
  EXPECT_EQ(device_->free().size(), 4u);
  EXPECT_LT(device_->find(old), 0);
  EXPECT_LT(device_->find(scene_->keys_of({0})[0]), 0);
}

TEST_F(ResidencyTest, AnEngineThatCannotLoadForNobodySaysWhy) {
  open({.host_slots = 8}, {.no_device = "the KV cache has several groups"});
  compute(a_, {0});
  const SessionAnswer refused = call({.verb = SessionVerb::kPrefetch, .name = a_, .device = true});
  EXPECT_EQ(refused.outcome, SessionOutcome::kRejected);
  EXPECT_EQ(refused.reason, "nothing is loaded to the device: the KV cache has several groups");
  EXPECT_FAILS(residency_->call({.name = a_, .device = true}, 0), Code::kInvalidArgument, "no prefetch");
}

TEST_F(ResidencyTest, AnIdleSessionIsDemotedByItselfAndAUseBeginsTheTimeAnew) {
  open({.disk_segments = 4, .segment_slots = 4}, {.idle = 10s, .idle_to = StoreId::kDisk});
  compute(a_, {0, 1});
  compute(b_, {2});
  scene_->clock.advance(9s);
  EXPECT_FALSE(residency_->is_due() || residency_->busy());
  residency_->begin(a_);  // it comes back
  scene_->clock.advance(5s);
  EXPECT_TRUE(residency_->is_due() && residency_->busy());
  for (int step = 0; step < 200 && residency_->busy(); ++step) take_step();
  EXPECT_TRUE(on_device(0) && on_device(1) && !on_device(2));
  EXPECT_GE(places_of(2).disk, 0);
  EXPECT_EQ(residency_->counts().idle, 1u);
  scene_->clock.advance(100s);
  EXPECT_FALSE(residency_->is_due());  // a request of it runs, and the other one is demoted
  residency_->finished(a_, {}, 0);     // it has computed nothing
  scene_->clock.advance(9s);
  EXPECT_EQ(finish(call({.verb = SessionVerb::kPrefetch, .name = a_})).outcome, SessionOutcome::kAccepted);
  scene_->clock.advance(9s);
  EXPECT_FALSE(residency_->is_due());
  scene_->clock.advance(1s);
  for (int step = 0; step < 200 && residency_->busy(); ++step) take_step();
  EXPECT_FALSE(on_device(0) || on_device(1));
  EXPECT_EQ(list(nullptr)[0].residence, Residence::kDisk);
  EXPECT_EQ(residency_->counts().idle, 2u);
  EXPECT_EQ(finish(call({.verb = SessionVerb::kPrefetch, .name = a_})).outcome, SessionOutcome::kAccepted);
  EXPECT_GE(places_of(0).host, 0);
  scene_->clock.advance(10s);  // nobody came for what was brought back
  for (int step = 0; step < 200 && residency_->busy(); ++step) take_step();
  EXPECT_LT(places_of(0).host, 0);
  EXPECT_EQ(residency_->counts().idle, 3u);
  scene_->clock.advance(100s);
  EXPECT_FALSE(residency_->is_due());
}

TEST_F(ResidencyTest, ASessionThatComesBackDuringItsOwnDemotionKeepsItsBlocks) {
  open({.host_slots = 8}, {.idle = 10s});
  compute(a_, {0, 1});
  scene_->clock.advance(10s);
  residency_->advance(0);
  EXPECT_EQ(residency_->counts().idle, 1u);
  residency_->begin(a_);
  for (int step = 0; step < 200 && residency_->busy(); ++step) take_step();
  EXPECT_TRUE(on_device(0) && on_device(1));
  residency_->finished(a_, {}, 0);
}

TEST_F(ResidencyTest, APinOutlivesTheDemotionOfAnIdleSession) {
  open({.disk_segments = 4, .segment_slots = 4},
       {.index = {.tenant_share = 1}, .pin_share = 1, .idle = 10s, .idle_to = StoreId::kDisk});
  compute(a_, {0, 1});
  EXPECT_EQ(finish(call({.verb = SessionVerb::kPin, .name = a_, .seconds = 60s})).blocks, 2u);
  scene_->clock.advance(10s);
  for (int step = 0; step < 200 && residency_->busy(); ++step) take_step();
  EXPECT_FALSE(on_device(0) || on_device(1));
  EXPECT_GE(places_of(0).host, 0);
  EXPECT_EQ(residency_->counts().held, 2u);
  scene_->clock.advance(49s);
  EXPECT_FALSE(residency_->is_due());
  scene_->clock.advance(1s);  // its end
  for (int step = 0; step < 200 && residency_->busy(); ++step) take_step();
  EXPECT_LT(places_of(0).host, 0);
  EXPECT_GE(places_of(0).disk, 0);
  EXPECT_EQ(list(nullptr)[0].residence, Residence::kDisk);
}

TEST_F(ResidencyTest, ASessionThatIsForgottenIsNoMoreDemoted) {
  open({.host_slots = 8}, {.index = {.sessions = 2, .tenant_share = 1}, .idle = 10s});
  for (const char* const id : {"a", "b", "c"}) compute({.tenant = "t", .id = id}, {0});
  EXPECT_SUCCEEDS(residency_->check());
  EXPECT_EQ(call({.verb = SessionVerb::kEvict, .name = b_}).outcome, SessionOutcome::kAccepted);
  EXPECT_SUCCEEDS(residency_->check());
  scene_->clock.advance(10s);
  for (int step = 0; step < 200 && residency_->busy(); ++step) take_step();
  EXPECT_EQ(residency_->counts().idle, 1u);
  residency_->reset();
  EXPECT_FAILS(Residency::create({.idle = 1s, .idle_to = StoreId::kDisk}, *scene_->scheduler, *device_, scene_->clock),
               Code::kInvalidArgument, "demoted to disk");
}

}  // namespace
}  // namespace torpor
