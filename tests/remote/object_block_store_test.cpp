// SPDX-License-Identifier: Apache-2.0
// The contract of stores over objects in memory, and what an object store does: other engines, restarts, objects that
// are damaged, cut or removed meanwhile, a store that is gone. Against a real S3 server: tests/python.
#include "remote/object_block_store.h"

#include <fmt/core.h>

#include "tests/contract/store_contract.h"
#include "tests/remote/store_in_memory.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/two_clocks.h"

namespace torpor {
namespace {

using namespace std::chrono_literals;
using namespace test;
using remote::ObjectBlockStore;
using remote::ObjectBlockStoreOptions;
using remote::PackEntry;
using remote::PackName;
using ::testing::HasSubstr;

// Objects that several engines have; a store of one engine's over them.
class Shared final : public remote::ObjectStore {
 public:
  Shared(StoreInMemory& objects, std::atomic<bool>& gone) : objects_(objects), gone_(gone) {}
  Result<bool> put_new(std::string_view key, std::span<const std::byte> bytes) override {
    if (gone_ || (refuses_put && refuses_put(key))) return no_answer();
    const Result<bool> put = objects_.put_new(key, bytes);
    if (after_put) std::exchange(after_put, {})();
    return put;
  }
  Result<uint64_t> get(std::string_view key, std::span<std::byte> room) override {
    if (gone_) return no_answer();
    return objects_.get(key, room);
  }
  Status get_range(std::string_view key, uint64_t offset, std::span<std::byte> room) override {
    if (gone_) return no_answer();
    return objects_.get_range(key, offset, room);
  }
  Result<std::optional<uint64_t>> size(std::string_view key) override {
    if (gone_) return no_answer();
    return objects_.size(key);
  }
  Status remove(std::string_view key) override {
    if (gone_) return no_answer();
    return objects_.remove(key);
  }
  Status each_key(std::string_view prefix, const std::function<bool(std::string_view key)>& visit) override {
    if (gone_) return no_answer();
    for (size_t i = 0; i < others; ++i) {
      if (!visit(fmt::format("{}others/{}", prefix, i))) return ok();
    }
    std::vector<std::string> keys;
    TORPOR_RETURN_IF_ERROR(objects_.each_key(prefix, [&](std::string_view key) {
      keys.emplace_back(key);
      return true;
    }));
    if (after_list) std::exchange(after_list, {})();
    for (const std::string& key : keys) {
      if (!visit(key)) break;
    }
    return ok();
  }
  Status check_exists() override { return objects_.check_exists(); }
  const std::string& url() const override { return objects_.url(); }

  std::function<void()> after_list;  // once, before its answer comes
  std::function<void()> after_put;   // likewise
  std::function<bool(std::string_view)> refuses_put;
  Code fails_with = Code::kUnavailable;
  size_t others = 0;  // keys of somebody else that each list has

 private:
  Error no_answer() const { return {.code = fails_with, .what = "no answer"}; }
  StoreInMemory& objects_;
  std::atomic<bool>& gone_;
};

ObjectBlockStoreOptions options_for(std::shared_ptr<const Key> key = nullptr, bool encrypt = false) {
  return {.slots = 1000,
          .record_bytes = kContractRecord,
          .key = std::move(key),
          .encrypt = encrypt,
          .timeout = 10min,  // nothing here takes that long
          .breaker = {.failures = 1, .first_pause = 1s, .longest_pause = 4s}};
}

class ObjectWorld final : public StoreWorld {
 public:
  ObjectWorld(std::shared_ptr<const Key> key, bool encrypt, Codec codec = Codec::kNone) {
    ObjectBlockStoreOptions options = options_for(std::move(key), encrypt);
    options.compression = {.codec = codec};
    store_ = value_of(ObjectBlockStore::open(std::make_unique<Shared>(objects_, gone_), options, clock_));
    store_->open_space(1, {});
  }
  SlotStore& store() override { return *store_; }
  StoreSlot beyond() override { return 1000; }
  bool fail(bool failing) override {
    gone_ = failing;
    // The background thread may be the one that asks at the end of a pause, and fail then.
    while (!failing && !store_->look()) clock_.advance(1s);
    return true;
  }

