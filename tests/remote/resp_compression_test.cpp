// SPDX-License-Identifier: Apache-2.0
// Blocks that are compressed in a remote store: what comes back, and what of it is not believed.
#include <bit>
#include <random>

#include "remote/resp_store.h"
#include "tests/contract/store_world.h"
#include "tests/remote/resp_peer.h"
#include "tests/support/manual_clock.h"

namespace torpor {
namespace {

using namespace test;
using remote::BlockFrame;
using remote::RespStore;
using remote::RespStoreOptions;

class RespCompressionTest : public ::testing::Test {
 protected:
  struct Way {
    Codec codec = Codec::kNone;
    int key = 0;  // 1: authenticated, 2: encrypted
  };
  std::unique_ptr<RespStore> make_with(Way way) {
    RespStoreOptions options{.url = peer_.url(),
                             .slots = 1000,
                             .record_bytes = kContractRecord,
                             .encrypt = way.key == 2,
                             .compression = {.codec = way.codec},
                             .timeout = std::chrono::seconds(20)};
    if (way.key > 0) options.key = std::make_shared<Key>(std::array<uint8_t, kKeyBytes>{3});
    auto made = value_of(RespStore::open(std::move(options), clock_));
    made->open_space(1, {});
    return made;
  }
  // As KV of bf16 is: exponents that lie close together.
  static std::vector<std::byte> bf16_values() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<std::byte> bytes(kContractRecord);
    for (size_t at = 0; at < bytes.size(); at += 2) {
      const uint32_t bits = std::bit_cast<uint32_t>(normal(random)) >> 16U;
      bytes[at] = static_cast<std::byte>(bits & 0xffU);
      bytes[at + 1] = static_cast<std::byte>(bits >> 8U);
    }
    return bytes;
  }
  static StoredRecord put(RespStore& store, std::vector<std::byte> bytes) {
    StorePart part{.slot = 0, .key = some_key(5), .record = {.digest = digest_of(bytes)}, .bytes = bytes};
    test::put(store, {&part, 1});
    EXPECT_SUCCEEDS(part.status);
    return part.record;
  }
  // What comes back, by key.
  static Result<std::vector<std::byte>> get(RespStore& store) {
    std::vector<std::byte> room(kContractRecord);
    StorePart part{.slot = 0, .key = some_key(5), .bytes = room};
    test::get(store, {&part, 1});
    TORPOR_RETURN_IF_ERROR(part.status);
    EXPECT_EQ(part.record.bytes, kContractRecord);
    return room;
  }
  std::pair<std::string, std::string> only() { return *peer_.values().begin(); }

  RespPeer peer_;
  ManualClock clock_;
};

TEST_F(RespCompressionTest, WhoeverReadsABlockHasWhatWasPutWithWhateverCompression) {
  const std::vector<std::byte> values = bf16_values();
  for (const int key : {0, 1, 2}) {
    for (const Codec codec : {Codec::kNone, Codec::kZstd, Codec::kBf16}) {
      const auto store = make_with({codec, key});
      const StoredRecord record = put(*store, values);
      EXPECT_EQ(record.bytes, kContractRecord);
      EXPECT_EQ(record.codec, codec);
      EXPECT_EQ(record.stored < kContractRecord, codec != Codec::kNone);
      EXPECT_EQ(only().second.size(), remote::kFrameBytes + record.stored);
      EXPECT_EQ(store->health().held_bytes, record.stored);
      for (const Codec other : {Codec::kNone, Codec::kZstd, Codec::kBf16})
        EXPECT_EQ(value_of(get(*make_with({other, key}))), values);
      const SlotRange all{.first = 0, .count = 1};
      store->drop({&all, 1});
      ASSERT_TRUE(peer_.values().empty());
      EXPECT_EQ(store->health().held_bytes, 0U);
    }
  }
}

TEST_F(RespCompressionTest, WhatDoesNotGetSmallerIsSentAsItIs) {
  for (const Codec codec : {Codec::kZstd, Codec::kBf16}) {
    const auto store = make_with({codec});
    std::mt19937 random(1);
    std::vector<std::byte> noise(kContractRecord);
    for (std::byte& each : noise) each = static_cast<std::byte>(random());
    const StoredRecord record = put(*store, noise);
    EXPECT_EQ(record.codec, Codec::kNone);
    EXPECT_EQ(only().second.size(), remote::kFrameBytes + kContractRecord);
    EXPECT_EQ(value_of(get(*store)), noise);
    peer_.set(only().first, "x");
    EXPECT_FAILS(get(*store), Code::kCorruption);
  }
}

// Of a store without a key, whose frames anybody can write: another codec, length or digest, and each bit of the rest.
TEST_F(RespCompressionTest, ADamagedOrForgedOneIsRefusedAndRemoved) {
  for (const Codec codec : {Codec::kZstd, Codec::kBf16}) {
    const auto store = make_with({codec});
    put(*store, bf16_values());
    const auto [key, good] = only();
    std::vector<std::string> bad = {good.substr(0, good.size() - 1), good + "x"};
    for (size_t at = 0; at < good.size(); at += at < 2 * remote::kFrameBytes ? 1 : 499) {
      bad.push_back(good);
      bad.back()[at] = static_cast<char>(bad.back()[at] ^ 4);
    }
    std::array<std::byte, remote::kFrameBytes> head;
    std::memcpy(head.data(), good.data(), head.size());
    const BlockFrame frame = value_of(remote::decode_frame(head));
    for (const auto& change : std::vector<std::function<void(BlockFrame&, std::string&)>>{
             [&](BlockFrame& forged, std::string&) {
               forged.codec = codec == Codec::kZstd ? Codec::kBf16 : Codec::kZstd;
             },
             [](BlockFrame& forged, std::string&) { forged.codec = Codec::kNone; },
             [](BlockFrame& forged, std::string&) { forged.digest = {}; },
             [](BlockFrame& forged, std::string& body) { forged.stored = body.size() - 1, body.pop_back(); },
             [](BlockFrame& forged, std::string& body) { forged.stored = 0, body.clear(); },
             [](BlockFrame& forged, std::string& body) {
               forged.stored = compressed_bound(kContractRecord) + 1, body.resize(forged.stored);
             },
             [](BlockFrame&, std::string& body) { std::fill(body.begin(), body.end(), '\xff'); },
             [](BlockFrame&, std::string& body) { std::fill(body.begin(), body.end(), '\0'); }}) {
      BlockFrame forged = frame;
      std::string body = good.substr(head.size());
      change(forged, body);
      head = remote::encode_frame(forged);
      bad.push_back(std::string(reinterpret_cast<const char*>(head.data()), head.size()) + body);
    }
    for (const std::string& each : bad) {
      peer_.set(key, each);
      EXPECT_FAILS(get(*store), Code::kCorruption);
      EXPECT_TRUE(peer_.values().empty());
    }
  }
}

}  // namespace
}  // namespace torpor
