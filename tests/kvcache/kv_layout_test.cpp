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
      for (const KvPiece& piece : layout.pieces_of(block)) {
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

}  // namespace
}  // namespace torpor
