// SPDX-License-Identifier: Apache-2.0
#include "kvcache/kv_layout.h"

#include <set>

#include "tests/support/results.h"

namespace torpor {
namespace {

KvLayout layers_outermost() {
  return {.num_blocks = 4,
          .tensors = {{.address = 1000, .layers = 3, .layer_stride = 400, .block_stride = 100, .block_bytes = 100}}};
}
KvLayout blocks_outermost() {
  return {.num_blocks = 4,
          .tensors = {{.address = 1000, .layers = 3, .layer_stride = 100, .block_stride = 300, .block_bytes = 100}}};
}

TEST(KvLayout, PiecesCoverEveryByteOfTheTensorOnce) {
  for (const KvLayout& layout : {layers_outermost(), blocks_outermost()}) {
    ASSERT_SUCCEEDS(layout.validate());
    std::set<uint64_t> bytes;
    for (uint32_t block = 0; block < layout.num_blocks; ++block) {
      uint64_t sum = 0;
      for (const DevicePiece& piece : layout.pieces_of(block)) {
        sum += piece.bytes;
        for (uint64_t i = 0; i < piece.bytes; ++i) EXPECT_TRUE(bytes.insert(piece.address + i).second);
      }
      EXPECT_EQ(sum, layout.bytes_per_block());
    }
    EXPECT_EQ(bytes.size(), 1200u);
    EXPECT_EQ(*bytes.begin(), 1000u);
    EXPECT_EQ(*bytes.rbegin(), 2199u);
  }
}

TEST(KvLayout, NeighbouringPiecesAreJoined) {
  EXPECT_EQ(layers_outermost().pieces_of(1).size(), 3u);
  EXPECT_EQ(blocks_outermost().pieces_of(1).size(), 1u);
}

TEST(KvLayout, WhatCannotBeIsRefused) {
  const auto changed = [](auto change) {
    KvLayout layout = layers_outermost();
    change(layout, layout.tensors[0]);
    return layout.validate();
  };
  EXPECT_FAILS(changed([](KvLayout& l, KvTensor&) { l.num_blocks = 0; }), Code::kInvalidArgument);
  EXPECT_FAILS(changed([](KvLayout& l, KvTensor&) { l.tensors.clear(); }), Code::kInvalidArgument);
  EXPECT_FAILS(changed([](KvLayout&, KvTensor& t) { t.address = 0; }), Code::kInvalidArgument, "tensor 0");
  EXPECT_FAILS(changed([](KvLayout&, KvTensor& t) { t.layers = 0; }), Code::kInvalidArgument);
  EXPECT_FAILS(changed([](KvLayout&, KvTensor& t) { t.block_bytes = 0; }), Code::kInvalidArgument);
  EXPECT_FAILS(changed([](KvLayout&, KvTensor& t) { t.block_bytes = 101; }), Code::kInvalidArgument, "overlap");
  EXPECT_FAILS(changed([](KvLayout&, KvTensor& t) { t.layer_stride = 399; }), Code::kInvalidArgument, "overlap");
  EXPECT_FAILS(changed([](KvLayout&, KvTensor& t) { t.layer_stride = UINT64_MAX / 2; }), Code::kInvalidArgument,
               "too large");
  EXPECT_FAILS(changed([](KvLayout&, KvTensor& t) { t.address = UINT64_MAX - 10; }), Code::kInvalidArgument,
               "too large");
}

// Every byte that a layout's tensors name for a block, each once.
std::set<uint64_t> named_bytes(const KvLayout& layout, uint32_t block) {
  std::set<uint64_t> bytes;
  for (const KvTensor& tensor : layout.tensors) {
    for (uint32_t layer = 0; layer < tensor.layers; ++layer) {
      const uint64_t begin = tensor.address + layer * tensor.layer_stride + block * tensor.block_stride;
      for (uint64_t i = 0; i < tensor.block_bytes; ++i) bytes.insert(begin + i);
    }
  }
  return bytes;
}

// As vLLM lays out several KV groups: each begins at the first byte, a block belongs to one of them.
std::vector<KvLayout> groups_over_one_another() {
  const KvTensor three_layers = layers_outermost().tensors[0];
  KvTensor two_layers = three_layers, one_short_layer = three_layers;
  two_layers.layers = 2;
  one_short_layer.layers = 1;
  one_short_layer.block_bytes = 60;  // in pages as large as the others'
  const KvTensor interleaved{
      .address = 1000, .layers = 3, .layer_stride = 100, .block_stride = 400, .block_bytes = 100};
  const KvTensor one_large{.address = 1000, .layers = 1, .layer_stride = 1, .block_stride = 400, .block_bytes = 350};
  const KvTensor shifted{.address = 1050, .layers = 2, .layer_stride = 170, .block_stride = 400, .block_bytes = 170};
  return {{.num_blocks = 4, .tensors = {three_layers, three_layers, two_layers, one_short_layer}},
          {.num_blocks = 4, .tensors = {one_short_layer, two_layers}},
          {.num_blocks = 4, .tensors = {interleaved, one_large}},
          {.num_blocks = 4, .tensors = {interleaved, shifted, interleaved}},
          {.num_blocks = 1, .tensors = {interleaved, three_layers}}};
}

TEST(KvLayout, GroupsOverOneAnotherAreMergedToEachByteOnce) {
  for (const KvLayout& layout : groups_over_one_another()) {
    ASSERT_SUCCEEDS(layout.validate());
    const KvLayout merged = layout.merged();
    ASSERT_SUCCEEDS(merged.validate());
    EXPECT_EQ(merged.merged(), merged);
    std::set<uint64_t> all;
    for (uint32_t block = 0; block < layout.num_blocks; ++block) {
      std::set<uint64_t> bytes;
      for (const DevicePiece& piece : merged.pieces_of(block)) {
        for (uint64_t i = 0; i < piece.bytes; ++i) {
          EXPECT_TRUE(bytes.insert(piece.address + i).second);
          EXPECT_TRUE(all.insert(piece.address + i).second) << "it belongs to another block, too";
        }
      }
      EXPECT_EQ(bytes, named_bytes(layout, block));
      EXPECT_EQ(bytes.size(), merged.bytes_per_block());
    }
  }
}

TEST(KvLayout, WithoutGroupsOverOneAnotherMergingChangesNothing) {
  KvLayout side_by_side = layers_outermost();
  side_by_side.tensors.push_back(
      {.address = 2200, .layers = 2, .layer_stride = 40, .block_stride = 10, .block_bytes = 10});
  KvLayout in_gaps = blocks_outermost();
  in_gaps.tensors[0].block_stride = 400;
  in_gaps.tensors.push_back({.address = 1300, .layers = 1, .layer_stride = 1, .block_stride = 400, .block_bytes = 100});
  for (const KvLayout& layout : {layers_outermost(), blocks_outermost(), side_by_side, in_gaps}) {
    ASSERT_SUCCEEDS(layout.validate());
    EXPECT_EQ(layout.merged(), layout);
  }
}

TEST(KvLayout, ATensorOverOtherBlocksOfAnotherIsRefused) {
  const auto beside = [](KvLayout layout, auto change) {
    layout.tensors.push_back(layout.tensors[0]);
    change(layout.tensors[1]);
    return layout.validate();
  };
  for (const uint64_t by : {1, 99, 100, 101, 250, 399}) {  // block 0 lies over block 1, 2 or 3 of the first tensor
    EXPECT_FAILS(beside(layers_outermost(), [&](KvTensor& t) { t.address += by; }), Code::kInvalidArgument, "tensor 1");
    EXPECT_FAILS(beside(layers_outermost(), [&](KvTensor& t) { t.address -= by; }), Code::kInvalidArgument, "tensor 1");
  }
  EXPECT_FAILS(beside(blocks_outermost(), [](KvTensor& t) { t.address += 1; }), Code::kInvalidArgument, "other blocks");
  EXPECT_FAILS(beside(layers_outermost(), [](KvTensor& t) { t.block_stride = t.block_bytes = 50; }),
               Code::kInvalidArgument, "other blocks");
  EXPECT_SUCCEEDS(beside(layers_outermost(), [](KvTensor& t) { t.address += 1200; }));
  EXPECT_SUCCEEDS(beside(layers_outermost(), [](KvTensor& t) { t.address += 400; }));  // layer over layer
}

}  // namespace
}  // namespace torpor