 private:
  TwoClocks clock_;
  StoreInMemory objects_;
  std::atomic<bool> gone_ = false;
  std::unique_ptr<ObjectBlockStore> store_;
};

INSTANTIATE_TEST_SUITE_P(
    Objects, StoreContract,
    ::testing::Values(StoreWay{"Plain", [] { return std::make_unique<ObjectWorld>(nullptr, false); }},
                      StoreWay{"Authenticated", [] { return std::make_unique<ObjectWorld>(a_key(7), false); }},
                      StoreWay{"EncryptedZstd",
                               [] { return std::make_unique<ObjectWorld>(a_key(7), true, Codec::kZstd); }}),
    [](const auto& info) { return info.param.name; });

class ObjectBlockStoreTest : public ::testing::Test {
 protected:
  // An engine that has looked: its background thread does nothing until a put or a miss wakes it.
  std::unique_ptr<ObjectBlockStore> engine(ObjectBlockStoreOptions options = options_for(), const Digest& space = {}) {
    auto made = value_of(ObjectBlockStore::open(std::make_unique<Shared>(objects_, gone_), options, clock_));
    made->open_space(1, space);
    (void)made->look();  // fails while the store is gone
    return made;
  }
  // Puts blocks of these seeds with one call.
  static void put_all(ObjectBlockStore& store, const std::vector<uint64_t>& seeds) {
    std::vector<std::vector<std::byte>> bytes;
    for (const uint64_t seed : seeds) bytes.push_back(some_bytes(seed, kContractRecord));
    std::vector<StorePart> parts;
    for (size_t i = 0; i < seeds.size(); ++i)
      parts.push_back(part_of(static_cast<StoreSlot>(seeds[i]), seeds[i], bytes[i]));
    put(store, parts);
    for (const StorePart& part : parts) ASSERT_SUCCEEDS(part.status);
  }
  // 'h': the block came byte for byte; '-': it is not there; '!': it is damaged; '?': no answer.
  static std::string get_all(ObjectBlockStore& store, const std::vector<uint64_t>& seeds) {
    std::vector<std::vector<std::byte>> bytes(seeds.size(), std::vector<std::byte>(kContractRecord));
    std::vector<StorePart> parts;
    for (size_t i = 0; i < seeds.size(); ++i)
      parts.push_back({.slot = static_cast<StoreSlot>(seeds[i]), .key = some_key(seeds[i]), .bytes = bytes[i]});
    get(store, parts);
    std::string text;
    for (size_t i = 0; i < seeds.size(); ++i) {
      EXPECT_TRUE(!parts[i].status || bytes[i] == some_bytes(seeds[i], kContractRecord)) << seeds[i];
      const Code code = parts[i].status ? Code::kInternal : parts[i].status.error().code;
      text += parts[i].status ? 'h' : code == Code::kNotFound ? '-' : code == Code::kCorruption ? '!' : '?';
    }
    return text;
  }
  static std::string find_all(ObjectBlockStore& store, const std::vector<uint64_t>& seeds) {
    std::vector<StorePart> parts;
    for (const uint64_t seed : seeds) parts.push_back({.slot = 0, .key = some_key(seed)});
    find(store, parts);
    std::string text;
    for (const StorePart& part : parts)
      text += part.status ? 'h' : part.status.error().code == Code::kNotFound ? '-' : '?';
    return text;
  }
  std::vector<std::string> keys_with(std::string_view part) {
    std::vector<std::string> keys;
    for (const auto& [key, bytes] : objects_.objects) {
      if (key.find(part) != std::string::npos) keys.push_back(key);
    }
    return keys;
  }

  TwoClocks clock_;
  StoreInMemory objects_;
  std::atomic<bool> gone_ = false;
};

TEST_F(ObjectBlockStoreTest, BlocksOfOneCallAreOneObjectAndAreReadWithOneRequest) {
  const auto one = engine();
  put_all(*one, {1, 2, 3, 4});
  ASSERT_EQ(objects_.objects.size(), 1u);
  EXPECT_THAT(objects_.objects.begin()->first, HasSubstr("/r0/packs/20270115T080000Z-"));
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {1, 2, 3, 4, 5}), "hhhh-");
  const uint64_t calls = objects_.calls;
  EXPECT_EQ(get_all(*other, {4, 2, 3, 1}), "hhhh");
  EXPECT_EQ(objects_.calls, calls + 1);
  EXPECT_EQ(get_all(*other, {1, 3}), "hh");  // not side by side
  EXPECT_EQ(objects_.calls, calls + 3);
}

