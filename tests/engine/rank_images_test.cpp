// SPDX-License-Identifier: Apache-2.0
// Images of requests that left their engine: the KV of each is whole, verified, and frees its memory.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include <boost/filesystem.hpp>

#include "allocator/host_device.h"
#include "base/units.h"
#include "engine/rank_memory.h"
#include "engine/reference/idle_hooks.h"
#include "engine/request_images.h"
#include "tests/support/faulty_device.h"
#include "tests/support/process_bytes.h"
#include "tests/support/rank_call.h"
#include "tests/support/results.h"
#include "tests/support/running_request.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

using test::call_rank;
using test::value_of;

constexpr uint32_t kBlocks = 16;
constexpr uint64_t kBytes = 6000;  // of a block in a layer; two layers
constexpr int32_t kTokens = 4;     // of a block

// One rank with KV blocks, whose bytes follow from a number that is written into each.
class Rank {
 public:
  struct Options {
    uint64_t budget_bytes = 0;
    uint64_t bytes = kBytes;  // of a block in a layer
    int threads = 1;
  };
  Rank() : Rank(Options{}) {}
  explicit Rank(const Options& options) : bytes_(options.bytes) {
    auto device = std::make_unique<test::FaultyDevice>(value_of(make_host_device()));
    device_ = device.get();
    memory_ = value_of(RankMemory::create(
        std::move(device), linux_file_system(),
        {.arena_budget_bytes = options.budget_bytes, .arena_slab_bytes = 64 * kKiB, .threads = options.threads}));
    kv_ = value_of(memory_->allocate("kv_cache", "kv", 2 * kBlocks * bytes_));
    const KvTensor tensor{
        .address = kv_, .layers = 2, .layer_stride = kBlocks * bytes_, .block_stride = bytes_, .block_bytes = bytes_};
    EXPECT_SUCCEEDS(memory_->set_kv_layout("kv_cache", {.num_blocks = kBlocks, .tensors = {tensor}}));
  }
  void write(int32_t block, int value) {
    for (uint64_t layer = 0; layer < 2; ++layer)
      std::memset(piece(block, layer), value + static_cast<int>(layer), bytes_);
  }
  bool holds(int32_t block, int value) {
    for (uint64_t layer = 0; layer < 2; ++layer) {
      const std::byte* const begin = piece(block, layer);
      const auto wanted = static_cast<std::byte>(value + static_cast<int>(layer));
      if (!std::all_of(begin, begin + bytes_, [&](std::byte byte) { return byte == wanted; })) return false;
    }
    return true;
  }
  RankMemory& memory() { return *memory_; }
  test::FaultyDevice& device() { return *device_; }
  uint64_t used() { return memory_->ledger().arena_used_bytes; }
  uint64_t held() { return memory_->ledger().arena_held_bytes; }
  template <class Order>
  Result<typename Order::Reply> call(const Order& order) {
    return call_rank(*memory_, order);
  }
  std::byte* piece(int32_t block, uint64_t layer) {
    return reinterpret_cast<std::byte*>(kv_ + (layer * kBlocks + static_cast<uint64_t>(block)) * bytes_);  // NOLINT
  }

 private:
  const uint64_t bytes_;
  test::FaultyDevice* device_ = nullptr;
  std::unique_ptr<RankMemory> memory_;
  DeviceAddress kv_ = 0;
};

