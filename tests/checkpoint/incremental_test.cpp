// Chunks that an earlier checkpoint has, retention that keeps what is needed, repair, progress, and prefix hashes.
#include <random>

#include <fmt/format.h>

#include "checkpoint/prefix_hash.h"
#include "checkpoint/repair.h"
#include "checkpoint/retention.h"
#include "checkpoint/verify.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

using test::example_checkpoint;
using test::value_of;

class Incremental : public ::testing::Test {
 protected:
  std::unique_ptr<CheckpointManager> manager(CheckpointManagerOptions options = {.retention = {.keep = 9},
                                                                                 .incremental = true}) {
    return value_of(CheckpointManager::open(system_, "/store", std::move(options)));
  }
  Bytes& bytes(const std::string& path) { return system_.disk()[static_cast<size_t>(system_.find(path))].bytes; }
  std::vector<std::string> names() {
    std::vector<std::string> names;
    for (const CheckpointInfo& info : value_of(manager()->list())) names.push_back(info.name);
    return names;
  }
  test::ModelFileSystem system_;
};

TEST_F(Incremental, WhatAnEarlierOneHasIsNamedAndNotWritten) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  const Checkpoint third = value_of(open_checkpoint(system_, "/store/g-000003"));
  ASSERT_EQ(third.manifest().ranks[0].files.size(), 2u);
  EXPECT_EQ(third.manifest().ranks[0].files[1].generation, 1u);  // where the bytes are, not by way of the second
  EXPECT_EQ(bytes("/store/g-000003/chunks-r0").size(), 4096u);
  EXPECT_TRUE(value_of(verify(third)).problems.empty());
}

TEST_F(Incremental, ChangesWithoutEndDoNotKeepEverything) {
  CheckpointManagerOptions options{.retention = {.keep = 1}, .incremental = true};
  uint64_t most_stored = 0;
  size_t most_checkpoints = 0;
  std::vector<uint64_t> content(40);  // of each block: a number that changes now and then
  std::mt19937_64 random(3);
  for (int round = 0; round < 300; ++round) {
    for (int i = 0; i < 8; ++i) content[random() % content.size()] = random();
    PendingCheckpoint pending = value_of(manager(options)->begin(0));
    ASSERT_SUCCEEDS(pending.write_state(example_checkpoint()));
    const std::unique_ptr<DiskTier> tier = value_of(pending.create_chunks(0));
    std::vector<SavedChunk> chunks;
    for (size_t i = 0; i < content.size(); ++i) {
      std::vector<std::byte> bytes(4096);
      std::memcpy(bytes.data(), &content[i], 8);
      SavedChunk& chunk =
          chunks.emplace_back(SavedChunk{.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = i},
                                         .bytes = bytes.size(),
                                         .digest = digest_of(bytes)});
      TierPart part{&chunk, bytes, ok()};
      tier->put({&part, 1});
      ASSERT_SUCCEEDS(part.status);
    }
    ASSERT_SUCCEEDS(tier->finish());
    pending.add_rank(finished_rank(pending.writing(), 0, tier->file_bytes(), chunks));
    ASSERT_SUCCEEDS(pending.commit());
    pending.retire_older();
    uint64_t stored = 0;
    for (const std::string& name : names()) stored += bytes("/store/" + name + "/chunks-r0").size();
    most_stored = std::max(most_stored, stored);
    most_checkpoints = std::max(most_checkpoints, names().size());
  }
  // The newest and the one before it are kept, each with its run: one whole, the others with what changed, and their
  // heads.
  EXPECT_LE(most_stored, 2 * (40 + (kIncrementalRun - 1) * 8 + kIncrementalRun) * 4096);
  EXPECT_LE(most_checkpoints, 2 * kIncrementalRun);
  EXPECT_TRUE(value_of(verify(value_of(manager(options)->open_latest()))).problems.empty());
}

TEST_F(Incremental, WhatChangedIsWrittenAgain) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  PendingCheckpoint pending = value_of(manager()->begin(0));
  const std::unique_ptr<DiskTier> tier = value_of(pending.create_chunks(0));
  std::vector<std::byte> same = test::example_block(1);
  std::vector<std::byte> changed = test::example_block(77);  // as many bytes
  for (const bool is_same : {true, false}) {
    std::vector<std::byte>& bytes = is_same ? same : changed;
    SavedChunk chunk{.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = 1},
                     .bytes = bytes.size(),
                     .digest = digest_of(bytes)};
    TierPart part{&chunk, bytes, ok()};
    tier->put({&part, 1});
    ASSERT_SUCCEEDS(part.status);
    EXPECT_EQ(chunk.file, is_same ? 1u : 0u);  // the earlier one's, or its own
  }
}