TEST_F(ObjectBlockStoreTest, AnObjectHasItsPriceSoAPutGetsManyBlocks) {
  EXPECT_GE(engine()->traits().bytes_per_put, 16 * kMiB);
}

TEST_F(ObjectBlockStoreTest, WhatIsThereIsNotPutAgain) {
  const auto one = engine();
  put_all(*one, {1, 2});
  put_all(*one, {1, 2});
  EXPECT_EQ(objects_.objects.size(), 1u);
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {1}), "h");
  put_all(*other, {1, 2, 3});
  EXPECT_EQ(objects_.objects.size(), 2u);
  EXPECT_EQ(get_all(*other, {1, 2, 3}), "hhh");
}

TEST_F(ObjectBlockStoreTest, WhatAnotherEngineStoresLaterIsFoundWhenItIsTimeToLook) {
  const auto one = engine();
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {1}), "-");
  put_all(*one, {1, 2});
  EXPECT_EQ(find_all(*other, {1}), "-");  // not yet
  ASSERT_SUCCEEDS(other->look());
  EXPECT_EQ(find_all(*other, {1, 2}), "hh");
}

TEST_F(ObjectBlockStoreTest, APackThatIsPutWhileSomebodyLooksIsKept) {
  auto objects = std::make_unique<Shared>(objects_, gone_);
  Shared& shared = *objects;
  const auto one = value_of(ObjectBlockStore::open(std::move(objects), options_for(), clock_));
  one->open_space(1, {});
  EXPECT_EQ(find_all(*one, {1}), "-");  // it has looked
  shared.after_list = [&] { put_all(*one, {1}); };
  ASSERT_SUCCEEDS(one->look());
  EXPECT_EQ(get_all(*one, {1}), "h");
}

TEST_F(ObjectBlockStoreTest, APackThatALookFindsBeforeItsPutReturnsIsIndexedOnce) {
  auto objects = std::make_unique<Shared>(objects_, gone_);
  Shared& shared = *objects;
  const auto one = value_of(ObjectBlockStore::open(std::move(objects), options_for(), clock_));
  one->open_space(1, {});
  EXPECT_EQ(find_all(*one, {0}), "-");  // it has looked
  shared.after_put = [&] { EXPECT_SUCCEEDS(one->look()); };
  for (uint64_t seed = 0; seed < ObjectBlockStore::kPacksOfAnIndex; ++seed) put_all(*one, {seed});
  ASSERT_SUCCEEDS(one->look());
  ASSERT_EQ(keys_with("/index/").size(), 1u);
  const uint64_t before = objects_.ranged_bytes;
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {0, 63}), "hh");
  EXPECT_EQ(objects_.ranged_bytes, before);  // the index names all of them
}

TEST_F(ObjectBlockStoreTest, OtherWeightsRanksAndKeysNeverMeet) {
  put_all(*engine(), {1});
  EXPECT_EQ(find_all(*engine(options_for(), digest_of(std::as_bytes(std::span("other")))), {1}), "-");
  ObjectBlockStoreOptions rank = options_for();
  rank.rank = 1;
  EXPECT_EQ(find_all(*engine(rank), {1}), "-");
  EXPECT_EQ(find_all(*engine(options_for(a_key(7))), {1}), "-");
  EXPECT_EQ(find_all(*engine(), {1}), "h");
}

TEST_F(ObjectBlockStoreTest, NoMoreBlocksAreRememberedThanThereAreSlots) {
  {
    const auto one = engine();
    for (uint64_t seed = 0; seed < 60; seed += 2) {
      put_all(*one, {seed, seed + 1});
      clock_.advance(1s);
    }
  }
  ObjectBlockStoreOptions few = options_for();
  few.slots = 32;
  const auto other = engine(few);
  EXPECT_LE(other->known_blocks(), 32u);
  EXPECT_EQ(other->known_objects(), 30u);  // those that are forgotten are not read again
  EXPECT_EQ(find_all(*other, {0, 1, 58, 59}), "--hh");
  const uint64_t before = objects_.ranged_bytes;
  ASSERT_SUCCEEDS(other->look());
  EXPECT_EQ(objects_.ranged_bytes, before);
}