TEST(RankImages, BringTheBytesOfBlocksIntoOtherBlocks) {
  Rank rank;
  for (const int32_t block : {3, 7, 5}) rank.write(block, 10 * block);
  EXPECT_EQ(value_of(rank.call(orders::Extract{.image = "a", .blocks = {3, 7, 5}})).bytes, 3 * 2 * kBytes);
  for (int32_t block = 0; block < 16; ++block) rank.write(block, 200);
  EXPECT_EQ(value_of(rank.call(orders::VerifyImage{.image = "a"})).bytes, 3 * 2 * kBytes);
  EXPECT_EQ(value_of(rank.call(orders::Admit{.image = "a", .chunks = {2, 0}, .blocks = {1, 7}})).bytes, 2 * 2 * kBytes);
  EXPECT_TRUE(rank.holds(1, 50));
  EXPECT_TRUE(rank.holds(7, 30));
  for (const int32_t block : {0, 3, 5}) EXPECT_TRUE(rank.holds(block, 200));
  // It is there until it is dropped, and then its memory is free.
  ASSERT_SUCCEEDS(rank.call(orders::Admit{.image = "a", .chunks = {1}, .blocks = {3}}));
  EXPECT_TRUE(rank.holds(3, 70));
  EXPECT_GT(rank.used(), 0u);
  EXPECT_EQ(value_of(rank.call(orders::DropImage{.image = "a"})).bytes, 3 * 2 * kBytes);
  EXPECT_EQ(rank.used(), 0u);
  EXPECT_EQ(value_of(rank.call(orders::DropImage{.image = "a"})).bytes, 0u);
}

TEST(RankImages, AreKnownByTheirIds) {
  Rank rank;
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "a", .blocks = {1}}));
  EXPECT_FAILS(rank.call(orders::Extract{.image = "a", .blocks = {2}}), Code::kFailedPrecondition);
  EXPECT_FAILS(rank.call(orders::Admit{.image = "b", .chunks = {0}, .blocks = {1}}), Code::kNotFound);
  EXPECT_FAILS(rank.call(orders::VerifyImage{.image = "b"}), Code::kNotFound);
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "empty", .blocks = {}}));
  EXPECT_EQ(value_of(rank.call(orders::Admit{.image = "empty", .chunks = {}, .blocks = {}})).bytes, 0u);
}

TEST(RankImages, RefuseBlocksAndChunksThatAreNotThere) {
  Rank rank;
  EXPECT_FAILS(rank.call(orders::Extract{.image = "a", .blocks = {1, 16}}), Code::kInvalidArgument);
  EXPECT_FAILS(rank.call(orders::Extract{.image = "a", .blocks = {-1}}), Code::kInvalidArgument);
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "a", .blocks = {1, 2}}));
  rank.write(4, 9);
  EXPECT_FAILS(rank.call(orders::Admit{.image = "a", .chunks = {0, 2}, .blocks = {4, 5}}), Code::kInvalidArgument);
  EXPECT_FAILS(rank.call(orders::Admit{.image = "a", .chunks = {0, 1}, .blocks = {4, 16}}), Code::kInvalidArgument);
  EXPECT_FAILS(rank.call(orders::Admit{.image = "a", .chunks = {0, 1}, .blocks = {4, 4}}), Code::kInvalidArgument);
  EXPECT_FAILS(rank.call(orders::Admit{.image = "a", .chunks = {0, 1}, .blocks = {4}}), Code::kInvalidArgument);
  EXPECT_TRUE(rank.holds(4, 9));
}

// An extraction stops the engine, and must not wait for memory that is new to the process.
TEST(RankImages, LeaveHostMemoryForTheNextOneUntilTheEngineSleeps) {
  Rank rank;
  std::vector<int32_t> most;
  for (int32_t block = 0; block < 12; ++block) most.push_back(block);
  for (const char* const image : {"a", "b", "c"})
    ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = image, .blocks = most}));
  const uint64_t of_three = rank.held();
  for (const char* const image : {"a", "b", "c"}) ASSERT_SUCCEEDS(rank.call(orders::DropImage{.image = image}));
  EXPECT_EQ(rank.used(), 0u);
  const uint64_t left = rank.held();
  EXPECT_GE(left, 12 * 2 * kBytes);
  EXPECT_LT(left, of_three) << "memory for one, not for all that there were";
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "d", .blocks = most}));
  EXPECT_EQ(rank.held(), left) << "nothing new was taken";
  ASSERT_SUCCEEDS(rank.call(orders::DropImage{.image = "d"}));
  ASSERT_SUCCEEDS(rank.call(orders::Save{.tags = {"kv_cache"}, .blocks = {}}));
  ASSERT_SUCCEEDS(rank.call(orders::Detach{.tags = {"kv_cache"}}));
  EXPECT_EQ(rank.held(), 0u);
}

