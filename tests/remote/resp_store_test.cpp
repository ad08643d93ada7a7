// SPDX-License-Identifier: Apache-2.0
// The contract of stores over a server of KV blocks, and what such a server does rarely. Against a real Redis, killed
// and paused: tests/python/test_connector_remote.py and tests/tools/test_resp.py.
#include "remote/resp_store.h"

#include <fstream>

#include <sys/stat.h>

#include "remote/resp_connection.h"
#include "tests/contract/store_contract.h"
#include "tests/remote/resp_peer.h"
#include "tests/support/manual_clock.h"

namespace torpor {
namespace {

using namespace std::chrono_literals;
using namespace test;
using remote::BlockFrame;
using remote::RespStore;
using remote::RespStoreOptions;
using ::testing::HasSubstr;

RespStoreOptions options_for(const std::string& url) {
  return {.url = url,
          .slots = 1000,
          .record_bytes = kContractRecord,
          .timeout = 20s,  // nothing here takes that long
          .attempts = 2,
          .breaker = {.failures = 1, .first_pause = 1s, .longest_pause = 4s}};
}

class RespWorld final : public StoreWorld {
 public:
  RespWorld(std::shared_ptr<const Key> key, bool encrypt, Codec codec = Codec::kNone) {
    RespStoreOptions options = options_for(peer.url());
    options.compression = {.codec = codec};
    options.key = std::move(key);
    options.encrypt = encrypt;
    store_ = value_of(RespStore::open(std::move(options), clock_));
    store_->open_space(1, {});
  }
  SlotStore& store() override { return *store_; }
  StoreSlot beyond() override { return 1000; }
  bool fail(bool failing) override {
    peer.fail(failing);
    if (!failing) clock_.advance(1s);
    return true;
  }

  RespPeer peer;

 private:
  ManualClock clock_;
  std::unique_ptr<RespStore> store_;
};

INSTANTIATE_TEST_SUITE_P(
    Resp, StoreContract,
    ::testing::Values(StoreWay{"Remote", [] { return std::make_unique<RespWorld>(nullptr, false); }},
                      StoreWay{"RemoteAuthenticated", [] { return std::make_unique<RespWorld>(a_key(7), false); }},
                      StoreWay{"RemoteEncrypted", [] { return std::make_unique<RespWorld>(a_key(7), true); }},
                      StoreWay{"RemoteEncryptedZstd",
                               [] { return std::make_unique<RespWorld>(a_key(7), true, Codec::kZstd); }}),
    [](const auto& info) { return info.param.name; });

class RespStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<RespStore> make(RespStoreOptions options) {
    auto made = value_of(RespStore::open(std::move(options), clock_));
    made->open_space(1, space_);
    return made;
  }
  std::unique_ptr<RespStore> make() { return make(options_for(peer_.url())); }
  // By key: as an engine that did not put it.
  static Status get(RespStore& store, uint64_t seed, size_t size = kContractRecord) {
    std::vector<std::byte> room(size);
    StorePart part{.slot = 0, .key = some_key(seed), .bytes = room};
    test::get(store, {&part, 1});
    if (part.status) {
      EXPECT_EQ(room, some_bytes(seed, size));
    }
    return part.status;
  }
  static Status find(RespStore& store, uint64_t seed) {
    StorePart part{.slot = 0, .key = some_key(seed)};
    test::find(store, {&part, 1});
    return part.status;
  }