TEST_F(ObjectBlockStoreTest, AnEngineThatBeginsReadsAnIndexForMany) {
  {
    const auto one = engine();
    for (uint64_t seed = 0; seed < ObjectBlockStore::kPacksOfAnIndex + 3; ++seed) put_all(*one, {seed});
    ASSERT_SUCCEEDS(one->look());
  }
  ASSERT_EQ(keys_with("/index/").size(), 1u);
  const uint64_t before = objects_.ranged_bytes;
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {0, 40, 66}), "hhh");
  const uint64_t heads = objects_.ranged_bytes - before;
  EXPECT_EQ(heads, 3 * remote::pack_head_bytes(1));  // of those that the index does not name
  EXPECT_EQ(other->known_blocks(), 67u);
  EXPECT_EQ(get_all(*other, {0, 66}), "hh");
}

TEST_F(ObjectBlockStoreTest, PacksThatAnotherEngineHasIndexedAreNotIndexedAgain) {
  const auto other = engine();
  {
    const auto one = engine();
    for (uint64_t seed = 0; seed < 40; ++seed) put_all(*one, {seed});
    ASSERT_SUCCEEDS(other->look());  // reads their heads
    EXPECT_EQ(find_all(*other, {0, 39}), "hh");
    for (uint64_t seed = 40; seed < ObjectBlockStore::kPacksOfAnIndex; ++seed) put_all(*one, {seed});
    ASSERT_SUCCEEDS(one->look());
  }
  ASSERT_EQ(keys_with("/index/").size(), 1u);
  ASSERT_SUCCEEDS(other->look());
  for (uint64_t seed = 100; seed < 130; ++seed) put_all(*other, {seed});  // 70 with the first ones
  ASSERT_SUCCEEDS(other->look());
  EXPECT_EQ(find_all(*other, {0, 63, 129}), "hhh");
  EXPECT_EQ(keys_with("/index/").size(), 1u);
}

TEST_F(ObjectBlockStoreTest, PacksWhoseIndexTheStoreRefusedAreIndexedLater) {
  auto store = std::make_unique<Shared>(objects_, gone_);
  std::atomic<bool> refuses = true;
  store->refuses_put = [&](std::string_view key) { return refuses && key.find("/index/") != std::string_view::npos; };
  const auto one = value_of(ObjectBlockStore::open(std::move(store), options_for(), clock_));
  one->open_space(1, {});
  for (uint64_t seed = 0; seed < ObjectBlockStore::kPacksOfAnIndex; ++seed) put_all(*one, {seed});
  EXPECT_FAILS(one->look(), Code::kUnavailable);
  EXPECT_EQ(keys_with("/index/").size(), 0u);
  refuses = false;
  clock_.advance(5s);  // the breaker lets it pass
  ASSERT_SUCCEEDS(one->look());
  EXPECT_EQ(keys_with("/index/").size(), 1u);
  const uint64_t before = objects_.ranged_bytes;
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {0, 63}), "hh");
  EXPECT_EQ(objects_.ranged_bytes, before);  // the index names all of them
}

TEST_F(ObjectBlockStoreTest, WhatTheStoreNoLongerHasTakesNoMemory) {
  const auto one = engine();
  for (uint64_t seed = 0; seed < ObjectBlockStore::kPacksOfAnIndex; ++seed) put_all(*one, {seed});
  ASSERT_SUCCEEDS(one->look());
  EXPECT_EQ(one->known_objects(), ObjectBlockStore::kPacksOfAnIndex + 1);
  objects_.objects.clear();
  ASSERT_SUCCEEDS(one->look());
  EXPECT_EQ(one->known_objects(), 0u);
  EXPECT_EQ(one->known_blocks(), 0u);
  put_all(*one, {1});
  EXPECT_EQ(get_all(*one, {1, 2}), "h-");
}