TEST(RankImages, TakeNoMoreThanTheArenasBudget) {
  Rank rank({.budget_bytes = 128 * kKiB});
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "a", .blocks = {1, 2}}));
  const uint64_t used = rank.used();
  std::vector<int32_t> all;
  for (int32_t block = 0; block < 16; ++block) all.push_back(block);
  EXPECT_FAILS(rank.call(orders::Extract{.image = "b", .blocks = all}), Code::kResourceExhausted);
  EXPECT_EQ(rank.used(), used);
  EXPECT_FAILS(rank.call(orders::VerifyImage{.image = "b"}), Code::kNotFound);
  ASSERT_SUCCEEDS(rank.call(orders::VerifyImage{.image = "a"}));
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "b", .blocks = {3}}));
}

TEST(RankImages, StayOverASleepDuringWhichNothingIsExtractedOrAdmitted) {
  Rank rank;
  rank.write(3, 30);
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "a", .blocks = {3}}));
  ASSERT_SUCCEEDS(rank.call(orders::Save{.tags = {"kv_cache"}, .blocks = {1}}));
  ASSERT_SUCCEEDS(rank.call(orders::Detach{.tags = {"kv_cache"}}));
  EXPECT_FAILS(rank.call(orders::Admit{.image = "a", .chunks = {0}, .blocks = {5}}), Code::kFailedPrecondition);
  EXPECT_FAILS(rank.call(orders::Extract{.image = "b", .blocks = {3}}), Code::kFailedPrecondition);
  ASSERT_SUCCEEDS(rank.call(orders::Restore{.tags = {"kv_cache"}}));
  ASSERT_SUCCEEDS(rank.call(orders::Finish{.tags = {"kv_cache"}}));
  ASSERT_SUCCEEDS(rank.call(orders::Admit{.image = "a", .chunks = {0}, .blocks = {5}}));
  EXPECT_TRUE(rank.holds(5, 30));
}

// Change one byte of what host memory has of a block that has bytes like these.
// Make an image of these blocks of which those in `wrong` are damaged then.
void damage(Rank& rank, const std::vector<int32_t>& blocks, const std::vector<int32_t>& wrong) {
  std::vector<std::byte> pattern(600);
  for (size_t i = 0; i < pattern.size(); ++i) pattern[i] = static_cast<std::byte>((i * i) % 251);
  for (const int32_t block : wrong) std::memcpy(rank.piece(block, 1) + 100, pattern.data(), pattern.size());
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "damaged", .blocks = blocks}));
  for (const int32_t block : wrong) rank.write(block, 0);
  const std::vector<uint64_t> places = test::addresses_of(pattern);
  ASSERT_FALSE(places.empty());
  for (const uint64_t place : places) test::overwrite_at(place + 17, std::byte{255});
}

TEST(RankImages, FindEachDamagedByte) {
  Rank rank;
  damage(rank, {1, 5}, {5});
  const Result<orders::VerifyImage::Reply> verified = rank.call(orders::VerifyImage{.image = "damaged"});
  EXPECT_FAILS(verified, Code::kCorruption);
  EXPECT_NE(verified.error().what.find("image damaged: kv_cache block 1 "), std::string::npos) << verified.error().what;
  EXPECT_FAILS(rank.call(orders::Admit{.image = "damaged", .chunks = {1}, .blocks = {6}}), Code::kCorruption);
  ASSERT_SUCCEEDS(rank.call(orders::Admit{.image = "damaged", .chunks = {0}, .blocks = {6}}));
  ASSERT_SUCCEEDS(rank.call(orders::DropImage{.image = "damaged"}));
}

