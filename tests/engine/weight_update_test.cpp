// SPDX-License-Identifier: Apache-2.0
// The reference engine over an update of its weights: KV of the old ones is in the device, in host memory and on disk.
#include <list>
#include <map>

#include "allocator/host_device.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using namespace test;
using namespace reference;

class WeightUpdate : public ::testing::Test {
 protected:
  std::unique_ptr<ReferenceEngine> make(uint64_t seed, const std::string& directory) {
    ReferenceOptions options{.weights_seed = seed};
    options.tiers = {.host_blocks = 48, .disk_blocks = 48, .disk_directory = directory};
    options.tiers.offload = {.min_batch_size = 1, .flush_interval = std::chrono::milliseconds(0)};
    return value_of(
        ReferenceEngine::create(value_of(make_host_device({})), linux_file_system(), system_clock(), options));
  }
  std::unique_ptr<ReferenceEngine> make(uint64_t seed) { return make(seed, directories_.emplace_back().path()); }
  static void add(ReferenceEngine& engine, const std::string& id, std::vector<int32_t> prompt, int32_t tokens) {
    ASSERT_SUCCEEDS(engine.add({.id = id, .prompt = std::move(prompt), .max_tokens = tokens}));
  }
  void step(ReferenceEngine& engine) {
    for (const ReferenceOutput& output : engine.step()) tokens_[&engine][output.id].push_back(output.token);
  }
  void run(ReferenceEngine& engine) {
    while (!engine.idle()) step(engine);
    while (engine.step_offload()) {}
  }
  std::list<TemporaryDirectory> directories_;
  std::map<const ReferenceEngine*, std::map<std::string, std::vector<int32_t>>> tokens_;
};

TEST_F(WeightUpdate, NewRequestsFindKvOfOldWeightsInNoTierAndRunningOnesGoOn) {
  std::vector<int32_t> prompt(22);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * 7);
  for (const int level : {0, 1}) {
    SCOPED_TRACE(level);
    tokens_.clear();
    const auto engine = make(1);
    SleepController controller(*engine, linux_file_system(), system_clock(),
                               {.directory = directories_.emplace_back().path()});
    add(*engine, "before", prompt, 4);
    run(*engine);
    EXPECT_GT(engine->offload()->index().counts(StoreId::kHost).visible, 0);
    EXPECT_GT(engine->offload()->index().counts(StoreId::kDisk).visible, 0);
    add(*engine, "kept", prompt, 30);
    add(*engine, "kept too", prompt, 30);  // shares its blocks
    for (int i = 0; i < 9; ++i) step(*engine);
    const int64_t computed = engine->counts().computed_tokens;
    ASSERT_SUCCEEDS(controller.sleep({.level = level, .preserve_state = true}));
    if (level > 0) {
      ASSERT_SUCCEEDS(controller.wake_up({.tags = {"weights"}}));
    }
    engine->load_weights(2);
    ASSERT_SUCCEEDS(controller.wake_up({.old_kv = OldKv::kKeep}));
    ASSERT_SUCCEEDS(engine->pool().check());
    step(*engine);
    EXPECT_EQ(engine->counts().computed_tokens, computed + 2);  // nothing again
    ASSERT_SUCCEEDS(engine->pool().check());
    add(*engine, "same", prompt, 4);
    run(*engine);
    std::vector<int32_t> longer = prompt;
    const std::vector<int32_t>& kept = tokens_[engine.get()]["kept"];
    longer.insert(longer.end(), kept.begin(), kept.end());
    add(*engine, "longer", longer, 4);
    run(*engine);

    const auto reference = make(2);
    add(*reference, "same", prompt, 4);
    add(*reference, "longer", longer, 4);
    run(*reference);
    for (const char* id : {"same", "longer"}) EXPECT_EQ(tokens_[engine.get()][id], tokens_[reference.get()][id]) << id;
    EXPECT_EQ(kept.size(), 30U);
    EXPECT_EQ(kept, tokens_[engine.get()]["kept too"]);
  }
}