TEST_F(ObjectBlockStoreTest, ALookThatANewNamespaceOvertakesLeavesNothingInMemory) {
  put_all(*engine(), {1, 2});
  auto store = std::make_unique<Shared>(objects_, gone_);
  std::unique_ptr<ObjectBlockStore> one;
  store->after_list = [&] { one->open_space(2, digest_of(std::as_bytes(std::span("other")))); };
  one = value_of(ObjectBlockStore::open(std::move(store), options_for(), clock_));
  one->open_space(1, {});
  EXPECT_EQ(find_all(*one, {1}), "-");  // when it has looked at the new namespace
  EXPECT_EQ(one->known_objects(), 0u);
  EXPECT_EQ(one->known_blocks(), 0u);
}

TEST_F(ObjectBlockStoreTest, AStoreWithMoreKeysThanAListMayHaveIsServed) {
  put_all(*engine(), {1});
  auto store = std::make_unique<Shared>(objects_, gone_);
  store->others = remote::kMostKeys;
  EXPECT_FAILS(store->list("kv1/"), Code::kResourceExhausted, "1000000");
  ObjectBlockStoreOptions options = options_for();
  options.expire = std::chrono::hours(24);
  const auto one = value_of(ObjectBlockStore::open(std::move(store), options, clock_));
  clock_.advance(std::chrono::hours(20));
  one->open_space(1, {});
  EXPECT_EQ(find_all(*one, {1}), "h");
  clock_.advance(std::chrono::hours(5));
  ASSERT_SUCCEEDS(one->look());
  EXPECT_EQ(objects_.objects.size(), 0u);  // it expired
}

TEST_F(ObjectBlockStoreTest, ABlockInTwoPacksStaysUntilTheNewerOneExpires) {
  ObjectBlockStoreOptions options = options_for();
  options.expire = std::chrono::hours(24);
  const auto one = engine(options);
  const auto other = engine(options);
  put_all(*one, {1});
  clock_.advance(std::chrono::hours(20));
  put_all(*other, {1});
  ASSERT_EQ(keys_with("/packs/").size(), 2u);
  ASSERT_SUCCEEDS(one->look());
  ASSERT_SUCCEEDS(other->look());
  clock_.advance(std::chrono::hours(5));
  ASSERT_SUCCEEDS(one->look());
  ASSERT_SUCCEEDS(other->look());
  ASSERT_EQ(keys_with("/packs/").size(), 1u);
  EXPECT_EQ(get_all(*one, {1}) + get_all(*other, {1}), "hh");
  clock_.advance(std::chrono::hours(20));
  ASSERT_SUCCEEDS(one->look());
  EXPECT_EQ(get_all(*one, {1}), "-");
}

// In a shared directory. Only what torpor itself names so goes, and only once no put can still be under way.
TEST_F(ObjectBlockStoreTest, WhatAKilledWriterLeftGoesAfterAnHour) {
  const TemporaryDirectory folder;
  const auto one =
      value_of(ObjectBlockStore::open("file://" + folder.path(), linux_file_system(), options_for(), clock_));
  one->open_space(1, {});
  put_all(*one, {1});
  const std::string space =
      value_of(value_of(linux_file_system().open_directory(folder / "kv1", false))->list())[0].name;
  const auto packs = value_of(linux_file_system().open_directory(folder / ("kv1/" + space + "/r0/packs"), false));
  const std::string begun = "unfinished-" + std::string(32, 'a') + "-";
  const auto names = [&] {
    std::vector<std::string> found;
    for (const Entry& entry : value_of(packs->list())) found.push_back(entry.name);
    found.erase(found.begin());  // the pack
    return found;
  };
  ASSERT_SUCCEEDS(one->look());
  clock_.advance(59min);
  for (const char* name : {"7", "9"}) ASSERT_SUCCEEDS(packs->create_file(begun + name));
  std::vector<std::string> foreign = {begun + "8", "unfinished-notes"};  // a directory, and a file of somebody
  ASSERT_SUCCEEDS(packs->create_directory(foreign[0]));
  ASSERT_SUCCEEDS(packs->create_file(foreign[1]));
  for (const auto after : {0min, 1min, 59min}) {
    clock_.advance(after);
    ASSERT_SUCCEEDS(one->look());
    EXPECT_EQ(names().size(), 4u);
  }
  ASSERT_SUCCEEDS(packs->create_file(begun + "99"));
  clock_.advance(1min);
  ASSERT_SUCCEEDS(one->look());
  EXPECT_EQ(names(), (std::vector{foreign[0], begun + "99", foreign[1]}));
  EXPECT_EQ(get_all(*one, {1}), "h");
}

