// SPDX-License-Identifier: Apache-2.0
// The contract of stores over a scripted Mooncake, and all that the real one answers rarely. Against a real master,
// killed: tests/python/test_connector_mooncake.py.
#include "remote/mooncake_store.h"

#include "remote/mooncake_settings.h"
#include "tests/contract/store_contract.h"
#include "tests/support/manual_clock.h"

namespace torpor {
namespace {

using namespace std::chrono_literals;
using namespace test;
using remote::MooncakeAnswers;
using remote::MooncakeClient;
using remote::MooncakeStore;
using remote::MooncakeStoreOptions;
using remote::MooncakeValue;

// A store in memory that answers as it is told to.
class FakeMooncake final : public MooncakeClient {
 public:
  using Values = std::span<const MooncakeValue>;
  Status use(std::span<std::byte> memory) override {
    const MutexLock lock(mutex_);
    ++used_;
    return memory.empty() ? Status(Error{.code = Code::kInvalidArgument, .what = "no memory"}) : ok();
  }
  MooncakeAnswers put(Values values) override {
    return each("put", values, [this](const MooncakeValue& value) {
      if (!phantom_) values_.try_emplace(value.key, value.bytes.begin(), value.bytes.end());
      return int64_t{0};
    });
  }
  MooncakeAnswers get(Values values) override {
    return each("get", values, [this](const MooncakeValue& value) {
      const auto found = values_.find(value.key);
      if (found == values_.end()) return remote::mooncake::kNotThere;
      if (found->second.size() > value.bytes.size()) return remote::mooncake::kTooSmall;
      std::copy(found->second.begin(), found->second.end(), value.bytes.begin());
      return static_cast<int64_t>(found->second.size());
    });
  }
  MooncakeAnswers exist(Values values) override {
    return each("exist", values,
                [this](const MooncakeValue& value) { return int64_t{values_.contains(value.key) ? 1 : 0}; });
  }
  MooncakeAnswers remove(Values values, bool force) override {
    return each("remove", values, [&](const MooncakeValue& value) {
      if (!force) return remote::mooncake::kLeased;  // whatever was read a moment ago
      return values_.erase(value.key) == 1 ? int64_t{0} : remote::mooncake::kNotThere;
    });
  }

  // From now on this call answers so for each key; 0: as it should.
  void say(const std::string& call, int64_t answer) {
    const MutexLock lock(mutex_);
    said_[call] = answer;
  }
  void phantom(bool on) {
    const MutexLock lock(mutex_);
    phantom_ = on;
  }
  void short_of_one(bool on) {
    const MutexLock lock(mutex_);
    short_ = on;
  }
  void raise(bool on) {
    const MutexLock lock(mutex_);
    raises_ = on;
  }
  void hang(bool on) {
    const MutexLock lock(mutex_);
    hangs_ = on;
    changed_.notify_all();
  }
  int calls(const std::string& call) {
    const MutexLock lock(mutex_);
    return calls_[call];
  }
  int used() {
    const MutexLock lock(mutex_);
    return used_;
  }
  std::map<std::string, std::vector<std::byte>> values() {
    const MutexLock lock(mutex_);
    return values_;
  }
  void set(const std::string& key, std::vector<std::byte> value) {
    const MutexLock lock(mutex_);
    values_[key] = std::move(value);
  }
  void forget() {
    const MutexLock lock(mutex_);
    values_.clear();
  }

