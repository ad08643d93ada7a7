// SPDX-License-Identifier: Apache-2.0
// Retention that keeps what is needed, repair, progress, and prefix hashes.
#include <fmt/core.h>

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

class Checkpoints : public ::testing::Test {
 protected:
  std::unique_ptr<CheckpointManager> manager(CheckpointManagerOptions options = {.retention = {.keep = 9}}) {
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

TEST_F(Checkpoints, ChunksAreCompressedWhereThatPays) {
  CheckpointManagerOptions options{.compression = {.level = 3, .long_distance = true}};
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager(options)));
  const Checkpoint checkpoint = value_of(manager()->open_latest());
  for (const SavedChunk& chunk : value_of(checkpoint.refs(checkpoint.manifest().ranks[0])).records) {
    EXPECT_EQ(chunk.codec, Codec::kZstd);
    EXPECT_LT(chunk.stored_bytes, 50u);
  }
  EXPECT_TRUE(value_of(verify(checkpoint)).problems.empty());
  options.compression.level = 40;
  EXPECT_FAILS(CheckpointManager::open(system_, "/store", options), Code::kInvalidArgument, "40");
}

TEST_F(Checkpoints, ProgressIsToldAndCancellingLeavesTheOldOneWhole) {
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
    info.generation = generation;
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
}

// One that cannot be read is neither counted nor taken; it switches nothing off.
TEST(Retention, GoesOnBesideACheckpointThatCannotBeRead) {
  std::vector<CheckpointInfo> infos;
  for (uint64_t generation = 1; generation <= 6; ++generation) {
    CheckpointInfo info{.readable = generation != 5 && generation != 2};
    info.generation = generation;
    infos.push_back(info);
  }
  using Gone = std::vector<uint64_t>;
  EXPECT_EQ(retired(infos, {.keep = 3}, 0), (Gone{1}));  // 6, 4, 3 are kept
  EXPECT_EQ(retired(infos, {.keep = 1}, 0), (Gone{1, 3}));
}

TEST(Retention, CountsTheCheckpointsOfEachOwnerByThemselves) {
  std::vector<CheckpointInfo> infos;
  const Digest a = owner_of({{"model", "a"}}), b = owner_of({{"model", "b"}});
  for (uint64_t generation = 1; generation <= 8; ++generation) {
    CheckpointInfo info{.readable = true, .bytes = 100};
    info.generation = generation;
    info.manifest.owner = generation % 4 == 1 ? a : b;  // 1 and 5; the others
    infos.push_back(info);
  }
  using Gone = std::vector<uint64_t>;
  EXPECT_EQ(retired(infos, {.keep = 2}, 0), (Gone{2, 3, 4, 6}));
  EXPECT_EQ(retired(infos, {.keep = 2}, 0, a), (Gone{}));
  EXPECT_EQ(retired(infos, {.keep = 2}, 0, b), (Gone{2, 3, 4, 6}));
  EXPECT_EQ(retired(infos, {.keep = 9, .max_total_bytes = 300}, 0, b), (Gone{2, 3, 4}));
  infos[4].woken = true;
  EXPECT_EQ(retired(infos, {.keep = 1}, 0), (Gone{1, 2, 3, 4, 6}));
  EXPECT_EQ(retired(infos, {.keep = 1}, 0, a), (Gone{1}));
}

TEST(Owner, IsTheFingerprintsButForHowManyBlocksThereAre) {
  const Fingerprint engine = {{"dtype", "f32"}, {"kv_num_blocks", "420"}, {"weights_digest_rank0", "1"}};
  Fingerprint other = engine;
  other["kv_num_blocks"] = "428";
  EXPECT_EQ(owner_of(other), owner_of(engine));
  other["weights_digest_rank0"] = "2";
  EXPECT_NE(owner_of(other), owner_of(engine));
  EXPECT_NE(owner_of({{"ab", "c"}}), owner_of({{"a", "bc"}}));
}

TEST_F(Checkpoints, OfAnotherEngineInTheSameDirectoryStay) {
  const auto write = [&](const std::string& model) {
    EngineCheckpoint state = example_checkpoint();
    state.fingerprint["model"] = model;
    PendingCheckpoint pending = value_of(manager({.retention = {.keep = 1}})->begin(0));
    ASSERT_SUCCEEDS(pending.write_state(state));
    ASSERT_SUCCEEDS(pending.commit());
    pending.retire_older();
  };
  write("a");
  for (int i = 0; i < 4; ++i) write("b");
  EXPECT_EQ(names(), (std::vector<std::string>{"g-000001", "g-000004", "g-000005"}));
  // A directory that two engines use is tidied owner by owner, too.
  EXPECT_EQ(value_of(manager({.retention = {.keep = 1}})->collect()), std::vector<std::string>{});
  ASSERT_SUCCEEDS(manager({.retention = {.keep = 1}})->woken_from(5));
  EXPECT_EQ(names(), (std::vector<std::string>{"g-000001", "g-000005"}));
}