TEST(RankImages, NameTheFirstDamagedChunkThatSeveralThreadsFind) {
  Rank rank({.bytes = 320 * kKiB, .threads = 3});
  std::vector<int32_t> all;
  for (int32_t block = 0; block < 16; ++block) rank.write(all.emplace_back(block), block);
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "whole", .blocks = all}));
  ASSERT_SUCCEEDS(rank.call(orders::VerifyImage{.image = "whole"}));
  damage(rank, all, {6, 7, 13});
  for (int round = 0; round < 20; ++round) {
    const Result<orders::VerifyImage::Reply> verified = rank.call(orders::VerifyImage{.image = "damaged"});
    EXPECT_FAILS(verified, Code::kCorruption, "image damaged: kv_cache block 6 ");
  }
}

TEST(RankImages, AreNotMadeOfABlockThatChangesMeanwhile) {
  Rank rank;
  int copies = 0;
  rank.device().on_copy([&] { rank.write(2, ++copies); });
  const Result<orders::Extract::Reply> extracted = rank.call(orders::Extract{.image = "a", .blocks = {1, 2}});
  ASSERT_GT(copies, 0);
  EXPECT_FAILS(extracted, Code::kCorruption);
  EXPECT_EQ(rank.used(), 0u);
  rank.device().on_copy({});
  ASSERT_SUCCEEDS(rank.call(orders::Extract{.image = "a", .blocks = {1, 2}}));
}

TEST(RankImages, AreAsBeforeAfterAnyFailureOfTheDevice) {
  int failures = 0;
  for (uint64_t call = 1;; ++call) {
    Rank rank;
    rank.write(3, 30);
    rank.device().fail_at(call);
    const bool extracted = rank.call(orders::Extract{.image = "a", .blocks = {3}}).has_value();
    if (!extracted) {
      EXPECT_EQ(rank.used(), 0u) << call;
      ++failures;
    }
    if (extracted && !rank.device().fired()) {
      const bool admitted = rank.call(orders::Admit{.image = "a", .chunks = {0}, .blocks = {5}}).has_value();
      EXPECT_EQ(admitted, !rank.device().fired());
      rank.device().fail_at(0);
      ASSERT_SUCCEEDS(rank.call(orders::VerifyImage{.image = "a"}));
      ASSERT_SUCCEEDS(rank.call(orders::Admit{.image = "a", .chunks = {0}, .blocks = {5}}));
      EXPECT_TRUE(rank.holds(5, 30));
      if (admitted) break;
      ++failures;
    }
    ASSERT_LT(call, 100u);
  }
  EXPECT_GE(failures, 2);
}

// Change one byte of what a file below `directory` has of these bytes.
void flip_stored_byte(const std::string& directory, const std::vector<std::byte>& bytes) {
  const std::string pattern(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (const auto& entry : boost::filesystem::directory_iterator(directory)) {
    std::fstream file(entry.path().string(), std::ios::in | std::ios::out | std::ios::binary);
    const std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const size_t place = content.find(pattern);
    if (place == std::string::npos) continue;
    file.clear();
    file.seekp(static_cast<std::streamoff>(place + 17));
    file.put('?');
    return;
  }
  FAIL() << "no file has these bytes";
}

// Blocks as write_checkpoint() writes them.
class ImagesOfCheckpoints : public ::testing::Test {
 protected:
  std::unique_ptr<RankMemory> make(uint64_t block_bytes, int32_t rank = 0) {
    auto memory = value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(),
                                              {.rank = rank, .arena_slab_bytes = 64 * kKiB, .threads = 1}));
    kv_ = value_of(memory->allocate("kv_cache", "kv", kBlocks * block_bytes));
    const KvTensor tensor{
        .address = kv_, .layers = 1, .layer_stride = 1, .block_stride = block_bytes, .block_bytes = block_bytes};
    EXPECT_SUCCEEDS(memory->set_kv_layout("kv_cache", {.num_blocks = kBlocks, .tensors = {tensor}}));
    return memory;
  }
  orders::ReadImage reading(std::vector<int32_t> blocks) {
    const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), path_));
    return {.image = "a",
            .blocks = std::move(blocks),
            .directory = path_,
            .generation = checkpoint.manifest().generation,
            .id = checkpoint.manifest().id};
  }
  const test::TemporaryDirectory directory_;
  const std::unique_ptr<CheckpointManager> manager_ =
      value_of(CheckpointManager::open(linux_file_system(), directory_.path()));
  const std::string path_ = value_of(test::write_checkpoint(*manager_));
  DeviceAddress kv_ = 0;
};