 private:
  template <class Function>
  MooncakeAnswers each(const std::string& call, Values values, const Function& function) {
    MutexLock lock(mutex_);
    ++calls_[call];
    while (hangs_) changed_.wait(mutex_);
    if (raises_) return Error{.code = Code::kInternal, .what = "the Python object raised"};
    std::vector<int64_t> answers;
    for (const MooncakeValue& value : values) answers.push_back(said_[call] != 0 ? said_[call] : function(value));
    if (short_) answers.pop_back();
    return answers;
  }

  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::vector<std::byte>> values_;
  std::map<std::string, int64_t> said_;
  std::map<std::string, int> calls_;
  int used_ = 0;
  bool phantom_ = false;
  bool short_ = false;
  bool raises_ = false;
  bool hangs_ = false;
};

MooncakeStoreOptions options_for() {
  return {.slots = 1000,
          .record_bytes = kContractRecord,
          .timeout = 20s,  // nothing here takes that long
          .breaker = {.failures = 1, .first_pause = 1s, .longest_pause = 4s}};
}

class MooncakeWorld final : public StoreWorld {
 public:
  explicit MooncakeWorld(std::shared_ptr<const Key> key = nullptr, bool encrypt = false, Codec codec = Codec::kNone) {
    MooncakeStoreOptions options = options_for();
    options.compression = {.codec = codec};
    options.key = std::move(key);
    options.encrypt = encrypt;
    store_ = value_of(MooncakeStore::open(
        options, [fake = fake_] { return fake; }, clock_));
    store_->open_space(1, {});
  }
  SlotStore& store() override { return *store_; }
  StoreSlot beyond() override { return 1000; }
  bool fail(bool failing) override {
    for (const char* call : {"put", "get", "exist", "remove"})
      fake_->say(call, failing ? remote::mooncake::kNoMaster : 0);
    if (!failing) clock_.advance(1s);
    return true;
  }

 private:
  const std::shared_ptr<FakeMooncake> fake_ = std::make_shared<FakeMooncake>();
  ManualClock clock_;
  std::unique_ptr<MooncakeStore> store_;
};

INSTANTIATE_TEST_SUITE_P(
    Mooncake, StoreContract,
    ::testing::Values(StoreWay{"Mooncake", [] { return std::make_unique<MooncakeWorld>(); }},
                      StoreWay{"MooncakeEncryptedZstd",
                               [] { return std::make_unique<MooncakeWorld>(a_key(7), true, Codec::kZstd); }}),
    [](const auto& info) { return info.param.name; });

class MooncakeStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<MooncakeStore> make(MooncakeStoreOptions options = options_for()) {
    auto made = value_of(MooncakeStore::open(
        options, [fake = fake_] { return fake; }, clock_));
    made->open_space(1, digest_of({}));
    return made;
  }
  static Status get(SlotStore& store, uint64_t seed) {
    std::vector<std::byte> room(kContractRecord);
    StorePart part{.slot = 0, .key = some_key(seed), .bytes = room};
    test::get(store, {&part, 1});
    if (part.status) {
      EXPECT_EQ(room, some_bytes(seed, kContractRecord));
    }
    return part.status;
  }
  static Status find(SlotStore& store, uint64_t seed) {
    StorePart part{.slot = 0, .key = some_key(seed)};
    test::find(store, {&part, 1});
    return part.status;
  }

