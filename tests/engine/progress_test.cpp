// SPDX-License-Identifier: Apache-2.0
// Operations that are watched: what they tell, and that they can be cancelled anywhere without a trace.
#include "base/progress_file.h"
#include "engine/phases.h"
#include "tests/engine/sleep_failure.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;

class WatchedSleep : public SleepFailure {
 protected:
  std::shared_ptr<ProgressFile> watch() {
    path_ = temporary_ / ("progress-" + std::to_string(++watched_));
    return value_of(ProgressFile::create(path_));
  }
  SleepOptions sleep_of(bool disk, bool discard = false) const {
    SleepOptions options = disk ? to_disk() : to_host();
    options.discard_on_save_error = discard;
    options.progress = path_;
    return options;
  }
  // Cancels before the n-th hook from now on; whether it came to that is for the caller to see in `left`.
  static void cancel_at(SleepingEngine& slept, int n, const std::shared_ptr<ProgressFile>& progress, int& left) {
    left = n;
    slept.engine.before_hook = [&left, progress](const std::string&) {
      if (--left == 0) progress->cancel();
    };
  }
  static size_t checkpoints_in(const std::string& directory) {
    size_t count = 0;
    for (const auto& entry : boost::filesystem::directory_iterator(directory))
      count += entry.path().filename().string().starts_with("g-") ? 1 : 0;
    return count;
  }
  const TestEngineOptions options_{.ranks = 2};
  std::string path_;
  int watched_ = 0;
};

TEST_F(WatchedSleep, TellsItsPhasesAndAllBytesOfAllRanks) {
  for (const bool disk : {false, true}) {
    SleepingEngine slept = make(options_);
    begin(slept.engine);
    std::shared_ptr<ProgressFile> progress = watch();
    std::vector<std::string> phases;
    slept.engine.before_hook = [&](const std::string&) {
      const std::string phase(kPhaseNames[progress->phase()]);
      if (phases.empty() || phases.back() != phase) phases.push_back(phase);
    };
    const SleepReport asleep = value_of(slept.controller.sleep(sleep_of(disk)));
    EXPECT_THAT(phases, ::testing::IsSupersetOf({"quiesce", "capture", "save", "detach"}));
    EXPECT_EQ(progress->read().bytes_total, asleep.saved_bytes);
    EXPECT_EQ(progress->read().bytes_done, asleep.saved_bytes);
    progress = watch();
    const SleepReport awake = value_of(slept.controller.wake_up({.progress = path_}));
    EXPECT_EQ(progress->read().bytes_done, awake.restored_bytes);
    EXPECT_EQ(kPhaseNames[progress->phase()], "reconnect");
    expect_untouched(slept, options_);
  }
}

TEST_F(WatchedSleep, CancelledAnywhereItIsUndoneAndNothingIsDiscarded) {
  int undone = 0;
  for (const bool disk : {false, true}) {
    for (int n = 1, left = 0; left <= 0; n += test::next_case()) {
      SleepingEngine slept = make(options_);
      begin(slept.engine);
      cancel_at(slept, n, watch(), left);
      const Result<SleepReport> asleep = slept.controller.sleep(sleep_of(disk, /*discard=*/true));
      if (asleep) {  // it came when the memory was going already, or after the end
        ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      } else {
        ++undone;
        EXPECT_EQ(asleep.error().code, Code::kAborted) << asleep.error().to_string();
        EXPECT_FALSE(asleep.error().state_changed);
        EXPECT_EQ(checkpoints_in(temporary_.path()), 0u);
      }
      expect_untouched(slept, options_);
      boost::filesystem::remove_all(temporary_ / "g-000001");
    }
  }
  EXPECT_GT(undone * test::next_case(), 10);
}

TEST_F(WatchedSleep, ACancelledWakeStaysAsleepAndCanBeWokenAgain) {
  int undone = 0;
  for (const bool disk : {false, true}) {
    for (int n = 1, left = 0; left <= 0; n += test::next_case()) {
      SleepingEngine slept = make(options_);
      begin(slept.engine);
      ASSERT_SUCCEEDS(slept.controller.sleep(disk ? to_disk() : to_host()));
      cancel_at(slept, n, watch(), left);
      const Result<SleepReport> awake = slept.controller.wake_up({.progress = path_});
      if (!awake) {
        ++undone;
        EXPECT_EQ(awake.error().code, Code::kAborted) << awake.error().to_string();
        EXPECT_TRUE(slept.controller.is_sleeping());
        ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      }
      expect_untouched(slept, options_);
      boost::filesystem::remove_all(temporary_ / "g-000001");
    }
  }
  EXPECT_GT(undone * test::next_case(), 3);
}

TEST_F(WatchedSleep, ACancelledWakeOfANewProcessDiscardsNothing) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const std::string checkpoint = value_of(slept.controller.sleep(to_disk())).checkpoint;
  int undone = 0;
  for (int n = 1, left = 0; left <= 0; ++n) {
    SleepingEngine woken = make();
    woken.engine.go_on_after(slept.engine);
    cancel_at(woken, n, watch(), left);
    const WakeOptions options{.from_checkpoint = checkpoint, .discard_on_restore_error = true, .progress = path_};
    if (const Result<SleepReport> awake = woken.controller.wake_up(options); !awake) {
      ++undone;
      EXPECT_EQ(awake.error().code, Code::kAborted) << awake.error().to_string();
      ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = checkpoint}));
    }
    EXPECT_EQ(finish(woken.engine), uninterrupted());
  }
  EXPECT_GT(undone, 3);
}

}  // namespace
}  // namespace torpor