// On the same directory, after one engine computed with two sets of weights: whichever the next one has, it takes
// nothing of the other's.
TEST_F(WeightUpdate, AfterARestartKvOfOtherWeightsIsNotFoundOnDisk) {
  const std::vector<int32_t> prompt(22, 5);
  const auto answer = [&](ReferenceEngine& engine, const std::string& id) {
    add(engine, id, prompt, 4);
    run(engine);
    return tokens_[&engine][id];
  };
  for (const bool keeps_requests : {true, false}) {
    for (const uint64_t next : {1, 2}) {
      SCOPED_TRACE(next);
      tokens_.clear();
      const std::string directory = directories_.emplace_back().path();
      {
        const auto engine = make(1, directory);
        SleepController controller(*engine, linux_file_system(), system_clock(),
                                   {.directory = directories_.emplace_back().path()});
        answer(*engine, "before");
        ASSERT_SUCCEEDS(controller.sleep(
            {.level = 1, .preserve_state = keeps_requests, .in_flight = keeps_requests ? "freeze" : "abort"}));
        ASSERT_SUCCEEDS(controller.wake_up({.tags = {"weights"}}));
        engine->load_weights(2);
        ASSERT_SUCCEEDS(controller.wake_up({}));
        answer(*engine, "after");
        EXPECT_GT(engine->offload()->index().counts(StoreId::kDisk).visible, 0);
        ASSERT_SUCCEEDS(engine->worker(0).store(StoreId::kDisk)->sync());
      }
      tokens_.clear();
      const auto engine = make(next, directory);
      const auto reference = make(next);
      EXPECT_EQ(answer(*engine, "again"), answer(*reference, "again"));
      // What was stored before the change is good for those weights, what came after it has no name.
      EXPECT_EQ(engine->counts().onboarded_tokens > 0, next == 1);
    }
  }
}

// With the same weights it is.
TEST_F(WeightUpdate, AfterARestartKvOfTheSameWeightsIsFoundOnDisk) {
  const std::vector<int32_t> prompt(22, 5);
  const std::string directory = directories_.emplace_back().path();
  std::vector<int32_t> tokens;
  for (const bool again : {false, true}) {
    const auto engine = make(1, directory);
    tokens_.clear();
    add(*engine, "same", prompt, 4);
    run(*engine);
    EXPECT_EQ(engine->counts().onboarded_tokens > 0, again);
    EXPECT_TRUE(!again || tokens_[engine.get()]["same"] == tokens);
    tokens = tokens_[engine.get()]["same"];
  }
}

// What was renamed is saved and restored like any other block.
TEST_F(WeightUpdate, RequestsThatKeptTheirKvGoToDiskAndIntoANewEngine) {
  const std::vector<int32_t> prompt(19, 3);
  const auto engine = make(1);
  const std::string directory = directories_.emplace_back().path();
  SleepController controller(*engine, linux_file_system(), system_clock(), {.directory = directory});
  add(*engine, "kept", prompt, 40);
  for (int i = 0; i < 6; ++i) step(*engine);
  ASSERT_SUCCEEDS(controller.sleep({.level = 0}));
  engine->load_weights(2);
  ASSERT_SUCCEEDS(controller.wake_up({.old_kv = OldKv::kKeep}));
  for (int i = 0; i < 6; ++i) step(*engine);
  ASSERT_SUCCEEDS(controller.sleep({.preserve_state = true, .to_disk = true}));
  ASSERT_SUCCEEDS(controller.wake_up({}));
  const size_t so_far = tokens_[engine.get()]["kept"].size();
  run(*engine);

  const auto fresh = make(2);
  SleepController other(*fresh, linux_file_system(), system_clock(), {.directory = directory});
  ASSERT_SUCCEEDS(other.wake_up({.from_checkpoint = directory}));
  run(*fresh);
  const std::vector<int32_t>& whole = tokens_[engine.get()]["kept"];
  EXPECT_EQ(whole.size(), 40U);
  EXPECT_EQ(tokens_[fresh.get()]["kept"],
            std::vector<int32_t>(whole.begin() + static_cast<std::ptrdiff_t>(so_far), whole.end()));
}

}  // namespace
}  // namespace torpor