TEST_F(Checkpoints, ADamagedManifestDoesNotStopTheOthersFromGoing) {
  const CheckpointManagerOptions options{.retention = {.keep = 1}};
  for (int i = 0; i < 3; ++i) ASSERT_SUCCEEDS(test::write_checkpoint(*manager(options)));
  ASSERT_EQ(names(), (std::vector<std::string>{"g-000002", "g-000003"}));
  bytes("/store/g-000003/MANIFEST")[100] ^= 1;
  for (int i = 0; i < 4; ++i) ASSERT_SUCCEEDS(test::write_checkpoint(*manager(options)));
  EXPECT_EQ(names(), (std::vector<std::string>{"g-000003", "g-000006", "g-000007"}));
  EXPECT_EQ(value_of(manager(options)->collect()), std::vector<std::string>{});
  ASSERT_SUCCEEDS(manager(options)->remove(3));
  EXPECT_EQ(names(), (std::vector<std::string>{"g-000006", "g-000007"}));
}

TEST(Retention, AFileWithSeveralLinksCountsOnce) {
  std::vector<CheckpointInfo> infos;
  const auto id = [](uint8_t generation) { return SealId{generation}; };
  for (uint8_t generation = 1; generation <= 6; ++generation) {  // each has the file of the first, and one of its own
    CheckpointInfo info{.readable = true, .bytes = generation == 1 ? 110u : 20u};
    info.generation = generation;
    info.manifest.id = id(generation);
    info.manifest.ranks = {{.files = {{.name = "own", .id = id(generation), .bytes = generation == 1 ? 100u : 10u}}}};
    if (generation > 1) info.manifest.ranks[0].files.push_back({.name = "link", .id = id(1), .bytes = 100});
    infos.push_back(info);
  }
  using Gone = std::vector<uint64_t>;
  EXPECT_EQ(retired(infos, {.keep = 9, .max_total_bytes = 210}, 0), (Gone{}));  // 5 x 20, 10 and once 100
  EXPECT_EQ(retired(infos, {.keep = 9, .max_total_bytes = 209}, 0), (Gone{1}));
  EXPECT_EQ(retired(infos, {.keep = 9, .max_total_bytes = 160}, 0), (Gone{1, 2, 3}));
  DiskUsage oldest_first;
  for (const CheckpointInfo& info : infos) oldest_first.add(info.manifest, info.bytes);
  EXPECT_EQ(oldest_first.bytes(), 210u);
}

TEST_F(Checkpoints, RepairKeepsTheRequestsThatAreWhole) {
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

TEST_F(Checkpoints, RepairDropsARequestForABlockOfAnyGroup) {
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

TEST_F(Checkpoints, WhatNamesNothingAnyMoreCannotBeRepaired) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager()));
  for (const char* file : {"STATE", "refs-r0"}) {
    bytes(fmt::format("/store/g-000001/{}", file))[3] ^= 1;
    const Checkpoint damaged = value_of(manager()->open_latest());
    const Verification found = value_of(verify(damaged));
    EXPECT_EQ(found.problems.size(), 1u);
    EXPECT_FAILS(plan_repair(damaged, found), Code::kCorruption, "cannot be repaired");
    bytes(fmt::format("/store/g-000001/{}", file))[3] ^= 1;
  }
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

TEST_F(Checkpoints, HashesAreCheckedInGroupsWithBlocksOfDifferentSizes) {
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
  for (const char* stated : {"0", "-4", "3", "four", "99999999999", "4 "}) {
    EngineCheckpoint wrong = whole;
    wrong.fingerprint["prefix_hash_tokens"] = stated;
    EXPECT_NE(verified(wrong).hashes_not_checked, "") << stated;
  }
  EngineCheckpoint pictured = whole;
  for (RequestState& request : pictured.state.scheduler.requests) {
    if (request.id == "run") request.block_hashes[0] ^= 1;
  }
  EXPECT_EQ(verified(pictured).problems.size(), 1u);
  for (RequestState& request : pictured.state.scheduler.requests)  // an image has a part in its hashes
    request.engine.data = Dict{{"other_hash_keys", {.data = true}}};
  EXPECT_TRUE(verified(pictured).problems.empty());
  EXPECT_NE(verified(pictured).hashes_not_checked.find("images"), std::string::npos);
}

}  // namespace
}  // namespace torpor