TEST_F(ImagesOfCheckpoints, HaveTheirBlocks) {
  const auto memory = make(1000);
  EXPECT_EQ(value_of(call_rank(*memory, reading({3, 1}))).bytes, 2000u);
  EXPECT_FAILS(call_rank(*memory, reading({3})), Code::kFailedPrecondition);  // the id is taken
  ASSERT_SUCCEEDS(call_rank(*memory, orders::VerifyImage{.image = "a"}));
  ASSERT_SUCCEEDS(call_rank(*memory, orders::Admit{.image = "a", .chunks = {1, 0}, .blocks = {6, 9}}));
  for (const auto& [block, stored] : {std::pair<uint64_t, uint64_t>{6, 1}, {9, 3}}) {
    const auto* const begin = reinterpret_cast<const std::byte*>(kv_ + block * 1000);  // NOLINT
    EXPECT_EQ(std::vector<std::byte>(begin, begin + 1000), test::example_block(stored));
  }
}

TEST_F(ImagesOfCheckpoints, AreOfTheSameLayoutRankAndCheckpoint) {
  const auto memory = make(1000);
  EXPECT_FAILS(call_rank(*memory, reading({1, 5})), Code::kNotFound, "no KV block 5");
  EXPECT_FAILS(call_rank(*memory, reading({-1})), Code::kNotFound);
  EXPECT_FAILS(call_rank(*make(2000), reading({1})), Code::kIncompatible, "1000 bytes, this engine of 2000");
  EXPECT_FAILS(call_rank(*make(1000, 1), reading({1})), Code::kIncompatible, "rank 1");
  orders::ReadImage other = reading({1});
  ++other.generation;
  EXPECT_FAILS(call_rank(*memory, other), Code::kIncompatible);
  EXPECT_EQ(memory->ledger().arena_used_bytes, 0u);
}

TEST_F(ImagesOfCheckpoints, HaveNoDamagedBlock) {
  const auto memory = make(1000);
  flip_stored_byte(path_, test::example_block(3));
  EXPECT_FAILS(call_rank(*memory, reading({1, 3})), Code::kCorruption, "kv_cache block 3");
  EXPECT_EQ(memory->ledger().arena_used_bytes, 0u);
  ASSERT_SUCCEEDS(call_rank(*memory, reading({1})));
}

// --- what the engine core knows of them ---

// An engine of two ranks.
class TwoRanks final : public IdleHooks {
 public:
  Rank ranks[2];
  std::string fails{};  // the name of an order that the second rank fails

  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override {
    std::vector<Bytes> replies;
    for (Rank& rank : ranks) {
      if (&rank == &ranks[1] && order_name(order) == fails) {
        replies.push_back(encode_error({.code = Code::kDevice, .what = "planted"}));
      } else {
        replies.push_back(RankService(rank.memory()).call(order));
      }
    }
    return replies;
  }
};

class RequestImagesTest : public ::testing::Test {
 protected:
  TwoRanks engine_;
  RequestImages images_{engine_};

  Result<const RequestImages::Image*> extract(const std::string& id) {
    return images_.extract(id, {test::running_request("r1", 8), test::running_request("r2", 5)}, {{3, 7}, {3, 9}},
                           kTokens);
  }
  // To both ranks.
  void send(const Bytes& order) {
    for (const Bytes& reply : value_of(engine_.call_ranks(order))) ASSERT_SUCCEEDS(decode_reply<orders::Admit>(reply));
  }
  uint64_t used() { return engine_.ranks[0].used() + engine_.ranks[1].used(); }
};

