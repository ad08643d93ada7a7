// SPDX-License-Identifier: Apache-2.0
// KV blocks on a real cluster of three Redis servers: slots on their way, and a node that is killed or stands still.
#include "remote/resp_store.h"
#include "tests/contract/store_world.h"
#include "tests/remote/redis_cluster.h"
#include "tests/support/manual_clock.h"

namespace torpor {
namespace {

using namespace std::chrono_literals;
using namespace test;
using remote::RespStore;
using remote::RespStoreOptions;
using ::testing::HasSubstr;

class RespCluster : public ::testing::Test {
 protected:
  static constexpr size_t kBlocks = 48;

  static void SetUpTestSuite() { cluster_ = std::make_unique<RedisCluster>(); }
  static void TearDownTestSuite() { cluster_.reset(); }

  RespCluster() {
    for (size_t seed = 0; seed < kBlocks; ++seed) bytes_.push_back(some_bytes(seed, 4096));
  }
  std::unique_ptr<RespStore> make(size_t asked_first = 0, std::chrono::milliseconds timeout = 20s) {
    auto made = value_of(RespStore::open({.url = cluster_->node(asked_first).url(),
                                          .slots = 1000,
                                          .record_bytes = 4096,
                                          .timeout = timeout,
                                          .attempts = 2,
                                          .breaker = {.failures = 2, .first_pause = 1s, .longest_pause = 4s}},
                                         clock_));
    made->open_space(1, space_);
    return made;
  }
  std::vector<StorePart> parts() {
    std::vector<StorePart> all;
    for (size_t seed = 0; seed < kBlocks; ++seed)
      all.push_back(part_of(static_cast<StoreSlot>(seed), seed, bytes_[seed]));
    return all;
  }
  std::string key_of(size_t seed) const { return remote::block_key_text("", space_, 0, some_key(seed)); }
  size_t owner_of(size_t seed) const { return RedisCluster::owner_of(key_of(seed)); }
  void expect_all_there(RespStore& store) {
    std::vector<StorePart> all = parts();
    for (std::vector<std::byte>& each : bytes_) std::fill(each.begin(), each.end(), std::byte{0});
    get(store, all);
    for (size_t seed = 0; seed < kBlocks; ++seed) {
      EXPECT_SUCCEEDS(all[seed].status);
      EXPECT_EQ(bytes_[seed], some_bytes(seed, 4096)) << seed;
    }
  }
  // All but those of `without`; theirs is the error.
  void expect_others_there(RespStore& store, size_t without, Code code, const char* words) {
    std::vector<StorePart> all = parts();
    get(store, all);
    for (size_t seed = 0; seed < kBlocks; ++seed) {
      if (owner_of(seed) != without) {
        EXPECT_SUCCEEDS(all[seed].status);
      } else {
        EXPECT_FAILS(all[seed].status, code, words);
      }
    }
  }
  static Status get_one(RespStore& store, uint64_t seed) {
    std::vector<std::byte> room(4096);
    StorePart part{.slot = 0, .key = some_key(seed), .bytes = room};
    get(store, {&part, 1});
    return part.status;
  }
  void store_all() {
    std::vector<StorePart> all = parts();
    put(*make(), all);
    for (const StorePart& part : all) ASSERT_SUCCEEDS(part.status);
  }
  void TearDown() override {
    for (size_t i = 0; i < 3; ++i) cluster_->node(i).ask({"FLUSHALL"});
  }