TEST_F(ObjectBlockStoreTest, ADamagedBlockIsNotServedAndOthersOfItsPackAre) {
  const auto one = engine();
  put_all(*one, {1, 2, 3});
  std::vector<std::byte>& pack = objects_.objects.begin()->second;
  pack[remote::pack_head_bytes(3) + remote::kFrameBytes + 100] ^= std::byte{1};                         // bytes
  pack[remote::pack_head_bytes(3) + 2 * (remote::kFrameBytes + kContractRecord) + 40] ^= std::byte{1};  // a frame
  EXPECT_EQ(get_all(*one, {1, 2, 3}), "!h!");
  EXPECT_EQ(get_all(*one, {1, 2, 3}), "-h-");  // not asked for again
  put_all(*one, {1, 3});                       // computed again
  EXPECT_EQ(get_all(*one, {1, 2, 3}), "hhh");
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {1, 2, 3}), "hhh");
  EXPECT_EQ(get_all(*other, {2}), "h");
}

TEST_F(ObjectBlockStoreTest, APackThatIsCutIsAMissAndNotReadAgain) {
  const auto one = engine();
  put_all(*one, {1, 2});
  objects_.objects.begin()->second.resize(remote::pack_head_bytes(2) + 300);
  EXPECT_EQ(get_all(*one, {1, 2}), "!!");
  EXPECT_EQ(get_all(*one, {1, 2}), "--");
  objects_.objects.begin()->second.resize(20);  // of the head, too
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {1, 2}), "--");
  const uint64_t calls = objects_.calls;
  ASSERT_SUCCEEDS(other->look());
  EXPECT_EQ(objects_.calls, calls + 1);  // the list
}

TEST_F(ObjectBlockStoreTest, APackThatIsRemovedMeanwhileIsAMiss) {
  const auto one = engine();
  put_all(*one, {1, 2});
  put_all(*one, {3});
  ASSERT_EQ(objects_.objects.erase(keys_with("-00000002").at(0)), 1u);
  EXPECT_EQ(get_all(*one, {1, 3}), "-h");
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {3}), "h");
  objects_.objects.clear();
  ASSERT_SUCCEEDS(other->look());  // it hears of it before it asks
  EXPECT_EQ(find_all(*other, {3}), "-");
}

TEST_F(ObjectBlockStoreTest, DamagedIndexesAndStrangeObjectsArePassedOver) {
  {
    const auto one = engine();
    for (uint64_t seed = 0; seed < ObjectBlockStore::kPacksOfAnIndex; ++seed) put_all(*one, {seed});
    ASSERT_SUCCEEDS(one->look());
  }
  const std::string index = keys_with("/index/").at(0);
  objects_.objects[index][200] ^= std::byte{4};
  const std::string folder = index.substr(0, index.find("index/"));
  objects_.objects[folder + "packs/readme"] = {};
  objects_.objects[folder + "index/" + PackName{.id = std::string(32, 'a'), .number = 9}.text()] = {};
  objects_.objects["kv1/notes"] = {};
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {0, 63}), "hh");  // from the heads
  EXPECT_EQ(get_all(*other, {0, 63}), "hh");
}

TEST_F(ObjectBlockStoreTest, AStoreThatIsGoneCostsNoBlockThatIsKnownAndIsAskedAgainLater) {
  const auto one = engine();
  put_all(*one, {1});
  gone_ = true;
  EXPECT_EQ(get_all(*one, {1}), "?");
  EXPECT_FALSE(one->accepting());
  const uint64_t calls = objects_.calls;
  EXPECT_EQ(get_all(*one, {1}), "?");
  EXPECT_EQ(objects_.calls, calls);  // nobody asked
  const auto other = engine();
  EXPECT_EQ(find_all(*other, {1}), "?");  // at once: it was looked for, and there was no answer
  gone_ = false;
  clock_.advance(1s);
  EXPECT_TRUE(one->accepting());
  EXPECT_EQ(get_all(*one, {1}), "h");
  ASSERT_SUCCEEDS(other->look());
  EXPECT_EQ(get_all(*other, {1}), "h");
}