  const std::shared_ptr<FakeMooncake> fake_ = std::make_shared<FakeMooncake>();
  ManualClock clock_;
};

TEST_F(MooncakeStoreTest, WhatOnePutAnotherFindsAndItIsNotSentAgain) {
  ASSERT_SUCCEEDS(put_one(*make(), 0, 5));
  const auto other = make();
  EXPECT_SUCCEEDS(find(*other, 5));
  EXPECT_SUCCEEDS(get(*other, 5));
  ASSERT_SUCCEEDS(put_one(*other, 0, 5));
  EXPECT_EQ(fake_->calls("put"), 1);
  MooncakeStoreOptions second_rank = options_for();
  second_rank.rank = 1;
  EXPECT_FAILS(find(*make(second_rank), 5), Code::kNotFound);
}

TEST_F(MooncakeStoreTest, AZeroFromPutProvesNothing) {
  const auto store = make();
  fake_->phantom(true);
  EXPECT_FAILS(put_one(*store, 0, 5), Code::kUnavailable, "does not have it");
  EXPECT_EQ(store->health().write_errors, 1u);
  EXPECT_EQ(store->health().put_bytes, 0u);
  EXPECT_TRUE(store->accepting());  // it answers
  fake_->phantom(false);
  EXPECT_SUCCEEDS(put_one(*store, 0, 5));
  EXPECT_EQ(fake_->calls("exist"), 4);
}

TEST_F(MooncakeStoreTest, EachOfItsErrorsIsWhatItIs) {
  struct Case {
    const char* call;
    int64_t answer;
    Code code;
    bool accepting;
  };
  using namespace remote::mooncake;
  for (const Case& each :
       {Case{"get", kNotThere, Code::kNotFound, true}, Case{"get", kNotReady, Code::kNotFound, true},
        Case{"get", kTransferFailed, Code::kUnavailable, false}, Case{"get", kNoMaster, Code::kUnavailable, false},
        Case{"get", -1, Code::kUnavailable, false}, Case{"get", -12345, Code::kUnavailable, true},
        Case{"exist", kNoMaster, Code::kUnavailable, false}, Case{"exist", -1, Code::kUnavailable, false},
        Case{"put", kTransferFailed, Code::kUnavailable, true},  // asked before, it answered
        Case{"put", kLeased, Code::kUnavailable, true}}) {
    fake_->forget();
    const auto store = make();
    ASSERT_SUCCEEDS(put_one(*store, 0, 5));
    fake_->say(each.call, each.answer);
    const Status status = each.call == std::string("get")     ? get(*store, 5)
                          : each.call == std::string("exist") ? find(*store, 5)
                                                              : put_one(*store, 1, 6);
    EXPECT_FAILS(status, each.code) << each.call << each.answer;
    if (each.call != std::string("put")) {
      EXPECT_EQ(store->accepting(), each.accepting) << each.call << each.answer;
    }
    fake_->say(each.call, 0);
  }
}

TEST_F(MooncakeStoreTest, AFullOneGetsNothingForASecond) {
  const auto store = make();
  fake_->say("put", remote::mooncake::kNoRoom);
  EXPECT_FAILS(put_one(*store, 0, 5), Code::kResourceExhausted);
  fake_->say("put", 0);
  EXPECT_FAILS(put_one(*store, 0, 5), Code::kResourceExhausted);
  EXPECT_EQ(fake_->calls("put"), 1);
  clock_.advance(1s);
  EXPECT_SUCCEEDS(put_one(*store, 0, 5));
}

TEST_F(MooncakeStoreTest, WhateverIsThereInsteadIsAMissAndIsRemovedThoughItIsLeased) {
  const auto store = make();
  ASSERT_SUCCEEDS(put_one(*store, 0, 5));
  const auto [key, good] = *fake_->values().begin();
  std::vector<std::vector<std::byte>> bad = {{}, {good.begin(), good.begin() + 3}, {good.begin(), good.end() - 1}};
  bad.emplace_back(good).push_back(std::byte{1});
  for (size_t at = 0; at < good.size(); at += at < remote::kFrameBytes ? 7 : 997)
    bad.emplace_back(good)[at] ^= std::byte{1};
  for (const std::vector<std::byte>& each : bad) {
    fake_->set(key, each);
    EXPECT_FAILS(get(*store, 5), Code::kCorruption);
    EXPECT_TRUE(fake_->values().empty());
  }
  ASSERT_SUCCEEDS(put_one(*store, 0, 5));
  EXPECT_SUCCEEDS(get(*store, 5));
}

TEST_F(MooncakeStoreTest, WhatWasLostWithTheMasterIsAMiss) {
  const auto store = make();
  ASSERT_SUCCEEDS(put_one(*store, 0, 5));
  fake_->forget();
  EXPECT_FAILS(get(*store, 5), Code::kNotFound);
  EXPECT_FAILS(find(*store, 5), Code::kNotFound);
  EXPECT_EQ(store->health().read_errors, 0u);
  EXPECT_SUCCEEDS(put_one(*store, 0, 5));
  EXPECT_SUCCEEDS(get(*store, 5));
}

TEST_F(MooncakeStoreTest, TooFewAnswersAndRaisedErrorsAreFailures) {
  const auto store = make();
  fake_->short_of_one(true);
  EXPECT_FAILS(find(*store, 5), Code::kUnavailable, "answers 0");
  EXPECT_FALSE(store->accepting());
  fake_->short_of_one(false);
  clock_.advance(1s);
  fake_->raise(true);
  EXPECT_FAILS(put_one(*store, 0, 5), Code::kInternal, "raised");
  EXPECT_FALSE(store->accepting());
  clock_.advance(2s);
  fake_->raise(false);
  EXPECT_SUCCEEDS(put_one(*store, 0, 5));
  EXPECT_TRUE(store->accepting());
}

// A call that hangs has nothing of the caller's; while all threads hang nobody waits.
TEST_F(MooncakeStoreTest, OneThatHangsIsLeftAfterItsTimeAndNotAskedForAWhile) {
  MooncakeStoreOptions options = options_for();
  options.timeout = 50ms;
  options.threads = 2;
  options.breaker.failures = 3;
  const auto store = make(options);
  fake_->hang(true);
  EXPECT_FAILS(get(*store, 5), Code::kTimeout);
  EXPECT_FAILS(put_one(*store, 0, 5), Code::kTimeout);
  EXPECT_TRUE(store->accepting());
  EXPECT_FAILS(find(*store, 5), Code::kUnavailable, "earlier calls");
  EXPECT_FALSE(store->accepting());
  const int asked = fake_->calls("exist");
  EXPECT_FAILS(find(*store, 5), Code::kUnavailable, "not asked");
  EXPECT_EQ(fake_->calls("exist"), asked);
  fake_->hang(false);
  clock_.advance(1s);
  EXPECT_TRUE(store->accepting());
}

TEST_F(MooncakeStoreTest, AClientIsMadeOnceAndAgainAfterAFailure) {
  std::atomic<int> tries = 0;
  MooncakeStoreOptions options = options_for();
  options.threads = 2;
  const auto store = value_of(MooncakeStore::open(
      options,
      [&, fake = fake_]() -> Result<std::shared_ptr<MooncakeClient>> {
        if (++tries == 1) return Error{.code = Code::kUnavailable, .what = "nobody is there"};
        return fake;
      },
      clock_));
  store->open_space(1, {});
  EXPECT_EQ(tries, 0);
  EXPECT_FAILS(find(*store, 5), Code::kUnavailable, "nobody is there");
  EXPECT_FALSE(store->accepting());
  clock_.advance(1s);
  EXPECT_FAILS(find(*store, 5), Code::kNotFound);
  EXPECT_FAILS(find(*store, 5), Code::kNotFound);
  EXPECT_EQ(tries, 2);
  EXPECT_EQ(fake_->used(), 1);
}

TEST_F(MooncakeStoreTest, BatchesLargerThanItsMemoryGoInPieces) {
  MooncakeStoreOptions options = options_for();
  options.record_bytes = 3 * kMiB;
  const auto store = make(options);
  std::vector<std::vector<std::byte>> bytes;
  std::vector<StorePart> parts;
  for (uint64_t seed = 0; seed < 5; ++seed) bytes.push_back(some_bytes(seed, 3 * kMiB));
  for (uint64_t seed = 0; seed < 5; ++seed) parts.push_back(part_of(static_cast<StoreSlot>(seed), seed, bytes[seed]));
  test::put(*store, parts);
  for (const StorePart& part : parts) EXPECT_SUCCEEDS(part.status);
  EXPECT_EQ(fake_->calls("put"), 3);
  for (uint64_t seed = 0; seed < 5; ++seed)
    EXPECT_TRUE(value_of(has_one(*store, static_cast<StoreSlot>(seed), seed, 3 * kMiB)));
}

TEST(MooncakeSettingsTest, AUrlSaysItAll) {
  const auto settings = value_of(
      remote::mooncake_settings("mooncake://kv.example:50051/team-a?protocol=rdma&devices=mlx5_0&local=h1&segment=64"));
  EXPECT_EQ(settings.host, "kv.example");
  EXPECT_EQ(settings.port, 50051);
  EXPECT_EQ(settings.name, "team-a");
  EXPECT_EQ(settings.protocol, "rdma");
  EXPECT_EQ(settings.devices, "mlx5_0");
  EXPECT_EQ(settings.local, "h1");
  EXPECT_EQ(settings.segment, 64u);
  EXPECT_EQ(settings.metadata, "P2PHANDSHAKE");
  for (const char* url :
       {"redis://h:1", "mooncake://", "mooncake://h", "mooncake://h:0", "mooncake://h:x", "mooncake://h:1/a b",
        "mooncake://u@h:1", "mooncake://h:1?what=1", "mooncake://h:1?segment=1G", "mooncake://h:1?protocol="}) {
    EXPECT_FAILS(remote::mooncake_settings(url), Code::kInvalidArgument) << url;
  }
}

}  // namespace
}  // namespace torpor