TEST_F(Incremental, WhatAKeptOneNeedsIsNeverRemoved) {
  for (int i = 0; i < 3; ++i) ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  ASSERT_SUCCEEDS(manager()->woken_from(3));
  EXPECT_FAILS(manager()->remove(1), Code::kFailedPrecondition, "g-000002");
  EXPECT_EQ(value_of(manager({.retention = {.keep = 1}})->collect(true)), (std::vector<std::string>{"g-000002"}));
  ASSERT_SUCCEEDS(manager({.retention = {.keep = 1}})->collect());
  EXPECT_EQ(names(), (std::vector<std::string>{"g-000001", "g-000003"}));
  EXPECT_TRUE(value_of(verify(value_of(manager()->open_latest()))).problems.empty());
}

TEST_F(Incremental, AnotherGenerationOfThatNumberIsNotMistakenForIt) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  test::ModelFileSystem other;
  ASSERT_SUCCEEDS(test::write_checkpoint(*value_of(CheckpointManager::open(other, "/store"))));
  bytes("/store/g-000001/MANIFEST") = other.disk()[static_cast<size_t>(other.find("/store/g-000001/MANIFEST"))].bytes;
  const Verification found = value_of(verify(value_of(manager()->open_latest())));
  ASSERT_FALSE(found.problems.empty());
  EXPECT_NE(found.problems[0].what.find("another g-000001"), std::string::npos);
}

TEST_F(Incremental, ChunksAreCompressedWhereThatPays) {
  CheckpointManagerOptions options{.compression = {.level = 3, .long_distance = true}};
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager(options)));
  const Checkpoint checkpoint = value_of(manager()->open_latest());
  for (const SavedChunk& chunk : checkpoint.manifest().ranks[0].chunks) {
    EXPECT_EQ(chunk.codec, Codec::kZstd);
    EXPECT_LT(chunk.stored_bytes, 50u);
  }
  EXPECT_TRUE(value_of(verify(checkpoint)).problems.empty());
  options.compression.level = 40;
  EXPECT_FAILS(CheckpointManager::open(system_, "/store", options), Code::kInvalidArgument, "40");
}

TEST_F(Incremental, ProgressIsToldAndCancellingLeavesTheOldOneWhole) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  std::vector<std::string> phases;
  int left = 1000;
  CheckpointManagerOptions options;
  options.progress = [&](const Progress& progress) {
    phases.emplace_back(progress.phase);
    return --left > 0;
  };
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager(options)));
  EXPECT_EQ(phases.front(), "writing the state");
  EXPECT_EQ(phases.back(), "writing the chunks of rank 0");
  const size_t calls = phases.size();
  for (size_t n = 1; n <= calls; ++n) {
    left = static_cast<int>(n);
    EXPECT_FAILS(test::write_checkpoint(*manager(options)), Code::kAborted, "cancelled");
    EXPECT_EQ(names(), (std::vector<std::string>{"g-000001", "g-000002"}));
  }
}

TEST(Retention, CountAgeAndSizeNeverTakeTheLastGoodOne) {
  std::vector<CheckpointInfo> infos;
  for (uint64_t generation = 1; generation <= 6; ++generation) {
    CheckpointInfo info{.readable = true, .bytes = 100};
    info.manifest.generation = generation;
    info.manifest.created_unix_seconds = static_cast<double>(generation) * 100;
    infos.push_back(info);
  }
  using Gone = std::vector<uint64_t>;
  EXPECT_EQ(retired(infos, {.keep = 3}, 600), (Gone{1, 2, 3}));
  EXPECT_EQ(retired(infos, {.keep = 9, .max_age_seconds = 250}, 600), (Gone{1, 2, 3}));
  EXPECT_EQ(retired(infos, {.keep = 9, .max_total_bytes = 350}, 600), (Gone{1, 2, 3}));
  EXPECT_EQ(retired(infos, {.keep = 1, .max_age_seconds = 0, .max_total_bytes = 0}, 1e9), (Gone{1, 2, 3, 4}));
  infos[1].woken = true;
  EXPECT_EQ(retired(infos, {.keep = 1}, 600), (Gone{1, 3, 4}));
  infos[5].woken = true;
  EXPECT_EQ(retired(infos, {.keep = 1}, 600), (Gone{1, 2, 3, 4, 5}));
  infos[5].needs = {3};
  EXPECT_EQ(retired(infos, {.keep = 1}, 600), (Gone{1, 2, 4, 5}));
  infos[4].readable = false;
  EXPECT_TRUE(retired(infos, {.keep = 1}, 600).empty());
}