// Credentials that have expired, or a bucket that is gone.
TEST_F(ObjectBlockStoreTest, AStoreThatRefusesAllCallsIsNotAskedForAWhile) {
  for (const Code code : {Code::kUnauthenticated, Code::kFailedPrecondition}) {
    auto store = std::make_unique<Shared>(objects_, gone_);
    store->fails_with = code;
    const auto one = value_of(ObjectBlockStore::open(std::move(store), options_for(), clock_));
    one->open_space(1, {});
    ASSERT_SUCCEEDS(one->look());
    put_all(*one, {1});
    gone_ = true;
    EXPECT_EQ(get_all(*one, {1}), "?");
    EXPECT_FALSE(one->accepting());
    EXPECT_FAILS(one->look(), Code::kUnavailable, "not asked for a while");
    gone_ = false;
    while (!one->look()) clock_.advance(1s);
    EXPECT_EQ(get_all(*one, {1}), "h");
    EXPECT_TRUE(one->accepting());
  }
}

TEST_F(ObjectBlockStoreTest, WithCredentialsThatMayNotWriteItReads) {
  put_all(*engine(), {1});
  auto store = std::make_unique<Shared>(objects_, gone_);
  store->fails_with = Code::kUnauthenticated;
  store->refuses_put = [](std::string_view) { return true; };
  const auto reader = value_of(ObjectBlockStore::open(std::move(store), options_for(), clock_));
  reader->open_space(1, {});
  ASSERT_SUCCEEDS(reader->look());
  std::vector<std::byte> bytes = some_bytes(2, kContractRecord);
  std::vector<StorePart> parts = {part_of(2, 2, bytes)};
  put(*reader, parts);
  EXPECT_FAILS(parts[0].status, Code::kUnauthenticated);
  EXPECT_TRUE(reader->accepting());
  EXPECT_EQ(get_all(*reader, {1}), "h");
}

TEST_F(ObjectBlockStoreTest, WhatIsOldIsRemovedOfAllKeySpaces) {
  ObjectBlockStoreOptions options = options_for();
  options.expire = std::chrono::hours(24);
  put_all(*engine(options_for(), digest_of(std::as_bytes(std::span("old weights")))), {7});
  const auto one = engine(options);
  put_all(*one, {1});
  clock_.advance(std::chrono::hours(20));
  put_all(*one, {2});
  ASSERT_SUCCEEDS(one->look());
  EXPECT_EQ(objects_.objects.size(), 3u);
  clock_.advance(std::chrono::hours(5));
  ASSERT_SUCCEEDS(one->look());
  EXPECT_EQ(objects_.objects.size(), 1u);
  EXPECT_EQ(get_all(*one, {1, 2}), "-h");
}

