// SPDX-License-Identifier: Apache-2.0
// Chunks that are packed in host memory: what they take there, that they come back, and what a full arena must not
// hinder.
#include <numeric>

#include "offload/bf16_codec.h"
#include "tests/offload/transfer_engine_scene.h"
#include "tests/support/bf16_bytes.h"

namespace torpor {
namespace {

constexpr uint64_t kChunk = 64 * kKiB;

std::vector<std::byte> values(uint64_t seed, size_t size = kChunk) { return test::bf16_values(seed, size); }
std::vector<std::byte> noise(uint64_t seed, size_t size = kChunk) { return test::noise(seed, size); }

class PackedTier : public ::testing::Test {
 protected:
  SavedChunk put(std::vector<std::byte> bytes, uint64_t index = 0) {
    SavedChunk chunk{.key = {.tag = "t", .region = "r", .index = index}, .bytes = bytes.size()};
    RecordPart part{&chunk, bytes, ok()};
    tier_.put({&part, 1});
    EXPECT_SUCCEEDS(part.status);
    return chunk;
  }
  std::vector<std::byte> get(const SavedChunk& chunk) {
    std::vector<std::byte> bytes(chunk.bytes);
    EXPECT_SUCCEEDS(tier_.get_one(chunk, bytes));
    return bytes;
  }
  std::unique_ptr<HostArena> arena_ = value_of(HostArena::create({.budget_bytes = kMiB, .slab_bytes = kMiB}));
  HostTier tier_{*arena_, Codec::kBf16};
};

TEST_F(PackedTier, ValuesTakeThreeQuartersAndComeBack) {
  EXPECT_FALSE(tier_.traits().addressable);
  EXPECT_TRUE(tier_.traits().in_memory);
  const SavedChunk chunk = put(values(1));
  EXPECT_EQ(chunk.codec, Codec::kBf16);
  EXPECT_LE(chunk.stored_bytes, kChunk * 77 / 100);
  EXPECT_LE(arena_->info().used_bytes, kChunk * 82 / 100) << "with the rest of its last page";
  EXPECT_TRUE(tier_.view(chunk).empty()) << "nobody may take packed bytes for the chunk's";
  EXPECT_EQ(get(chunk), values(1));
}

TEST_F(PackedTier, WhatDoesNotGetSmallerLiesThereAsItIs) {
  for (const std::vector<std::byte>& bytes : {noise(1), noise(2, 1), noise(3, kChunk - 1)}) {
    const SavedChunk chunk = put(bytes);
    EXPECT_EQ(chunk.codec, Codec::kNone);
    EXPECT_EQ(chunk.stored_bytes, bytes.size());
    EXPECT_EQ(get(chunk), bytes);
  }
}

TEST_F(PackedTier, HoldsAThirdMoreThanTheBudget) {
  constexpr uint64_t kBudget = 32 * kMiB;
  constexpr uint64_t kMany = 42;  // of a MiB
  const auto arena = value_of(HostArena::create({.budget_bytes = kBudget, .slab_bytes = kMiB}));
  HostTier tier(*arena, Codec::kBf16);
  ASSERT_SUCCEEDS(tier.prepare(kMany * kMiB, kMany));
  std::vector<SavedChunk> chunks(kMany);
  for (uint64_t i = 0; i < kMany; ++i) {
    chunks[i].bytes = kMiB;
    std::vector<std::byte> bytes = values(i, kMiB);
    RecordPart part{&chunks[i], bytes, ok()};
    tier.put({&part, 1});
    ASSERT_SUCCEEDS(part.status);
  }
  std::vector<std::byte> bytes(kMiB);
  for (uint64_t i = 0; i < kMany; ++i) {
    ASSERT_SUCCEEDS(tier.get_one(chunks[i], bytes));
    ASSERT_EQ(bytes, values(i, kMiB));
  }
  EXPECT_LE(arena->info().held_bytes, kBudget);
}

TEST_F(PackedTier, WhatCannotFitHoweverPackedIsRefusedBeforeAnythingIsWritten) {
  EXPECT_FAILS(tier_.prepare(kMiB * 14 / 10, 1), Code::kResourceExhausted, "budget");
  // What could have fitted, and did not get smaller.
  ASSERT_SUCCEEDS(tier_.prepare(kMiB * 13 / 10, 1));
  Status last;
  for (uint64_t i = 0; i < 21 && last; ++i) {
    SavedChunk chunk{.bytes = kChunk};
    std::vector<std::byte> bytes = noise(i);
    RecordPart part{&chunk, bytes, ok()};
    tier_.put({&part, 1});
    last = part.status;
  }
  EXPECT_FAILS(last, Code::kResourceExhausted, "budget");
}

TEST_F(PackedTier, ADamagedChunkIsNamed) {
  SavedChunk chunk = put(values(1), 7);
  HostArena::Span memory = tier_.release(chunk);
  ASSERT_EQ(memory.bytes().size(), chunk.stored_bytes);
  memory.bytes()[0] = std::byte{255};  // no such base
  tier_.adopt(chunk, std::move(memory));
  std::vector<std::byte> bytes(chunk.bytes);
  const Status damaged = tier_.get_one(chunk, bytes);
  EXPECT_FAILS(damaged, Code::kCorruption, "t/r[7]");
  EXPECT_NE(damaged.error().next_step.find("load it again"), std::string::npos);
  --chunk.stored_bytes;
  EXPECT_FAILS(tier_.get_one(chunk, bytes), Code::kInternal, "t/r[7] is not in the host tier");
}

TEST_F(PackedTier, WhatIsReleasedIsTakenOverByAnotherAsItIs) {
  std::vector<SavedChunk> chunks{put(values(1)), put(noise(2))};
  HostTier other(*arena_, Codec::kBf16);
  for (SavedChunk& chunk : chunks) {
    HostArena::Span memory = tier_.release(chunk);
    ASSERT_FALSE(memory.empty());
    other.adopt(chunk, std::move(memory));
  }
  std::vector<std::byte> lent = values(3);
  SavedChunk borrowed{.bytes = kChunk};
  other.borrow(borrowed, lent, Codec::kNone, nullptr);
  chunks.push_back(borrowed);
  const std::vector<std::vector<std::byte>> expected{values(1), noise(2), lent};
  for (size_t i = 0; i < chunks.size(); ++i) {
    std::vector<std::byte> bytes(kChunk);
    ASSERT_SUCCEEDS(other.get_one(chunks[i], bytes));
    EXPECT_EQ(bytes, expected[i]);
  }
}

// --- through the transfer engine ---

class PackedTransfers : public TransferEngineTest {
 protected:
  void SetUp() override {
    TransferEngineTest::SetUp();
    original_ = values(1, kBytes / 2);
    original_.resize(kBytes);
    const std::vector<std::byte> rest = noise(2, kBytes / 2);
    std::copy(rest.begin(), rest.end(), original_.begin() + kBytes / 2);  // each chunk has a piece of both
    std::copy(original_.begin() + kBytes / 4, original_.begin() + kBytes / 2, original_.begin() + 3 * kBytes / 4);
    std::copy(original_.begin(), original_.end(), bytes());
  }
};
INSTANTIATE_TEST_SUITE_P(Device, PackedTransfers, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "LateCopies" : "CopiesAtOnce"; });

TEST_P(PackedTransfers, BytesComeBackThroughThreadsForMemory) {
  HostTier tier(*arena_, Codec::kBf16);
  const std::vector<SavedChunk> saved = value_of(blocking_->save(plans_, tier));
  const auto packed =
      std::count_if(saved.begin(), saved.end(), [](const SavedChunk& chunk) { return chunk.codec == Codec::kBf16; });
  EXPECT_EQ(packed, std::ssize(saved) / 2) << "those all of whose values are bf16's";
  std::memset(bytes(), 0, kBytes);
  ASSERT_SUCCEEDS(blocking_->restore(saved, plans_, tier));
  EXPECT_TRUE(content_is_original());
}

TEST_P(PackedTransfers, AWrongByteInAPackedChunkFailsThatChunkAlone) {
  HostTier tier(*arena_, Codec::kBf16);
  std::vector<SavedChunk> saved = value_of(blocking_->save(plans_, tier));
  const auto packed =
      std::find_if(saved.begin(), saved.end(), [](const SavedChunk& chunk) { return chunk.codec == Codec::kBf16; });
  HostArena::Span memory = tier.release(*packed);
  memory.bytes()[memory.bytes().size() / 2] ^= std::byte{1};
  tier.adopt(*packed, std::move(memory));
  std::memset(bytes(), 0, kBytes);
  EXPECT_FAILS(blocking_->restore(saved, plans_, tier), Code::kCorruption, packed->key.to_string());
  const JobResult result = transfers_->wait(value_of(transfers_->submit(job(JobKind::kRestore, &tier, saved))));
  EXPECT_EQ(ended_as(result, BlockOutcome::kFailed), 1u);
  EXPECT_EQ(ended_as(result, BlockOutcome::kTransferred), kChunks - 1);
}

TEST_P(PackedTransfers, AFullArenaHindersNoWakeForWhichStagingMemoryIsKept) {
  for (const bool kept : {false, true}) {
    SCOPED_TRACE(kept);
    std::copy(original_.begin(), original_.end(), bytes());
    transfers_ = nullptr;
    arena_ = value_of(HostArena::create({.budget_bytes = 4 * kMiB, .slab_bytes = 4 * kMiB}));
    use({.threads = 3});
    ASSERT_SUCCEEDS(transfers_->keep_staging(kept ? TransferEngine::most_staging(kBytes / 2, kBytes / 2, kPage) : 0));
    HostTier tier(*arena_, Codec::kBf16);
    const std::vector<SavedChunk> saved = value_of(blocking_->save(plans_, tier));
    transfers_->release_staging();
    std::vector<HostArena::Span> others;
    while (true) {
      HostArena::Span next = arena_->allocate_held(kPage);
      if (next.empty()) break;
      others.push_back(std::move(next));
    }
    std::memset(bytes(), 0, kBytes);
    const Status restored = blocking_->restore(saved, plans_, tier);
    EXPECT_EQ(restored.has_value(), kept);
    EXPECT_EQ(content_is_original(), kept);
    transfers_->let_staging_go();
    EXPECT_EQ(arena_->allocate_held(kPage).empty(), !kept);
  }
}

TEST_P(PackedTransfers, StagingMemoryThatHasNoRoomIsAnErrorAndNoneStays) {
  EXPECT_FAILS(transfers_->keep_staging(1ull << 60), Code::kResourceExhausted);
  ASSERT_SUCCEEDS(transfers_->keep_staging(kPage));
  const uint64_t used = arena_->info().used_bytes;
  EXPECT_EQ(used, transfers_->memory_batches() * kPage);
  ASSERT_SUCCEEDS(transfers_->keep_staging(kPage)) << "again: nothing";
  EXPECT_EQ(arena_->info().used_bytes, used);
  EXPECT_FAILS(transfers_->keep_staging(1ull << 60), Code::kResourceExhausted);
  EXPECT_EQ(arena_->info().used_bytes, used) << "what was kept is still needed";
  transfers_->let_staging_go();
  EXPECT_EQ(arena_->info().used_bytes, 0u);
}

TEST_P(PackedTransfers, StagingMemoryIsKeptWhenTheCopiesUnderWayHaveEnded) {
  HeldTier held;
  const JobId slow = value_of(transfers_->submit(job(JobKind::kSave, &held)));
  HostTier tier(*arena_, Codec::kBf16);
  const JobId packs = value_of(transfers_->submit(job(JobKind::kSave, &tier)));
  ASSERT_SUCCEEDS(transfers_->keep_staging(kBytes));  // the held one is in the other lane, which nobody waits for
  EXPECT_SUCCEEDS(transfers_->wait(packs).status);
  held.resume();
  EXPECT_SUCCEEDS(transfers_->wait(slow).status);
}

}  // namespace
}  // namespace torpor
