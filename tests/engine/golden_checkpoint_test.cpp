// SPDX-License-Identifier: Apache-2.0
// Checkpoints that engines of earlier versions of torpor wrote are woken, token for token.
#include "checkpoint/verify.h"
#include "tests/support/golden.h"
#include "tests/support/results.h"
#include "tests/support/sleeping_engine.h"

namespace torpor {
namespace {

using namespace test;

std::shared_ptr<const Key> golden_key() {
  std::array<uint8_t, kKeyBytes> bytes{};
  bytes.fill(1);
  return std::make_shared<const Key>(bytes);
}

// Two ranks that slept after 6 steps and again after 10, encrypted, compressed; the second checkpoint names chunks of
// the first.
class GoldenCheckpoint : public ::testing::Test {
 protected:
  // As those that wrote them: before version 4 a tag had one region.
  static TestEngineOptions options(uint32_t version) {
    return {.ranks = 2, .regions = version < 4 ? size_t{1} : size_t{3}, .key = golden_key()};
  }
  SleepControllerOptions in(const std::string& directory) const {
    return {.directory = directory, .checkpoints = {.key = golden_key(), .encrypt = true, .incremental = true}};
  }
  static void wake(SleepController& controller, TestEngine& engine, const std::string& path, int steps) {
    const SleepReport report = value_of(controller.wake_up({.from_checkpoint = path}));
    EXPECT_TRUE(report.changed && report.fully_awake);
    TestEngine before(linux_file_system(), {.ranks = 2});  // what the engine had delivered when it slept
    add_example_requests(before);
    for (int i = 0; i < steps; ++i) before.step();
    engine.set_tokens(before.tokens());
  }
  test::TemporaryDirectory temporary_;
};

// The second of two, kept without the first: its links are copies now, as after cp -r.
TEST_F(GoldenCheckpoint, OfVersions3And4AreWholeWithoutTheOnesBefore) {
  for (const uint32_t version : {3u, 4u}) {
    SCOPED_TRACE(version);
    const std::string name = "v" + std::to_string(version);
    const std::string store = copy_of_golden(name, temporary_ / name);
    const std::string path = store + "/g-000002";
    {
      const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), path, golden_key()));
      EXPECT_EQ(checkpoint.manifest().format_version, version);
      EXPECT_EQ(checkpoint.manifest().ranks.at(1).files.size(), 2u);
      EXPECT_TRUE(value_of(verify(checkpoint)).problems.empty());
    }
    TestEngine engine(linux_file_system(), options(version));
    SleepController controller(engine, linux_file_system(), system_clock(), in(store));
    wake(controller, engine, path, 10);
    engine.step();
    // It is the base of the next, which writes what that step changed, and takes the rest of its files.
    const SleepReport slept = value_of(controller.sleep({.preserve_state = true, .to_disk = true}));
    const Manifest manifest = value_of(open_checkpoint(linux_file_system(), slept.checkpoint, golden_key())).manifest();
    EXPECT_EQ(manifest.ranks.at(1).files.size(), 3u);
    EXPECT_EQ(manifest.ranks.at(1).tags.at("weights").linked_bytes,
              manifest.ranks.at(1).tags.at("weights").stored_bytes);
    ASSERT_SUCCEEDS(controller.wake_up({}));
    EXPECT_EQ(finish(engine), uninterrupted({.ranks = 2}));
    EXPECT_EQ(engine.recomputed(), 0);
  }
}

// How the newest of them was written: TORPOR_GOLDEN_INTO=DIR engine_test --gtest_also_run_disabled_tests
// --gtest_filter='*IsWritten'; then g-000002 is copied to tests/golden.
TEST_F(GoldenCheckpoint, DISABLED_IsWritten) {
  const char* const into = std::getenv("TORPOR_GOLDEN_INTO");
  ASSERT_NE(into, nullptr) << "it says where";
  TestEngine engine(linux_file_system(), options(kFormatVersion));
  SleepControllerOptions writing = in(into);
  writing.checkpoints.compression = {.codec = Codec::kZstd};
  SleepController controller(engine, linux_file_system(), system_clock(), writing);
  add_example_requests(engine);
  for (const int steps : {6, 4}) {
    for (int i = 0; i < steps; ++i) engine.step();
    ASSERT_SUCCEEDS(controller.sleep({.preserve_state = true, .to_disk = true}));
    ASSERT_SUCCEEDS(controller.wake_up({}));
  }
}

}  // namespace
}  // namespace torpor