TEST_F(ObjectBlockStoreTest, MoreThanOneLookRemovesGoesWithTheNextOnes) {
  for (uint64_t i = 0; i < 2500; ++i) {
    const PackName name{.unix_seconds = 1'700'000'000, .id = std::string(32, 'a'), .number = i};
    objects_.objects["kv1/other/r0/packs/" + name.text()] = {};
  }
  ObjectBlockStoreOptions options = options_for();
  options.expire = std::chrono::hours(24);
  const auto one = engine(options);
  for (int look = 0; look < 3; ++look) ASSERT_SUCCEEDS(one->look());  // each removes a thousand
  EXPECT_TRUE(value_of(objects_.list("kv1/")).empty());
}

TEST_F(ObjectBlockStoreTest, WhatIsThereIsKnownThoughOldPacksCannotBeRemoved) {
  objects_.objects["kv1/other/r0/packs/" +
                   PackName{.unix_seconds = 1'700'000'000, .id = std::string(32, 'a'), .number = 1}.text()] = {};
  objects_.failing = 3;  // two lists come before it
  ObjectBlockStoreOptions options = options_for();
  options.expire = std::chrono::hours(24);
  const auto one = engine(options);
  EXPECT_EQ(find_all(*one, {1}), "-");  // not '?'
}

TEST_F(ObjectBlockStoreTest, ABlockThatSaysItIsLargerThanItCanBeIsNotKnown) {
  put_all(*engine(), {1});
  const std::string pack = keys_with("/packs/").at(0);
  std::vector<PackEntry> entries = {
      {.hash = some_key(2).hash, .group = some_key(2).group, .bytes = 4'000'000'000},
      {.hash = some_key(3).hash, .group = some_key(3).group, .bytes = remote::kFrameBytes + kContractRecord}};
  const std::string name = PackName{.unix_seconds = 1'800'000'000, .id = std::string(32, 'b'), .number = 2}.text();
  objects_.objects[pack.substr(0, pack.rfind('/') + 1) + name] = remote::encode_pack_head(entries);
  EXPECT_EQ(find_all(*engine(), {1, 2, 3}), "h-h");
}

TEST_F(ObjectBlockStoreTest, WrongOptionsAreRefused) {
  const auto opened = [&](ObjectBlockStoreOptions options) {
    return ObjectBlockStore::open(std::make_unique<Shared>(objects_, gone_), options, clock_);
  };
  ObjectBlockStoreOptions options = options_for();
  options.timeout = 0ms;
  EXPECT_FAILS(opened(options), Code::kInvalidArgument, "0 ms");
  options = options_for();
  options.slots = 0;
  EXPECT_FAILS(opened(options), Code::kInvalidArgument, "0 slots");
  EXPECT_FAILS(ObjectBlockStore::open("http://x", linux_file_system(), options_for(), clock_), Code::kInvalidArgument,
               "s3://BUCKET/PREFIX");
}

// ---- bytes

TEST(PackFormatTest, NamesComeBackAndOthersAreNone) {
  const PackName name{.unix_seconds = 1'800'000'061, .id = std::string(32, '7'), .number = 40};
  EXPECT_EQ(name.text(), "20270115T080101Z-77777777777777777777777777777777-00000040");
  const std::optional<PackName> read = PackName::of(name.text());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->unix_seconds, name.unix_seconds);
  EXPECT_EQ(read->number, 40u);
  for (const size_t at : {0, 8, 15, 16, 49, 50, 57}) {
    std::string other = name.text();
    other[at] = 'x';
    EXPECT_FALSE(PackName::of(other)) << at;
  }
  EXPECT_FALSE(PackName::of("20271315T080101Z-77777777777777777777777777777777-00000040"));  // of no year
  EXPECT_FALSE(PackName::of(name.text() + "0"));
  EXPECT_FALSE(PackName::of(""));
}

TEST(PackFormatTest, AnyOtherByteAndAnyOtherLengthIsSeen) {
  std::vector<PackEntry> entries(3);
  for (size_t i = 0; i < 3; ++i) entries[i] = {.hash = {static_cast<uint8_t>(i)}, .group = 1, .bytes = 200 + i};
  const std::vector<std::byte> head = remote::encode_pack_head(entries);
  EXPECT_EQ(head.size(), remote::pack_head_bytes(3));
  EXPECT_EQ(value_of(remote::decode_pack_head(head)), entries);
  EXPECT_EQ(entries[2].offset, head.size() + 401);
  const remote::IndexedPack packs[] = {
      {.name = PackName{.id = std::string(32, 'b'), .number = 3}.text(), .head = head}};
  const std::vector<std::byte> index = remote::encode_pack_index(packs);
  EXPECT_EQ(value_of(remote::decode_pack_index(index)).at(0).head, head);
  for (size_t at = 0; at < index.size(); ++at) {
    std::vector<std::byte> other = index;
    other[at] ^= std::byte{1};
    EXPECT_FALSE(remote::decode_pack_index(other)) << at;
    EXPECT_FALSE(remote::decode_pack_index(std::span(index).first(at))) << at;
    if (at >= head.size()) continue;
    other = head;
    other[at] ^= std::byte{1};
    EXPECT_FALSE(remote::decode_pack_head(other)) << at;
    EXPECT_FALSE(remote::decode_pack_head(std::span(head).first(at))) << at;
  }
}

}  // namespace
}  // namespace torpor