  static inline std::unique_ptr<RedisCluster> cluster_;
  ManualClock clock_;
  Digest space_ = digest_of({});
  std::vector<std::vector<std::byte>> bytes_;
};

TEST_F(RespCluster, EachBlockIsOnItsNodeAndWhoeverIsAskedItIsFound) {
  store_all();
  for (size_t i = 0; i < 3; ++i) {
    size_t its = 0;
    for (size_t seed = 0; seed < kBlocks; ++seed) its += owner_of(seed) == i ? 1 : 0;
    EXPECT_GT(its, 0u);
    EXPECT_EQ(cluster_->node(i).ask({"DBSIZE"}), std::to_string(its));
    expect_all_there(*make(i));
  }
}

TEST_F(RespCluster, BlocksOfASlotThatIsOnItsWayAreFoundAndStored) {
  store_all();
  const auto store = make();
  expect_all_there(*store);
  size_t seed = 0;
  while (owner_of(seed) != 0) ++seed;
  const std::string key = key_of(seed);
  const std::string slot = std::to_string(remote::cluster_slot(key));
  RedisNode& from = cluster_->node(0);
  RedisNode& to = cluster_->node(1);
  const std::string from_id = from.id();
  const std::string to_id = to.id();
  ASSERT_EQ(to.ask({"CLUSTER", "SETSLOT", slot, "IMPORTING", from_id}), "OK");
  ASSERT_EQ(from.ask({"CLUSTER", "SETSLOT", slot, "MIGRATING", to_id}), "OK");
  ASSERT_EQ(from.ask({"MIGRATE", "127.0.0.1", std::to_string(to.port()), key, "0", "60000"}), "OK");
  from.ask({"CONFIG", "RESETSTAT"});
  expect_all_there(*store);
  EXPECT_THAT(from.ask({"INFO", "errorstats"}), HasSubstr("errorstat_ASK:"));

  // One that is there no more is stored where the slot goes.
  ASSERT_EQ(to.ask_all({{"ASKING"}, {"UNLINK", key}}), "1");
  EXPECT_FAILS(get_one(*make(), seed), Code::kNotFound);
  std::vector<StorePart> all = parts();
  put(*store, all);
  for (const StorePart& part : all) EXPECT_SUCCEEDS(part.status);
  EXPECT_EQ(to.ask_all({{"ASKING"}, {"EXISTS", key}}), "1");

  ASSERT_EQ(to.ask({"CLUSTER", "SETSLOT", slot, "NODE", to_id}), "OK");
  ASSERT_EQ(from.ask({"CLUSTER", "SETSLOT", slot, "NODE", to_id}), "OK");
  from.ask({"CONFIG", "RESETSTAT"});
  expect_all_there(*store);
  EXPECT_THAT(from.ask({"INFO", "errorstats"}), HasSubstr("errorstat_MOVED:count=1\r"));
  expect_all_there(*store);  // it remembers
  EXPECT_THAT(from.ask({"INFO", "errorstats"}), HasSubstr("errorstat_MOVED:count=1\r"));

  // Back again, for the other tests.
  ASSERT_EQ(from.ask({"CLUSTER", "SETSLOT", slot, "IMPORTING", to_id}), "OK");
  ASSERT_EQ(to.ask({"CLUSTER", "SETSLOT", slot, "MIGRATING", from_id}), "OK");
  ASSERT_EQ(to.ask({"MIGRATE", "127.0.0.1", std::to_string(from.port()), key, "0", "60000"}), "OK");
  ASSERT_EQ(from.ask({"CLUSTER", "SETSLOT", slot, "NODE", from_id}), "OK");
  ASSERT_EQ(to.ask({"CLUSTER", "SETSLOT", slot, "NODE", from_id}), "OK");
  expect_all_there(*store);
}

TEST_F(RespCluster, WhereOneNodeIsKilledTheOthersServeAndItComesBack) {
  store_all();
  const auto store = make();
  expect_all_there(*store);
  RedisNode& killed = cluster_->node(2);
  killed.end(SIGKILL);
  for (int i = 0; i < 2; ++i) expect_others_there(*store, 2, Code::kUnavailable, "");
  expect_others_there(*store, 2, Code::kUnavailable, "not asked for a while");
  EXPECT_TRUE(store->accepting());
  // Its blocks cannot be stored, those of the others can.
  std::vector<StorePart> all = parts();
  const auto fresh = make(1);
  put(*fresh, all);
  for (size_t seed = 0; seed < kBlocks; ++seed) EXPECT_EQ(all[seed].status.has_value(), owner_of(seed) != 2) << seed;

  killed.start();
  ASSERT_TRUE(killed.runs());
  cluster_->wait_until_whole();
  clock_.advance(1s);
  std::vector<StorePart> again = parts();
  get(*store, again);  // it kept nothing, and says so
  for (size_t seed = 0; seed < kBlocks; ++seed) {
    if (owner_of(seed) != 2) continue;
    EXPECT_FAILS(again[seed].status, Code::kNotFound);
  }
  store_all();
  expect_all_there(*store);
}

TEST_F(RespCluster, ANodeThatStandsStillTakesNotTheTimeOfTheOthers) {
  store_all();
  size_t first = 0;  // in the order in which they are asked
  for (size_t i = 1; i < 3; ++i) first = cluster_->node(i).address() < cluster_->node(first).address() ? i : first;
  const auto store = make((first + 1) % 3, 3s);
  expect_all_there(*store);
  cluster_->node(first).signal(SIGSTOP);
  expect_others_there(*store, first, Code::kTimeout, "");
  cluster_->node(first).signal(SIGCONT);
  expect_all_there(*store);
  EXPECT_TRUE(store->accepting());
}

TEST_F(RespCluster, WhereNoNodeAnswersNothingIsAsked) {
  RespStoreOptions options{.url = "redis://127.0.0.1:1,127.0.0.1:2", .slots = 1, .record_bytes = 4096, .attempts = 2};
  options.breaker.failures = 1;
  const auto store = value_of(RespStore::open(options, clock_));
  store->open_space(1, space_);
  EXPECT_TRUE(store->accepting());
  EXPECT_FAILS(get_one(*store, 1), Code::kUnavailable, "refused");
  EXPECT_FALSE(store->accepting());
  clock_.advance(1s);
  EXPECT_TRUE(store->accepting());
}

}  // namespace
}  // namespace torpor