TEST_F(Incremental, RepairKeepsTheRequestsThatAreWhole) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  bytes("/store/g-000001/chunks-r0")[3 * 4096 + 5] ^= 1;  // of the third chunk: block 3, of the request "held"
  const Checkpoint damaged = value_of(manager()->open_latest());
  const Verification found = value_of(verify(damaged));
  EXPECT_EQ(found.bad_blocks, (std::vector<int32_t>{3}));
  const RepairPlan plan = value_of(plan_repair(damaged, found));
  ASSERT_EQ(plan.dropped_requests.size(), 1u);
  EXPECT_EQ(plan.dropped_requests[0].id, "held");
  ASSERT_SUCCEEDS(write_repaired(damaged, plan, *manager({.retention = {.keep = 9}})));
  const Checkpoint repaired = value_of(open_checkpoint(system_, "/store/g-000002"));
  EXPECT_TRUE(value_of(verify(repaired)).problems.empty());
  const EngineCheckpoint state = value_of(repaired.read_state());
  ASSERT_SUCCEEDS(state.state.validate());
  EXPECT_EQ(state.state.scheduler.requests.size(), 2u);
  EXPECT_EQ(state.state.scheduler.running, (std::vector<std::string>{"run"}));
  EXPECT_EQ(state.state.kv.blocks.size(), 3u);
  EXPECT_EQ(state.outputs, example_checkpoint().outputs);
}

TEST_F(Incremental, RepairDropsARequestForABlockOfAnyGroup) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager(), test::example_of_two_groups()));
  bytes("/store/g-000001/chunks-r0")[5 * 4096 + 5] ^= 1;  // of the fifth chunk: block 5, of the window of "run"
  const Checkpoint damaged = value_of(manager()->open_latest());
  const Verification found = value_of(verify(damaged));
  EXPECT_EQ(found.bad_blocks, (std::vector<int32_t>{5}));
  const RepairPlan plan = value_of(plan_repair(damaged, found));
  ASSERT_EQ(plan.dropped_requests.size(), 1u);
  EXPECT_EQ(plan.dropped_requests[0].id, "run");
  ASSERT_SUCCEEDS(write_repaired(damaged, plan, *manager({.retention = {.keep = 9}})));
  const Checkpoint repaired = value_of(open_checkpoint(system_, "/store/g-000002"));
  EXPECT_TRUE(value_of(verify(repaired)).problems.empty());
  const EngineCheckpoint state = value_of(repaired.read_state());
  ASSERT_SUCCEEDS(state.state.validate());
  for (const KvGroup& group : state.state.kv.groups) EXPECT_EQ(group.tables.size(), 1u);
  EXPECT_EQ(state.state.kv.blocks.size(), 4u);  // 1, 3, 6 of "held"; 4
}

TEST_F(Incremental, WhatNamesNothingAnyMoreCannotBeRepaired) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  bytes("/store/g-000001/STATE")[3] ^= 1;
  const Checkpoint damaged = value_of(manager()->open_latest());
  EXPECT_FAILS(plan_repair(damaged, value_of(verify(damaged))), Code::kCorruption, "cannot be repaired");
}

// Expected values: vLLM 0.32, hash_block_tokens() with sha256 and sha256_cbor, NONE_HASH of the seed "vllm-none-hash".
TEST(PrefixHasher, GivesTheHashesThatVllmGives) {
  const std::vector<int32_t> tokens = {1, 300, 70000, 255};
  const std::vector<int32_t> few = {7, 8};
  struct Expected {
    const char* algorithm;
    const char* plain;
    const char* salted;
    const char* second;
  };
  const Expected all[] = {
      {"sha256", "2dba56d4d51c3deb70da7f576f32d5e108d598df9aa8e9970eeb7b291ecc0ae4",
       "7b0274a8a7e2abf456a62d1f63d13e3cc103d54d75c3a0475d09e6421653f56f",
       "e2107e487a89bcd90f184b852a7583e06693842baa241c69067aaad00debac8f"},
      {"sha256_cbor", "81efe9fd9b3f4ca8c40a4eb7c121ef8e8f845e891294bd43d7d7ed87362cb9fd",
       "677349545477daff76a6d821ae320a4c8e312857b1fb18ad4b3fbcce34d28a2e",
       "59b294eb4c95249124410bfcbdd2e96edf9fca69e78ee05639f398c103cc0574"},
  };
  for (const Expected& expected : all) {
    const auto hasher = PrefixHasher::of(fmt::format("{}, seed vllm-none-hash", expected.algorithm));
    ASSERT_NE(hasher, nullptr);
    const Bytes first = hasher->next(hasher->first(), tokens, std::nullopt).value();
    EXPECT_EQ(hex(first), expected.plain);
    EXPECT_EQ(hex(hasher->next(hasher->first(), tokens, "salt").value()), expected.salted);
    EXPECT_EQ(hex(hasher->next(first, few, std::nullopt).value()), expected.second);
  }
  EXPECT_EQ(PrefixHasher::of("xxhash, seed 1"), nullptr);
  EXPECT_EQ(PrefixHasher::of("nonsense"), nullptr);
  const std::vector<int32_t> many(40'000, 70'000);
  EXPECT_FALSE(PrefixHasher::of("sha256, seed s")->next({}, many, std::nullopt).has_value());
}

