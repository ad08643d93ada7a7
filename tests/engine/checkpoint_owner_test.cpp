// SPDX-License-Identifier: Apache-2.0
// Engines that share a directory of checkpoints, and what each way of reading one notices of damage in stored weights.
#include <fstream>

#include <boost/filesystem.hpp>

#include "checkpoint/verify.h"
#include "tests/support/results.h"
#include "tests/support/sleeping_engine.h"

namespace torpor {
namespace {

using namespace test;

const SleepOptions kToDisk{.preserve_state = true, .to_disk = true};

class CheckpointOwner : public ::testing::Test {
 protected:
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& entry : boost::filesystem::directory_iterator(store())) {
      if (entry.path().filename().string().starts_with("g-")) names.insert(entry.path().filename().string());
    }
    return names;
  }
  std::string store() const { return temporary_ / "store"; }
  std::string path(const std::string& name) const { return store() + "/" + name; }
  SleepingEngine make(TestEngineOptions options = {}) const {
    return SleepingEngine(linux_file_system(), store(), options);
  }
  Manifest manifest(const std::string& name) const {
    return value_of(open_checkpoint(linux_file_system(), path(name))).manifest();
  }

 private:
  TemporaryDirectory temporary_;
};

TEST_F(CheckpointOwner, AnEngineRemovesNoneOfAnothersInItsDirectory) {
  TestEngine::Tokens before;
  {
    SleepingEngine a = make();
    add_example_requests(a.engine);
    for (int i = 0; i < 6; ++i) a.engine.step();
    ASSERT_SUCCEEDS(a.controller.sleep(kToDisk));
    before = a.engine.tokens();
  }
  {
    SleepingEngine b = make({.weights_seed = 2});
    for (int i = 0; i < 4; ++i) {
      ASSERT_SUCCEEDS(b.controller.sleep(kToDisk));
      ASSERT_SUCCEEDS(b.controller.wake_up({}));
    }
  }
  EXPECT_EQ(names(), (std::set<std::string>{"g-000001", "g-000004", "g-000005"}));
  EXPECT_NE(manifest("g-000001").owner, manifest("g-000005").owner);
  SleepingEngine again = make();
  const Result<SleepReport> refused = again.controller.wake_up({.from_checkpoint = store()});
  ASSERT_TRUE(failed_with(refused, Code::kIncompatible, "g-000005"));  // the newest, by its name
  EXPECT_NE(refused.error().what.find("weights_digest_rank0"), std::string::npos) << refused.error().what;
  EXPECT_NE(refused.error().next_step.find(path("g-000001")), std::string::npos) << refused.error().next_step;
  const SleepReport woken = value_of(again.controller.wake_up({.from_checkpoint = path("g-000001")}));
  EXPECT_EQ(woken.checkpoint, path("g-000001"));
  again.engine.set_tokens(before);
  EXPECT_EQ(finish(again.engine), uninterrupted());
}

// Weights that a trainer loads make no other owner, nor does a new process that goes on.
TEST_F(CheckpointOwner, StaysTheSameThroughUpdatesOfWeightsAndWakes) {
  {
    SleepingEngine engine = make();
    for (uint64_t seed = 2; seed < 8; ++seed) {
      ASSERT_SUCCEEDS(engine.controller.sleep(kToDisk));
      ASSERT_SUCCEEDS(engine.controller.wake_up({}));
      engine.engine.load_weights(seed);
    }
    ASSERT_SUCCEEDS(engine.controller.checkpoint({}));
  }
  EXPECT_EQ(names(), (std::set<std::string>{"g-000006", "g-000007"}));
  EXPECT_NE(manifest("g-000006").fingerprint, manifest("g-000007").fingerprint);
  SleepingEngine next = make({.weights_seed = 7});
  EXPECT_EQ(value_of(next.controller.wake_up({.from_checkpoint = store()})).checkpoint, path("g-000007"));
  next.engine.load_weights(9);
  ASSERT_SUCCEEDS(next.controller.checkpoint({}));
  EXPECT_EQ(manifest("g-000008").owner, manifest("g-000007").owner);
  EXPECT_EQ(names(), (std::set<std::string>{"g-000007", "g-000008"}));
}

// A wake in a new engine compares the digest of its own weights: stored ones may be damaged, and no token depends on
// them. Whoever reads them says so.
TEST_F(CheckpointOwner, DamageInStoredWeightsIsNoticedByWhoeverReadsThem) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 6; ++i) slept.engine.step();
  const TestEngine::Tokens before = slept.engine.tokens();
  const std::string stored = value_of(slept.controller.sleep(kToDisk)).checkpoint;
  uint64_t unread = 0;
  {
    const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), stored));
    const RankSummary& rank = checkpoint.manifest().ranks.at(0);
    for (const auto& [tag, saved] : rank.tags) unread += tag == kKvCacheTag ? 0 : saved.stored_bytes;
    const RankRefs refs = value_of(checkpoint.refs(rank));
    const auto chunk = std::find_if(refs.records.begin(), refs.records.end(),
                                    [](const SavedChunk& saved) { return saved.key.tag == kWeightsTag; });
    ASSERT_NE(chunk, refs.records.end());
    std::fstream file(stored + "/" + rank.files.at(chunk->file).name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(chunk->offset + 7));
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(chunk->offset + 7));
    file.put(static_cast<char>(byte ^ 1));
  }
  const Verification found = value_of(verify(value_of(open_checkpoint(linux_file_system(), stored))));
  ASSERT_EQ(found.problems.size(), 1U);
  EXPECT_NE(found.problems[0].what.find("weights"), std::string::npos) << found.problems[0].what;

  SleepingEngine with_its_own = make();
  const SleepReport woken = value_of(with_its_own.controller.wake_up({.from_checkpoint = stored}));
  EXPECT_EQ(woken.unread_bytes, unread);
  EXPECT_GT(woken.unread_bytes, 0U);
  with_its_own.engine.set_tokens(before);
  EXPECT_EQ(finish(with_its_own.engine), uninterrupted());

  EXPECT_FAILS(slept.controller.wake_up({}), Code::kCorruption, "weights");  // it has none but these
  EXPECT_TRUE(slept.controller.is_sleeping());
}

}  // namespace
}  // namespace torpor
