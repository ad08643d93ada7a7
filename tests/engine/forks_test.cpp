// SPDX-License-Identifier: Apache-2.0
// Forks: which blocks children share, which they get for themselves, and that a copied block has all bytes of the one
// that it was copied from.
#include <algorithm>
#include <cstring>

#include "allocator/host_device.h"
#include "engine/forks.h"
#include "engine/rank_memory.h"
#include "tests/support/faulty_device.h"
#include "tests/support/rank_call.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::call_rank;
using test::value_of;

// 10 tokens in the prompt, 5 in the answer, the last one without KV; blocks of 4.
const ForkedRequest kParent{
    .prompt_tokens = 10, .output_tokens = 5, .computed_tokens = 14, .blocks = {7, 3, 9, 4}, .block_tokens = 4};

TEST(ForkPlan, OfAllTokensSharesFullBlocksAndCopiesTheOneThatIsHalfFull) {
  const ForkPlan plan = value_of(plan_fork(kParent, std::nullopt, 3, 3));
  EXPECT_EQ(plan.output_tokens, 5);
  EXPECT_EQ(plan.computed_tokens, 14);
  EXPECT_EQ(plan.shared_blocks, 3);
  EXPECT_EQ(plan.own_blocks, 1);
  EXPECT_EQ(plan.copied_block, 4);
}

TEST(ForkPlan, AtABordersCopiesNothing) {
  const ForkPlan plan = value_of(plan_fork(kParent, 3, 2, 2));  // 13 tokens, 12 have KV
  EXPECT_EQ(plan.computed_tokens, 12);
  EXPECT_EQ(plan.shared_blocks, 3);
  EXPECT_EQ(plan.own_blocks, 1);  // for the token that has none
  EXPECT_EQ(plan.copied_block, std::nullopt);
}

TEST(ForkPlan, AtAnEarlierTokenCopiesTheBlockOfThatPlace) {
  const ForkPlan plan = value_of(plan_fork(kParent, 1, 2, 2));  // 11 tokens, 10 have KV
  EXPECT_EQ(plan.computed_tokens, 10);
  EXPECT_EQ(plan.shared_blocks, 2);
  EXPECT_EQ(plan.own_blocks, 1);
  EXPECT_EQ(plan.copied_block, 9);
  const ForkPlan of_prompt = value_of(plan_fork(kParent, 0, 1, 1));  // its last token is computed again
  EXPECT_EQ(of_prompt.computed_tokens, 9);
  EXPECT_EQ(of_prompt.shared_blocks, 2);
  EXPECT_EQ(of_prompt.copied_block, 9);
}

TEST(ForkPlan, HalfWayThroughAPromptHasBlocksForAllOfIt) {
  ForkedRequest parent = kParent;
  parent.output_tokens = 0;
  parent.computed_tokens = 6;
  parent.blocks = {7, 3};
  const ForkPlan plan = value_of(plan_fork(parent, std::nullopt, 2, 4));
  EXPECT_EQ(plan.shared_blocks, 1);
  EXPECT_EQ(plan.own_blocks, 2);
  EXPECT_EQ(plan.copied_block, 3);
  EXPECT_FAILS(plan_fork(parent, std::nullopt, 2, 3), Code::kResourceExhausted);
}

TEST(ForkPlan, WithoutKvTakesNoBlocks) {
  ForkedRequest parent = kParent;
  parent.computed_tokens = 0;
  parent.blocks = {};
  const ForkPlan plan = value_of(plan_fork(parent, std::nullopt, 1024, 0));
  EXPECT_EQ(plan.computed_tokens, 0);
  EXPECT_EQ(plan.shared_blocks, 0);
  EXPECT_EQ(plan.own_blocks, 0);
}

TEST(ForkPlan, RefusesWhatCannotBe) {
  EXPECT_FAILS(plan_fork(kParent, 6, 1, 9), Code::kInvalidArgument);
  EXPECT_FAILS(plan_fork(kParent, -1, 1, 9), Code::kInvalidArgument);
  EXPECT_FAILS(plan_fork(kParent, std::nullopt, 0, 9), Code::kInvalidArgument);
  EXPECT_FAILS(plan_fork(kParent, std::nullopt, 1025, 9999), Code::kInvalidArgument);
  EXPECT_FAILS(plan_fork(kParent, std::nullopt, 2, 1), Code::kResourceExhausted);
  const auto contradicts = [](auto change) {
    ForkedRequest parent = kParent;
    change(parent);
    EXPECT_FAILS(plan_fork(parent, std::nullopt, 1, 9), Code::kCorruption);
  };
  contradicts([](ForkedRequest& parent) { parent.blocks.pop_back(); });
  contradicts([](ForkedRequest& parent) { parent.computed_tokens = 16; });
  contradicts([](ForkedRequest& parent) { parent.computed_tokens = -1; });
  contradicts([](ForkedRequest& parent) { parent.block_tokens = 0; });
  contradicts([](ForkedRequest& parent) { parent.prompt_tokens = 0; });
}