TEST_F(RequestImagesTest, BringEachRequestIntoItsBlocksAndFreeTheImageWithTheLast) {
  for (Rank& rank : engine_.ranks) {
    for (const int32_t block : {3, 7, 9}) rank.write(block, 10 * block);
  }
  const RequestImages::Image* const image = value_of(extract("a"));
  EXPECT_EQ(image->bytes, 2 * 3 * 2 * kBytes);  // the block that they share is there once
  EXPECT_EQ(image->requests.at(1).state, test::running_request("r2", 5));
  EXPECT_NE(images_.find("r1"), nullptr);
  EXPECT_FAILS(images_.admit_order("r1", {1, 2}), Code::kInvalidArgument);  // not before begin()
  ASSERT_SUCCEEDS(images_.verify("a"));
  ASSERT_SUCCEEDS(images_.begin("a"));
  EXPECT_FAILS(images_.begin("a"), Code::kFailedPrecondition);
  send(value_of(images_.admit_order("r2", {1, 2})));
  send(value_of(images_.admit_order("r1", {4, 5, 6})));  // the last is for its next tokens
  for (Rank& rank : engine_.ranks) {
    EXPECT_TRUE(rank.holds(1, 30));
    EXPECT_TRUE(rank.holds(2, 90));
    EXPECT_TRUE(rank.holds(4, 30));
    EXPECT_TRUE(rank.holds(5, 70));
    EXPECT_FALSE(rank.holds(6, 70));
  }
  EXPECT_FAILS(images_.admit_order("r1", {1}), Code::kInvalidArgument);
  EXPECT_FAILS(images_.admit_order("other", {1, 2}), Code::kNotFound);
  EXPECT_FALSE(images_.release("r2"));
  EXPECT_FALSE(images_.release("r2"));  // again
  EXPECT_EQ(images_.find("r2"), nullptr);
  const std::optional<Bytes> drop = images_.release("r1");
  ASSERT_TRUE(drop);
  EXPECT_GT(used(), 0u);
  send(*drop);
  EXPECT_EQ(used(), 0u);
  EXPECT_TRUE(images_.images().empty());
  EXPECT_FAILS(images_.verify("a"), Code::kNotFound);
}

TEST_F(RequestImagesTest, AreMadeOnAllRanksOrOnNone) {
  engine_.fails = "extract";
  EXPECT_FAILS(extract("a"), Code::kDevice);
  EXPECT_EQ(used(), 0u);
  EXPECT_TRUE(images_.images().empty());
  EXPECT_EQ(images_.find("r1"), nullptr);
  engine_.fails = "verify_image";
  ASSERT_SUCCEEDS(extract("a"));
  EXPECT_FAILS(images_.verify("a"), Code::kDevice);
  engine_.fails.clear();
  ASSERT_SUCCEEDS(images_.verify("a"));  // it is as it was
}

TEST_F(RequestImagesTest, RefuseWhatContradictsItself) {
  const auto fails = [&](std::vector<RequestState> requests, const std::vector<std::vector<int32_t>>& tables,
                         Code code) { EXPECT_FAILS(images_.extract("b", std::move(requests), tables, kTokens), code); };
  fails({}, {}, Code::kInvalidArgument);
  fails({test::running_request("r1", 8)}, {{3}}, Code::kInvalidArgument);
  fails({test::running_request("r1", 8)}, {{3, 4, 5}}, Code::kInvalidArgument);
  fails({test::running_request("r1", 8)}, {}, Code::kInvalidArgument);
  fails({test::running_request("r1", 0), test::running_request("r1", 0)}, {{}, {}}, Code::kInvalidArgument);
  fails({test::running_request("r1", 10)}, {{3, 4, 5}}, Code::kCorruption);  // it has 9 tokens
  EXPECT_FAILS(images_.extract("", {test::running_request("r1", 0)}, {{}}, kTokens), Code::kInvalidArgument);
  ASSERT_SUCCEEDS(extract("a"));
  EXPECT_FAILS(extract("a"), Code::kFailedPrecondition);
  fails({test::running_request("r1", 8)}, {{3, 4}}, Code::kFailedPrecondition);
  EXPECT_EQ(images_.images().size(), 1u);
}

}  // namespace
}  // namespace torpor