// A state whose hashes follow from its tokens: two groups, of 4 and of 8 tokens a block, 4 tokens a hash.
EngineCheckpoint hashed_example() {
  EngineCheckpoint checkpoint = example_checkpoint();
  const std::string seed = "sha256, seed s";
  checkpoint.fingerprint = {{"prefix_hash", seed}, {"prefix_hash_tokens", "4"}};
  SchedulerSnapshot& scheduler = checkpoint.state.scheduler;
  scheduler.requests = {test::example_request("run", RequestStatus::kRunning, 13, 0, 13)};
  scheduler.waiting = scheduler.held = {};
  RequestState& request = scheduler.requests[0];
  const auto hasher = PrefixHasher::of(seed);
  std::vector<Bytes> chain = {hasher->first()};
  request.block_hashes.clear();
  for (size_t i = 0; i < 3; ++i) {
    const auto tokens = std::span(request.prompt_token_ids).subspan(i * 4, 4);
    chain.push_back(hasher->next(chain.back(), tokens, std::nullopt).value());
    request.block_hashes.insert(request.block_hashes.end(), chain.back().begin(), chain.back().end());
  }
  request.block_hash_bytes = 32;
  const auto key = [&](size_t hash, uint8_t group) {
    Bytes key = chain[hash];
    for (const uint8_t byte : {uint8_t{0}, uint8_t{0}, uint8_t{0}, group}) key.push_back(byte);
    return key;
  };
  KvSnapshot& kv = checkpoint.state.kv;
  kv.groups = {{.block_size = 4, .tables = {{"run", {0, 2, 3, 4}, 3}}},
               {.block_size = 8, .tables = {{"run", {5, 6}, 1}}}};
  // Block 6 is cached in part: the first half of it.
  kv.blocks = {{2, 1, key(2, 0), 8}, {3, 1, key(3, 0), 12}, {4, 1, {}, 0}, {5, 1, key(2, 1), 8}, {6, 1, key(3, 1), 12}};
  kv.prefix_index.clear();
  for (const KvBlock& block : kv.blocks) {
    if (!block.hash.empty()) kv.prefix_index.push_back({block.hash, {block.id}});
  }
  kv.free_order = {1, 7};
  return checkpoint;
}

TEST_F(Incremental, HashesAreCheckedInGroupsWithBlocksOfDifferentSizes) {
  const auto verified = [&](const EngineCheckpoint& state) {
    const std::string path = value_of(test::write_checkpoint(*manager({.retention = {.keep = 9}}), state));
    return value_of(verify(value_of(open_checkpoint(system_, path))));
  };
  const auto rekeyed = [](EngineCheckpoint state, size_t block, Bytes hash) {
    for (PrefixEntry& entry : state.state.kv.prefix_index) {
      if (entry.hash == state.state.kv.blocks[block].hash) entry.hash = hash;
    }
    state.state.kv.blocks[block].hash = std::move(hash);
    return state;
  };
  const EngineCheckpoint whole = hashed_example();
  EXPECT_EQ(verified(whole).hashes_not_checked, "");
  EXPECT_TRUE(verified(whole).problems.empty());
  EXPECT_EQ(verified(whole).hashes, 3u);
  for (const size_t block : {0u, 1u, 3u, 4u}) {
    Bytes hash = whole.state.kv.blocks[block].hash;
    hash.back() = 2;  // the key of another group
    const Verification found = verified(rekeyed(whole, block, hash));
    ASSERT_EQ(found.problems.size(), 1u) << block;
    EXPECT_NE(found.problems[0].what.find("another hash than its tokens have"), std::string::npos);
  }
  EngineCheckpoint beyond = whole;
  beyond.state.kv.blocks[4].hash_tokens = 16;
  EXPECT_EQ(verified(beyond).problems.size(), 1u);
  EngineCheckpoint untold = whole;
  untold.fingerprint.erase("prefix_hash_tokens");
  EXPECT_NE(verified(untold).hashes_not_checked, "");
  for (const char* told : {"0", "-4", "3", "four", "99999999999", "4 "}) {
    EngineCheckpoint wrong = whole;
    wrong.fingerprint["prefix_hash_tokens"] = told;
    EXPECT_NE(verified(wrong).hashes_not_checked, "") << told;
  }
}

}  // namespace
}  // namespace torpor
