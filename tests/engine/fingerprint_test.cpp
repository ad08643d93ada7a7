// The weights in the fingerprint of a checkpoint: right, whoever took the digests, and read at most once.
#include "tests/support/sleeping_engine.h"

namespace torpor {
namespace {

using namespace test;

class EngineFingerprint : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  SleepingEngine make(uint64_t weights_seed = 1) {
    return SleepingEngine(linux_file_system(), temporary_.path(), {.ranks = kRanks, .weights_seed = weights_seed});
  }
  static void begin(TestEngine& engine) {
    add_example_requests(engine);
    for (int i = 0; i < 6; ++i) engine.step();
  }
  static Fingerprint fingerprint_of(const std::string& checkpoint) {
    return value_of(open_checkpoint(linux_file_system(), checkpoint)).manifest().fingerprint;
  }
  TemporaryDirectory temporary_;
};

const std::vector<std::pair<const char*, SleepOptions>>& sleeps_to_disk() {
  static const std::vector<std::pair<const char*, SleepOptions>> all{
      {"weights stored", {.preserve_state = true, .to_disk = true}},
      {"weights stored, without requests", {.to_disk = true, .in_flight = "abort"}},
      {"weights named for reload", {.preserve_state = true, .to_disk = true, .store_weights = false}},
      {"level 2", {.level = 2, .preserve_state = true, .to_disk = true}},
      {"weights stay", {.preserve_state = true, .to_disk = true, .tags = {"kv_cache"}}},
  };
  return all;
}

TEST_F(EngineFingerprint, WeightsAreReadAtMostOnceASave) {
  for (const auto& [name, options] : sleeps_to_disk()) {
    SCOPED_TRACE(name);
    SleepingEngine slept = make();
    begin(slept.engine);
    ASSERT_SUCCEEDS(slept.controller.sleep(options));
    EXPECT_EQ(slept.engine.hashed_bytes(), kRanks * kWeightBytes);
  }
  SleepingEngine serving = make();
  begin(serving.engine);
  ASSERT_SUCCEEDS(serving.controller.checkpoint({}));
  EXPECT_EQ(serving.engine.hashed_bytes(), kRanks * kWeightBytes);
  ASSERT_SUCCEEDS(serving.controller.sleep({.preserve_state = true}));
  EXPECT_EQ(serving.engine.hashed_bytes(), 2 * kRanks * kWeightBytes);  // their backup's
}

TEST_F(EngineFingerprint, AWakeFromDiskReadsThem) {
  std::string path;
  {
    SleepingEngine slept = make();
    begin(slept.engine);
    path = value_of(slept.controller.sleep({.preserve_state = true, .to_disk = true})).checkpoint;
  }
  SleepingEngine woken = make();
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
  EXPECT_EQ(woken.engine.hashed_bytes(), kRanks * kWeightBytes);
  SleepingEngine other = make(2);
  EXPECT_FAILS(other.controller.wake_up({.from_checkpoint = path}), Code::kIncompatible, "weights_digest_rank1");
}

TEST_F(EngineFingerprint, ItIsTheSameWhoeverTookTheDigests) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const Fingerprint expected = value_of(slept.controller.fingerprint());
  ASSERT_TRUE(expected.contains("weights_digest_rank0") && expected.contains("weights_digest_rank1"));
  EXPECT_EQ(fingerprint_of(value_of(slept.controller.checkpoint({})).checkpoint), expected);
  for (const auto& [name, options] : sleeps_to_disk()) {
    SCOPED_TRACE(name);
    SleepingEngine one = make();
    begin(one.engine);
    EXPECT_EQ(fingerprint_of(value_of(one.controller.sleep(options)).checkpoint), expected);
  }
  SleepingEngine other = make(2);
  begin(other.engine);
  EXPECT_NE(fingerprint_of(value_of(other.controller.sleep(sleeps_to_disk()[0].second)).checkpoint), expected);
}

// No digest is believed from before.
TEST_F(EngineFingerprint, AfterNewWeightsTheNextCheckpointNamesThem) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const SleepOptions to_disk{.preserve_state = true, .to_disk = true};
  const Fingerprint before = fingerprint_of(value_of(slept.controller.sleep(to_disk)).checkpoint);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  slept.engine.load_weights(2, /*tell=*/false);
  const std::string after = value_of(slept.controller.sleep(to_disk)).checkpoint;
  EXPECT_NE(fingerprint_of(after), before);
  EXPECT_EQ(fingerprint_of(after), value_of(make(2).controller.fingerprint()));
}

}  // namespace
}  // namespace torpor