constexpr uint32_t kPoolBlocks = 12;
constexpr uint64_t kPieceBytes = 6000;  // of a block in a layer; two layers

class BlockCopies : public testing::Test {
 protected:
  BlockCopies() {
    auto device = std::make_unique<test::FaultyDevice>(value_of(make_host_device()));
    device_ = device.get();
    memory_ = value_of(RankMemory::create(std::move(device), linux_file_system(), {.threads = 1}));
    kv_ = value_of(memory_->allocate("kv_cache", "kv", 2 * kPoolBlocks * kPieceBytes));
    const KvTensor tensor{.address = kv_,
                          .layers = 2,
                          .layer_stride = kPoolBlocks * kPieceBytes,
                          .block_stride = kPieceBytes,
                          .block_bytes = kPieceBytes};
    EXPECT_SUCCEEDS(memory_->set_kv_layout("kv_cache", {.num_blocks = kPoolBlocks, .tensors = {tensor}}));
    for (uint32_t block = 0; block < kPoolBlocks; ++block) {
      for (uint64_t layer = 0; layer < 2; ++layer)
        std::memset(piece(block, layer), static_cast<int>(10 * block + layer), kPieceBytes);
    }
  }
  // Whether each block has the bytes that were written into block `of[its number]`.
  void expect_contents(const std::vector<uint32_t>& of) {
    for (uint32_t block = 0; block < kPoolBlocks; ++block) {
      for (uint64_t layer = 0; layer < 2; ++layer) {
        const std::byte* const begin = piece(block, layer);
        const auto wanted = static_cast<std::byte>(10 * of[block] + layer);
        EXPECT_TRUE(std::all_of(begin, begin + kPieceBytes, [&](std::byte byte) { return byte == wanted; })) << block;
      }
    }
  }
  Result<orders::CopyBlocks::Reply> copy(std::vector<int32_t> from, std::vector<int32_t> to) {
    return call_rank(*memory_, orders::CopyBlocks{.from = std::move(from), .to = std::move(to)});
  }
  std::byte* piece(uint32_t block, uint64_t layer) {
    return reinterpret_cast<std::byte*>(kv_ + (layer * kPoolBlocks + block) * kPieceBytes);  // NOLINT
  }
  test::FaultyDevice* device_ = nullptr;
  std::unique_ptr<RankMemory> memory_;
  DeviceAddress kv_ = 0;
};

TEST_F(BlockCopies, HaveAllBytesOfAllLayersAndNoOtherBlockChanges) {
  EXPECT_EQ(value_of(copy({3, 3, 5}, {8, 9, 0})).bytes, 3 * 2 * kPieceBytes);
  expect_contents({5, 1, 2, 3, 4, 5, 6, 7, 3, 3, 10, 11});
  EXPECT_EQ(value_of(copy({}, {})).bytes, 0u);
}

TEST_F(BlockCopies, WaitForTheStepThatStillWritesIntoTheirSource) {
  device_->on_synchronize([&] { std::memset(piece(3, 0), 200, kPieceBytes); });
  ASSERT_SUCCEEDS(copy({3}, {8}));
  EXPECT_EQ(*piece(8, 0), std::byte{200});
}

TEST_F(BlockCopies, ThatContradictThemselvesCopyNothing) {
  EXPECT_FAILS(copy({3}, {8, 9}), Code::kInvalidArgument);
  EXPECT_FAILS(copy({3, 4}, {8, 8}), Code::kInvalidArgument);
  EXPECT_FAILS(copy({3, 8}, {8, 9}), Code::kInvalidArgument);
  EXPECT_FAILS(copy({3}, {3}), Code::kInvalidArgument);
  EXPECT_FAILS(copy({3, 12}, {8, 9}), Code::kInvalidArgument);
  EXPECT_FAILS(copy({3, 3}, {8, -1}), Code::kInvalidArgument);
  expect_contents({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
}

TEST_F(BlockCopies, SayWhatTheDeviceSaid) {
  for (const uint64_t call : {1, 2}) {
    device_->fail_at(call);
    EXPECT_FAILS(copy({3}, {8}), Code::kDevice);
    ASSERT_TRUE(device_->fired());
    device_->fail_at(0);
  }
  ASSERT_SUCCEEDS(copy({3}, {8}));
}

TEST_F(BlockCopies, NeedTheKvCache) {
  ASSERT_SUCCEEDS(call_rank(*memory_, orders::Save{.tags = {"kv_cache"}, .blocks = {1}}));
  ASSERT_SUCCEEDS(call_rank(*memory_, orders::Detach{.tags = {"kv_cache"}}));
  EXPECT_FAILS(copy({3}, {8}), Code::kFailedPrecondition);
}

}  // namespace
}  // namespace torpor