  RespPeer peer_;
  ManualClock clock_;
  Digest space_ = digest_of({});
};

TEST_F(RespStoreTest, WhatOnePutAnotherFindsAndWhoIsOfAnotherKeySpaceRankOrKeyDoesNot) {
  const auto one = make();
  const auto other = make();
  ASSERT_SUCCEEDS(put_one(*one, 0, 5));
  EXPECT_SUCCEEDS(find(*other, 5));
  EXPECT_SUCCEEDS(get(*other, 5));
  EXPECT_FAILS(find(*other, 6), Code::kNotFound);
  EXPECT_FAILS(get(*other, 6), Code::kNotFound);
  other->open_space(1, digest_of(std::as_bytes(std::span("other weights"))));
  EXPECT_FAILS(get(*other, 5), Code::kNotFound);
  for (const auto& change : std::vector<std::function<void(RespStoreOptions&)>>{
           [](RespStoreOptions& options) { options.rank = 1; },
           [](RespStoreOptions& options) { options.url += "/another"; },
           [](RespStoreOptions& options) { options.key = a_key(1); },
           [](RespStoreOptions& options) { options.key = a_key(1), options.encrypt = true; }}) {
    RespStoreOptions options = options_for(peer_.url());
    change(options);
    EXPECT_FAILS(get(*make(options), 5), Code::kNotFound);
  }
  EXPECT_EQ(one->health().read_errors + other->health().read_errors, 0u);  // a miss is no error
}

// Each would take the other's block for a damaged one, and remove it.
TEST_F(RespStoreTest, WithOneKeyWhoEncryptsAndWhoDoesNotLeaveEachOthersBlocksAlone) {
  std::vector<std::unique_ptr<RespStore>> stores;
  for (const bool encrypt : {false, true}) {
    RespStoreOptions options = options_for(peer_.url());
    options.key = a_key(1), options.encrypt = encrypt;
    stores.push_back(make(options));
    ASSERT_SUCCEEDS(put_one(*stores.back(), 0, 5));
  }
  for (const auto& store : stores) EXPECT_SUCCEEDS(get(*store, 5));
}

TEST_F(RespStoreTest, AReplyThatMakesNoSenseIsNoSuccess) {
  const auto store = make();
  for (const char* said : {"+OK\r\n", "$2\r\nOK\r\n"}) {
    peer_.script([&](const RespPeer::Words& words) { return words[0] == "EXISTS" ? said : std::string(); });
    EXPECT_FALSE(find(*store, 5)) << said;
    clock_.advance(4s);
  }
  peer_.script([&](const RespPeer::Words& words) { return words[0] == "SET" ? ":1\r\n" : std::string(); });
  EXPECT_FALSE(put_one(*store, 0, 5));
  peer_.script({});
}

TEST_F(RespStoreTest, WhatIsThereIsNotSentAgain) {
  const auto store = make();
  ASSERT_SUCCEEDS(put_one(*store, 0, 5));
  ASSERT_SUCCEEDS(put_one(*make(), 0, 5));
  EXPECT_EQ(peer_.asked("SET"), 1u);
}

TEST_F(RespStoreTest, WhateverIsThereInsteadIsAMissAndIsRemoved) {
  const auto store = make();
  ASSERT_SUCCEEDS(put_one(*store, 0, 5));
  ASSERT_SUCCEEDS(put_one(*store, 1, 6));
  const std::map<std::string, std::string> values = peer_.values();
  ASSERT_EQ(values.size(), 2u);
  const auto [key, good] = *values.begin();
  const uint64_t seed = key.find(":0500") != std::string::npos ? 5 : 6;
  const std::string other = values.rbegin()->second;
  std::vector<std::string> bad = {
      "", "x", good.substr(0, remote::kFrameBytes), good.substr(0, good.size() - 1), good + "x", other};
  for (size_t at = 0; at < good.size(); at += at < remote::kFrameBytes ? 1 : 997) {
    bad.push_back(good);
    bad.back()[at] = static_cast<char>(bad.back()[at] ^ 1);
  }
  for (const std::string& each : bad) {
    if (each == good) continue;
    peer_.set(key, each);
    EXPECT_FAILS(get(*store, seed), Code::kCorruption);
    EXPECT_FALSE(peer_.values().contains(key));
  }
  ASSERT_SUCCEEDS(put_one(*store, 2, seed));
  EXPECT_SUCCEEDS(get(*store, seed));
  EXPECT_TRUE(store->accepting());  // it answers
}

TEST_F(RespStoreTest, WithAKeyWhatSomebodyElseWroteIsNotBelieved) {
  RespStoreOptions options = options_for(peer_.url());
  options.key = a_key(3);
  for (const bool encrypt : {false, true}) {
    options.encrypt = encrypt;
    const auto store = make(options);
    ASSERT_SUCCEEDS(put_one(*store, 0, 5));
    const auto values = peer_.values();
    for (const auto& [key, good] : values) {
      if (find(*store, 5)) {
        std::string forged = good;
        std::array<std::byte, remote::kFrameBytes> head;
        std::memcpy(head.data(), forged.data(), head.size());
        BlockFrame frame = value_of(remote::decode_frame(head));
        forged.back() = static_cast<char>(forged.back() ^ 1);
        if (!encrypt) frame.digest = digest_of(std::as_bytes(std::span(forged).subspan(head.size())));
        head = remote::encode_frame(frame);
        std::memcpy(forged.data(), head.data(), head.size());
        peer_.set(key, forged);
      }
    }
    EXPECT_FAILS(get(*store, 5), Code::kCorruption);
  }
}

TEST_F(RespStoreTest, AnotherSizeIsAMissAndStays) {
  const auto store = make();
  ASSERT_SUCCEEDS(put_one(*store, 0, 5));
  EXPECT_FAILS(get(*store, 5, 4096), Code::kIncompatible, "has 12288 bytes, not 4096");
  EXPECT_SUCCEEDS(get(*store, 5));
}

TEST_F(RespStoreTest, WhatPassesIsTriedAgainInTheSameCall) {
  const auto store = make();
  ASSERT_SUCCEEDS(put_one(*store, 0, 5));
  for (const std::string& once :
       {std::string("-LOADING Redis is loading the dataset in memory\r\n"), RespPeer::kReset,
        std::string("$9999999999\r\n"), std::string("?\r\n"), std::string("$5\r\nabcdefgh\r\n"),
        std::string("-CLUSTERDOWN The cluster is down\r\n")}) {
    bool said = false;
    peer_.script([&](const RespPeer::Words& words) {
      return words[0] == "GET" && !std::exchange(said, true) ? once : std::string();
    });
    EXPECT_SUCCEEDS(get(*store, 5)) << once;
    EXPECT_TRUE(said);
  }
}

TEST_F(RespStoreTest, WhatDoesNotPassIsSaidAtOnce) {
  const auto store = make();
  size_t asked = 0;
  const auto says = [&](const std::string& words) {
    peer_.script([&, words](const RespPeer::Words&) { return ++asked, words; });
  };
  says("-NOAUTH Authentication required.\r\n");
  EXPECT_FAILS(get(*store, 5), Code::kUnauthenticated, "NOAUTH");
  EXPECT_EQ(asked, 1u);
  peer_.script([](const RespPeer::Words& words) {
    return words[0] == "SET" ? std::string("-OOM command not allowed when used memory > 'maxmemory'.\r\n")
                             : std::string();
  });
  EXPECT_FAILS(put_one(*store, 0, 5), Code::kResourceExhausted, "OOM");
  EXPECT_FAILS(put_one(*store, 1, 6), Code::kResourceExhausted, "takes nothing for a while");
  EXPECT_EQ(peer_.asked("SET"), 1u);  // the second one was not sent
  peer_.script({});
  clock_.advance(1s);
  EXPECT_SUCCEEDS(put_one(*store, 1, 6));
  EXPECT_TRUE(store->accepting());
}

TEST_F(RespStoreTest, OneThatSaysNothingIsLeftAfterItsTimeAndNotAskedForAWhile) {
  RespStoreOptions options = options_for(peer_.url());
  options.timeout = 50ms;
  const auto store = make(options);
  peer_.script([](const RespPeer::Words&) { return RespPeer::kStall; });
  EXPECT_FAILS(find(*store, 5), Code::kTimeout);
  EXPECT_FALSE(store->accepting());
  const size_t asked = peer_.asked("EXISTS");
  EXPECT_FAILS(find(*store, 5), Code::kUnavailable, "not asked");
  EXPECT_FAILS(put_one(*store, 0, 5), Code::kUnavailable);
  EXPECT_EQ(peer_.asked("EXISTS"), asked);
  clock_.advance(1s);
  EXPECT_TRUE(store->accepting());
  EXPECT_FAILS(find(*store, 5), Code::kTimeout);  // one may try
  EXPECT_GT(peer_.asked("EXISTS"), asked);
  clock_.advance(1s);
  EXPECT_FALSE(store->accepting());  // twice as long now
  clock_.advance(1s);
  peer_.script({});
}

TEST_F(RespStoreTest, InAClusterEachBlockIsWhereItsNodeSays) {
  RespPeer second;
  const auto store = make();
  peer_.script([&](const RespPeer::Words& words) {
    return words[0] == "ASKING" || words.size() < 2 || words[1].back() % 2 == 0
               ? std::string()
               : fmt::format("-MOVED {} {}\r\n", remote::cluster_slot(words[1]), second.address());
  });
  std::vector<std::vector<std::byte>> bytes;
  std::vector<StorePart> parts;
  for (uint64_t seed = 0; seed < 8; ++seed) bytes.push_back(some_bytes(seed, kContractRecord));
  for (uint64_t seed = 0; seed < 8; ++seed) {
    StorePart part = part_of(static_cast<StoreSlot>(seed), seed, bytes[seed]);
    part.key.hash.back() = static_cast<uint8_t>(seed);
    parts.push_back(part);
  }
  test::put(*store, parts);
  for (const StorePart& part : parts) EXPECT_SUCCEEDS(part.status);
  EXPECT_EQ(peer_.values().size(), 4u);
  EXPECT_EQ(second.values().size(), 4u);
  test::get(*store, parts);
  for (const StorePart& part : parts) EXPECT_SUCCEEDS(part.status);
  const size_t asked = peer_.asked("GET");
  test::get(*store, parts);
  EXPECT_EQ(peer_.asked("GET"), asked + 4);  // it remembers
  // A slot that is on its way: the second node has what the first one asks to be asked for.
  second.script([](const RespPeer::Words& words) {
    static bool asking = false;
    if (words[0] == "ASKING") return asking = true, std::string();
    return std::exchange(asking, false) ? std::string() : std::string("-TRYAGAIN\r\n");
  });
  peer_.script([&](const RespPeer::Words& words) {
    return words[0] == "GET" && words[1].back() % 2 != 0 ? fmt::format("-ASK 1 {}\r\n", second.address())
                                                         : std::string();
  });
  for (const uint64_t record_bytes : {kContractRecord, 4 * kMiB}) {  // of large ones few are asked for at once
    RespStoreOptions options = options_for(peer_.url());
    options.record_bytes = record_bytes;
    test::get(*make(options), parts);
    for (const StorePart& part : parts) EXPECT_SUCCEEDS(part.status);
  }
}

// It would make all the answers in its memory before it sends the first one.
TEST_F(RespStoreTest, AServerIsAskedForFewLargeBlocksAtOnce) {
  constexpr size_t kBlocks = 9;
  RespStoreOptions options = options_for(peer_.url());
  options.record_bytes = 2 * kMiB;
  options.attempts = 1;
  options.timeout = 300ms;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<StorePart> parts;
  for (uint64_t seed = 0; seed < kBlocks; ++seed) bytes.push_back(some_bytes(seed, kContractRecord));
  for (uint64_t seed = 0; seed < kBlocks; ++seed)
    parts.push_back(part_of(static_cast<StoreSlot>(seed), seed, bytes[seed]));
  const auto store = make();
  test::put(*store, parts);
  test::get(*store, parts);
  for (const StorePart& part : parts) EXPECT_SUCCEEDS(part.status);
  EXPECT_EQ(peer_.asked("GET"), kBlocks);
  peer_.script([](const RespPeer::Words& words) { return words[0] == "GET" ? RespPeer::kStall : std::string(); });
  test::get(*make(options), parts);
  for (const StorePart& part : parts) EXPECT_FAILS(part.status, Code::kTimeout);
  EXPECT_EQ(peer_.asked("GET"), kBlocks + 2);
}

TEST_F(RespStoreTest, NodesThatSendInCirclesAreLeft) {
  peer_.script([&](const RespPeer::Words&) { return fmt::format("-MOVED 1 {}\r\n", peer_.address()); });
  EXPECT_FAILS(get(*make(), 5), Code::kUnavailable, "MOVED");
}

TEST_F(RespStoreTest, ItLogsInAndASecretIsInNoMessage) {
  const TemporaryDirectory folder;
  const std::string file = folder.path() + "/credentials";
  std::ofstream(file) << "kv correct-horse\n";
  ::chmod(file.c_str(), 0600);
  RespStoreOptions options = options_for(peer_.url());
  options.credentials = file;
  RespPeer::Words login;
  peer_.script([&](const RespPeer::Words& words) {
    if (words[0] == "AUTH") login = words;
    return std::string();
  });
  ASSERT_SUCCEEDS(put_one(*make(options), 0, 5));
  EXPECT_EQ(login, (RespPeer::Words{"AUTH", "kv", "correct-horse"}));
  peer_.script([&](const RespPeer::Words&) { return std::string("-WRONGPASS invalid username-password pair\r\n"); });
  const auto store = make(options);
  const Status refused = get(*store, 5);
  EXPECT_FAILS(refused, Code::kUnauthenticated, "WRONGPASS");
  EXPECT_EQ(refused.error().to_string().find("correct-horse"), std::string::npos);
  ::chmod(file.c_str(), 0644);
  EXPECT_FAILS(RespStore::open(options, clock_), Code::kInvalidArgument, "chmod 600");
}

TEST(RespSettings, AURLIsCheckedAndNotRepeated) {
  const auto settings = value_of(remote::resp_settings("rediss://kv.example,[::1]:7000,10.0.0.1:1/team-a", ""));
  EXPECT_TRUE(settings.tls);
  EXPECT_EQ(settings.name, "team-a");
  ASSERT_EQ(settings.nodes.size(), 3u);
  EXPECT_EQ(settings.nodes[0], (remote::Address{"kv.example", 6379}));
  EXPECT_EQ(settings.nodes[1].text(), "[::1]:7000");
  EXPECT_EQ(settings.nodes[2], (remote::Address{"10.0.0.1", 1}));
  for (const char* url : {"", "redis://", "http://a", "redis://a:b", "redis://a:0", "redis://a:70000", "redis://a/{x}",
                          "redis://user:secret@a", "redis://a,,b", "redis://[::1", "redis://[::1]7", "redis://a/b/c"}) {
    const auto wrong = remote::resp_settings(url, "");
    EXPECT_FAILS(wrong, Code::kInvalidArgument);
    EXPECT_EQ(wrong.error().to_string().find("secret"), std::string::npos);
  }
}

TEST(ClusterSlot, IsTheProtocols) {
  EXPECT_EQ(remote::cluster_slot("123456789"), 0x31C3 % 16384);
  EXPECT_EQ(remote::cluster_slot("foo"), 12182);
}

}  // namespace
}  // namespace torpor
