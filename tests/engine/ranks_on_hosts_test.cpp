// SPDX-License-Identifier: Apache-2.0
// Ranks on two hosts, each of which has a directory of its own at the same path: what is refused, by name, and what is
// woken from copies on each (docs/elsewhere.md, "Ranks on several hosts").
#include "base/host_name.h"
#include "tests/engine/sleep_failure.h"

namespace torpor {
namespace {

using namespace test;

// Another host's files: what lies below `path` there lies below `place` on this one.
class OtherHost final : public FileSystem {
 public:
  OtherHost(std::string path, std::string place) : path_(std::move(path)), place_(std::move(place)) {}
  Result<std::unique_ptr<Directory>> open_directory(const std::string& path, bool create) override {
    const bool below = path.starts_with(path_);
    return linux_file_system().open_directory(below ? place_ + path.substr(path_.size()) : path, create);
  }

 private:
  const std::string path_, place_;
};

class RanksOnHosts : public SleepFailure {
 protected:
  SleepingEngine on_two_hosts() { return make({.ranks = 2, .files_of_last_rank = &other_host_}); }
  SleepingEngine sharing() { return make({.ranks = 2}); }
  static std::map<std::string, uint64_t> moved(SleepingEngine& slept) {
    return value_of(slept.controller.ledgers()).front().chunks_by_outcome;
  }
  static Error why(SleepingEngine& slept) {
    const Result<SleepReport> report = slept.controller.sleep(to_disk());
    return report ? Error{.what = "it slept"} : report.error();
  }
  void expect_no_checkpoint() {
    for (const auto& entry : boost::filesystem::directory_iterator(temporary_.path()))
      EXPECT_EQ(entry.path().filename(), "LOCK");
  }
  static Status checkpoint_while_serving(SleepingEngine& serving) {
    TORPOR_RETURN_IF_ERROR(serving.controller.begin_checkpoint());
    while (value_of(serving.controller.continue_checkpoint()) == CheckpointStage::kCopying) {}
    TORPOR_RETURN_IF_ERROR(serving.controller.take_checkpoint({}));
    const Result<SleepReport> ended = serving.controller.end_checkpoint();
    return ended ? ok() : Status(ended.error());
  }
  // As `cp -r` or `torpor pull` does it.
  void copy_to_the_other(const std::string& checkpoint) {
    const boost::filesystem::path from(checkpoint), to = boost::filesystem::path(others_.path()) / from.filename();
    boost::filesystem::remove_all(to);
    boost::filesystem::create_directory(to);
    boost::filesystem::permissions(to, boost::filesystem::owner_all);
    for (const auto& entry : boost::filesystem::directory_iterator(from))
      boost::filesystem::copy_file(entry.path(), to / entry.path().filename());
  }
  // The second half of what slept().
  void expect_to_go_on(SleepingEngine& woken) {
    woken.engine.go_on_after(*given_);
    EXPECT_EQ(finish(woken.engine), uninterrupted({.ranks = 2}));
    EXPECT_EQ(woken.engine.recomputed(), 0);
  }
  std::string slept() {
    SleepingEngine slept = sharing();
    begin(slept.engine);
    const std::string path = value_of(slept.controller.sleep(to_disk())).checkpoint;
    given_.emplace(linux_file_system(), TestEngineOptions{.ranks = 2});
    given_->go_on_after(slept.engine);
    return path;
  }
  TemporaryDirectory others_;
  OtherHost other_host_{temporary_.path(), others_.path()};
  std::optional<TestEngine> given_;
};

TEST_F(RanksOnHosts, ASleepIntoADirectoryThatARankDoesNotSeeIsRefusedBeforeAnythingIsSaved) {
  SleepingEngine slept = on_two_hosts();
  begin(slept.engine);
  const std::map<std::string, uint64_t> before = moved(slept);
  const Error error = why(slept);
  EXPECT_EQ(error.code, Code::kFailedPrecondition);
  EXPECT_FALSE(error.state_changed);
  for (const std::string& word : {std::string("rank 1"), host_name(), temporary_ / "s-000001"})
    EXPECT_NE(error.what.find(word), std::string::npos) << error.what;
  EXPECT_NE(error.next_step.find("share the directory"), std::string::npos) << error.next_step;
  EXPECT_EQ(moved(slept), before);
  EXPECT_FAILS(slept.controller.checkpoint({}), Code::kFailedPrecondition, "rank 1");
  EXPECT_FAILS(checkpoint_while_serving(slept), Code::kFailedPrecondition, "rank 1");
  expect_no_checkpoint();
  expect_untouched(slept, {.ranks = 2});
}

TEST_F(RanksOnHosts, APlanSaysBeforehandWhatASleepWouldBeRefusedFor) {
  SleepingEngine slept = on_two_hosts();
  begin(slept.engine);
  const auto problems = [&](const SleepOptions& options) {
    return value_of(slept.controller.plan_sleep(options)).problems;
  };
  EXPECT_TRUE(problems(to_host()).empty());
  ASSERT_EQ(problems(to_disk()).size(), 1U);
  for (const std::string& word : {std::string("rank 1"), host_name(), temporary_ / "s-000001"})
    EXPECT_NE(problems(to_disk()).front().find(word), std::string::npos) << problems(to_disk()).front();
  EXPECT_FAILS(slept.controller.check_directory(), Code::kFailedPrecondition, "rank 1");
  boost::filesystem::create_directory(others_ / "s-000001");
  boost::filesystem::permissions(others_ / "s-000001", boost::filesystem::owner_all);
  ASSERT_EQ(problems(to_disk()).size(), 1U);
  EXPECT_NE(problems(to_disk()).front().find("a directory of its own"), std::string::npos);
  EXPECT_FAILS(slept.controller.check_directory(), Code::kFailedPrecondition, "a directory of its own");
  expect_no_checkpoint();
  expect_untouched(slept, {.ranks = 2});
}

TEST_F(RanksOnHosts, APlanForADirectoryThatAllSeeLeavesNothingThere) {
  SleepingEngine slept = sharing();
  begin(slept.engine);
  EXPECT_TRUE(value_of(slept.controller.plan_sleep(to_disk())).problems.empty());
  EXPECT_SUCCEEDS(slept.controller.check_directory());
  expect_no_checkpoint();
  {
    const auto other = value_of(CheckpointManager::open(linux_file_system(), temporary_.path(), {}));
    const PendingCheckpoint being_written = value_of(other->begin(0));
    EXPECT_FAILS(slept.controller.check_directory(), Code::kUnavailable);
  }
  ASSERT_SUCCEEDS(slept.controller.begin_checkpoint());
  while (value_of(slept.controller.continue_checkpoint()) == CheckpointStage::kCopying) {}
  EXPECT_SUCCEEDS(slept.controller.check_directory());  // not asked twice: the directory is taken
  EXPECT_TRUE(value_of(slept.controller.plan_sleep(to_disk())).problems.empty());
  slept.controller.cancel_checkpoint();
  expect_no_checkpoint();
  expect_untouched(slept, {.ranks = 2});
}

TEST_F(RanksOnHosts, ARankThatWritesIntoADirectoryOfItsOwnAtTheSamePathIsFoundOut) {
  boost::filesystem::create_directory(others_ / "s-000001");  // left by an engine that was killed there
  boost::filesystem::permissions(others_ / "s-000001", boost::filesystem::owner_all);
  SleepingEngine slept = on_two_hosts();
  begin(slept.engine);
  const std::map<std::string, uint64_t> before = moved(slept);
  for (int i = 0; i < 2; ++i) {
    const Error error = why(slept);
    EXPECT_EQ(error.code, Code::kFailedPrecondition);
    EXPECT_NE(error.what.find("rank 1 on the host " + host_name() + " writes into a directory of its own"),
              std::string::npos)
        << error.what;
  }
  EXPECT_EQ(moved(slept), before);
  EXPECT_FAILS(checkpoint_while_serving(slept), Code::kFailedPrecondition, "directory of its own");
  expect_no_checkpoint();
  expect_untouched(slept, {.ranks = 2});
}

TEST_F(RanksOnHosts, OnRequestWhatCannotGoToDiskIsKeptInTheMemoryOfEachHost) {
  SleepingEngine slept = on_two_hosts();
  begin(slept.engine);
  SleepOptions options = to_disk();
  options.discard_on_save_error = true;
  const SleepReport report = value_of(slept.controller.sleep(options));
  EXPECT_EQ(report.to, "host");
  EXPECT_NE(report.note.find("rank 1"), std::string::npos) << report.note;
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_untouched(slept, {.ranks = 2});
}

TEST_F(RanksOnHosts, EachRankWakesFromTheCopyOfItsHost) {
  const std::string path = slept();
  SleepingEngine woken = on_two_hosts();
  const Result<SleepReport> missing = woken.controller.wake_up({.from_checkpoint = path});
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  for (const std::string& word : {std::string("rank 1"), host_name(), path})
    EXPECT_NE(missing.error().what.find(word), std::string::npos) << missing.error().what;
  copy_to_the_other(path);
  // Each host's own copy: rank 0 has nothing there, nor rank 1 here.
  boost::filesystem::remove(path + "/chunks-r1");
  boost::filesystem::remove(others_ / "g-000001/chunks-r0");
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
  expect_to_go_on(woken);
}

TEST_F(RanksOnHosts, AnotherCheckpointAtTheSamePathIsNotTakenForIt) {
  copy_to_the_other(slept());
  boost::filesystem::remove_all(temporary_ / "g-000001");
  const std::string path = slept();  // of the same number
  SleepingEngine woken = on_two_hosts();
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kIncompatible, "rank 1: on the host ");
  copy_to_the_other(path);
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
  expect_to_go_on(woken);
}

TEST_F(RanksOnHosts, ACopyThatHasAnotherNumberThereCountsAsWokenFrom) {
  const std::string path = slept();
  boost::filesystem::rename(path, temporary_ / "g-000007");
  SleepingEngine woken = sharing();
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = temporary_ / "g-000007"}));
  EXPECT_TRUE(boost::filesystem::exists(temporary_ / "g-000007/WOKEN"));
  expect_to_go_on(woken);
}

}  // namespace
}  // namespace torpor
