// SPDX-License-Identifier: Apache-2.0
// S9: the engine's prefix index never has a block whose bytes are not there.
#include <cstring>

#include "allocator/host_device.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using namespace test;
using namespace reference;

class ResidentBlocks : public ::testing::Test {
 protected:
  static ReferenceRequest asking(const std::string& id, int32_t token = 7) {
    return {.id = id, .prompt = std::vector<int32_t>(22, token), .max_tokens = 6};
  }
  static std::unique_ptr<ReferenceEngine> make(const ReferenceOptions& options) {
    return value_of(
        ReferenceEngine::create(value_of(make_host_device()), linux_file_system(), system_clock(), options));
  }
  static std::map<std::string, std::vector<int32_t>> finish(ReferenceEngine& engine) {
    std::map<std::string, std::vector<int32_t>> tokens;
    for (int i = 0; i < 200 && !engine.idle(); ++i) {
      for (const ReferenceOutput& output : engine.step()) tokens[output.id].push_back(output.token);
      engine.step_offload();
    }
    EXPECT_TRUE(engine.idle());
    return tokens;
  }
  static std::vector<BlockIdentity> found(ReferenceEngine& engine) {
    std::vector<BlockIdentity> all;
    for (BlockPoolSnapshot::Block& block : engine.pool().snapshot().registered)
      all.push_back(std::move(block.identity));
    return all;
  }
  // Of the bytes of each block that can be found.
  static std::map<int32_t, Digest> bytes_of_found(ReferenceEngine& engine) {
    std::map<int32_t, Digest> digests;
    for (const BlockPoolSnapshot::Block& block : engine.pool().snapshot().registered) {
      StreamingDigest digest;
      for (const DevicePiece& piece : engine.memory().kv_layout().pieces_of(static_cast<uint32_t>(block.id)))
        digest.update({reinterpret_cast<const std::byte*>(piece.address), piece.bytes});  // NOLINT
      digests[block.id] = digest.finish();
    }
    return digests;
  }
  TemporaryDirectory directory_;
};

TEST_F(ResidentBlocks, S9WhatIsBeingLoadedIsFoundByNobodyUntilItIsThere) {
  ReferenceOptions options{.transfers_have_threads = false};
  options.tiers = {.host_blocks = 32};
  options.tiers.offload = {.min_batch_size = 1, .flush_interval = std::chrono::milliseconds(0)};
  const auto engine = make(options);
  ASSERT_SUCCEEDS(engine->add(asking("a")));
  const std::vector<int32_t> expected = finish(*engine).at("a");
  while (engine->step_offload()) {}
  const std::vector<BlockIdentity> stored = found(*engine);
  ASSERT_GE(stored.size(), 5u);
  engine->pool().clear_cached();

  ASSERT_SUCCEEDS(engine->add(asking("b")));
  ASSERT_SUCCEEDS(engine->add(asking("c", 8)));
  (void)engine->step();  // b's load is asked for, c computes
  EXPECT_TRUE(engine->offload()->busy());
  for (const BlockIdentity& identity : stored) EXPECT_FALSE(engine->pool().contains(identity));
  EXPECT_GT(engine->counts().computed_tokens, 0);
  const int64_t loaded = engine->counts().onboarded_tokens;
  EXPECT_EQ(finish(*engine).at("b"), expected);
  EXPECT_GT(engine->counts().onboarded_tokens, loaded);
  for (const BlockIdentity& identity : stored) EXPECT_TRUE(engine->pool().contains(identity));
}

TEST_F(ResidentBlocks, S9AfterAWakeWhatCanBeFoundHasTheBytesOfBefore) {
  for (const bool to_disk : {false, true}) {
    const auto engine = make({});
    const uint64_t block = engine->memory().kv_layout().bytes_per_block();
    SleepController controller(*engine, linux_file_system(), system_clock(),
                               {.directory = directory_.path(), .kv_budget_bytes = 7 * block});
    for (const char* id : {"a", "b"}) ASSERT_SUCCEEDS(engine->add(asking(id, id[0])));
    (void)finish(*engine);
    const std::map<int32_t, Digest> before = bytes_of_found(*engine);
    ASSERT_GT(before.size(), 7u);
    const SleepReport slept = value_of(controller.sleep({.preserve_state = true, .to_disk = to_disk}));
    EXPECT_EQ(slept.kept_blocks, 7);
    ASSERT_SUCCEEDS(controller.wake_up({}));
    const std::map<int32_t, Digest> after = bytes_of_found(*engine);
    EXPECT_EQ(after.size(), 7u);
    for (const auto& [id, digest] : after) EXPECT_EQ(digest, before.at(id)) << "block " << id;
  }
}

}  // namespace
}  // namespace torpor
