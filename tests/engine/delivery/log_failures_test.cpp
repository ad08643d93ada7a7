// SPDX-License-Identifier: Apache-2.0
// A delivery log whose files fail, whose process is killed, whose power goes; and who waits for whom meanwhile.
#include <array>
#include <atomic>
#include <future>
#include <map>
#include <random>

#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/watched_file_system.h"
#include "engine/delivery/delivery_log.h"
#include "tests/engine/delivery/delivery_log_scene.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/model_file_system.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using test::asked;
using test::DeliveryLogTest;
using test::ended;
using test::failed_with;
using test::given;
using test::succeeded;
using test::value_of;

TEST_F(DeliveryLogTest, ALogThatCannotBeWrittenLosesNothingInMemoryAndIsWrittenWholeLater) {
  test::FaultyFileSystem faulty;
  test::FaultPlan& plan = faulty.plan;
  auto answers = value_of(DeliveryLog::open(faulty, options()));
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  ASSERT_TRUE(succeeded(answers->start(asked("whole"))));
  EXPECT_THAT(answers->unwritten(), ::testing::IsEmpty());
  plan.set(test::Fault::kError, 1, ENOSPC, true);
  EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1}, "x")}), Code::kResourceExhausted));
  EXPECT_THAT(answers->unwritten(), ::testing::ElementsAre("a"));
  ASSERT_TRUE(succeeded(answers->start(asked("new"))));
  EXPECT_TRUE(succeeded(answers->step({given("a", 1, {2}, "y")})));  // said once, and in the counts
  EXPECT_NE(answers->counts().problem, "");
  EXPECT_EQ(answers->get("a")->text, "xy");
  EXPECT_THAT(answers->unwritten(), ::testing::UnorderedElementsAre("a", "new"));
  plan.clear();
  EXPECT_FALSE(answers->rotation_due());  // not a second later yet
  clock_.advance(std::chrono::seconds(2));
  ASSERT_TRUE(succeeded(answers->step({given("a", 2, {3}, "z")})));
  ASSERT_TRUE(answers->rotation_due());
  ASSERT_TRUE(succeeded(answers->rotate()));
  EXPECT_EQ(answers->counts().problem, "");
  EXPECT_THAT(answers->unwritten(), ::testing::IsEmpty());
  answers.reset();
  EXPECT_EQ(open()->get("a")->text, "xyz");
}

TEST_F(DeliveryLogTest, AClockThatIsSetBackDoesNotKeepALogThatFailedFromBeingWrittenAgain) {
  test::FaultyFileSystem faulty;
  auto answers = value_of(DeliveryLog::open(faulty, options()));
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  faulty.plan.set(test::Fault::kError, 1, ENOSPC, true);
  EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1}, "x")}), Code::kResourceExhausted));
  faulty.plan.clear();
  clock_.advance(std::chrono::seconds(2));
  clock_.set_wall(-std::chrono::hours(24));
  ASSERT_TRUE(succeeded(answers->step({given("a", 1, {2}, "y")})));
  ASSERT_TRUE(succeeded(rotate_if_due(*answers)));
  EXPECT_EQ(answers->counts().problem, "");
  answers.reset();
  EXPECT_EQ(open()->get("a")->text, "xy");
}

TEST_F(DeliveryLogTest, NobodyWaitsForANewFileOfTheLog) {
  std::promise<void> begun, go_on, gone;
  std::atomic<int> syncs = 0;
  const auto watched =
      make_watched_file_system(linux_file_system(), [&](std::string_view call, const std::string& name) {
        if (call == "sync" && name.ends_with("answers-000000000002") && ++syncs == 1) {
          begun.set_value();
          go_on.get_future().wait();
        }
        if (call == "remove_file" && name.ends_with("answers-000000000001")) gone.set_value();
        return ok();
      });
  DeliveryLogOptions small = options();
  small.file_bytes = 1024;
  small.own_thread = true;
  auto answers = value_of(DeliveryLog::open(*watched, small));
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  uint32_t at = 0;
  for (; at < 6; ++at) ASSERT_TRUE(succeeded(answers->step({given("a", at, {1}, std::string(1 << 20, 'x'))})));
  begun.get_future().wait();  // the new file is being synced, and that takes long
  auto others = std::async(std::launch::async, [&]() -> Status {
    TORPOR_RETURN_IF_ERROR(answers->start(asked("b")));
    TORPOR_RETURN_IF_ERROR(answers->step({given("a", at, {2}, "y"), given("b", 0, {1}, "x")}));
    TORPOR_RETURN_IF_ERROR(answers->part("b", 0));
    (void)answers->counts();
    return answers->sync();
  });
  EXPECT_EQ(others.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  go_on.set_value();
  EXPECT_TRUE(succeeded(others.get()));
  gone.get_future().wait();
  answers.reset();
  EXPECT_TRUE(file().ends_with("answers-000000000002"));
  answers = open();
  EXPECT_EQ(answers->get("a")->request.output_token_ids.size(), at + 1);
  EXPECT_EQ(answers->get("b")->text, "x");
}

// Also while it rotates, and also while a rotation fails.
TEST_F(DeliveryLogTest, NoLockIsHeldOverASyncOrAnythingElseOfANewFile) {
  DeliveryLog* answers = nullptr;
  int readers = 0;
  const auto watched = make_watched_file_system(linux_file_system(), [&](std::string_view, const std::string&) {
    if (answers == nullptr) return ok();
    auto reads =
        std::async(std::launch::async, [&] { return answers->counts().running + answers->find("r", "").size(); });
    if (reads.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      std::printf("a reader waits for a file\n");
      ::_exit(1);  // it would wait for ever: so does this thread then
    }
    ++readers;
    return ok();
  });
  const auto opened = value_of(DeliveryLog::open(*watched, options()));
  answers = opened.get();
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "x")})));
  ASSERT_TRUE(succeeded(answers->sync()));
  ASSERT_TRUE(succeeded(answers->rotate()));
  answers = nullptr;
  EXPECT_GT(readers, 10);
}

// Answers are written into the new file one by one; "x" is forgotten and its id used again before its turn.
TEST_F(DeliveryLogTest, AnIdThatIsUsedAgainDuringARotationLosesNothing) {
  std::function<void()> between;
  int writes = 0;
  const auto watched =
      make_watched_file_system(linux_file_system(), [&](std::string_view call, const std::string& name) {
        const bool third = call == "pwrite" && name.ends_with("answers-000000000002") && ++writes == 3;
        if (third) between();  // after the head and the engine: the record of "a"; no lock is held
        return ok();
      });
  DeliveryLogOptions few = options();
  few.keep_bytes = 0;
  auto answers = value_of(DeliveryLog::open(*watched, few));
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  ASSERT_TRUE(succeeded(answers->start(asked("x"))));
  ASSERT_TRUE(succeeded(answers->step({ended("x", 0)})));
  between = [&] {
    ASSERT_TRUE(succeeded(answers->start(asked("y"))));  // forgets x
    ASSERT_TRUE(succeeded(answers->start(asked("x", "again"))));
    ASSERT_TRUE(succeeded(answers->step({given("x", 0, {7}, "x")})));
  };
  ASSERT_TRUE(succeeded(answers->rotate()));
  ASSERT_GT(writes, 3);
  ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "a"), given("x", 1, {8}, "y")})));
  ASSERT_TRUE(succeeded(answers->sync()));
  answers.reset();
  answers = open(few);
  EXPECT_EQ(answers->counts().lost_bytes, 0U);
  EXPECT_EQ(answers->get("a")->text, "a");
  EXPECT_EQ(answers->get("x")->text, "xy");
  EXPECT_TRUE(answers->get("y"));
}

TEST_F(DeliveryLogTest, AfterAFailedSyncAllGoesIntoANewFile) {
  test::FaultyFileSystem faulty;
  test::FaultPlan& plan = faulty.plan;
  auto answers = value_of(DeliveryLog::open(faulty, options()));
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  const std::string before = file();
  plan.set(test::Fault::kError, 1, EIO);
  EXPECT_TRUE(failed_with(answers->sync(), Code::kIo));
  plan.clear();
  ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "x")})));
  EXPECT_TRUE(answers->rotation_due());
  ASSERT_TRUE(succeeded(answers->sync()));  // not of the same file again
  EXPECT_NE(file(), before);
  answers.reset();
  EXPECT_EQ(open()->get("a")->text, "x");
}

TEST_F(DeliveryLogTest, AfterAFailedSyncOfAHandOverAllGoesIntoANewFile) {
  int failed = 0;
  for (uint64_t call = 1;; ++call) {
    SCOPED_TRACE(call);
    DeliveryLogOptions own = options();
    own.directory = directory_ / fmt::format("{}", call);
    test::FaultyFileSystem faulty;
    auto answers = value_of(DeliveryLog::open(faulty, own));
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    const std::string before = file_in(own.directory);
    faulty.plan.set(test::Fault::kError, call, EIO);
    const Status handed = answers->hand_over();
    faulty.plan.clear();
    if (handed) break;
    ++failed;
    ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "x")})));
    ASSERT_TRUE(succeeded(answers->sync()));  // not of the same file again
    EXPECT_NE(file_in(own.directory), before);
    ASSERT_TRUE(succeeded(answers->hand_over()));
  }
  EXPECT_EQ(failed, 2);  // before it takes no more records, and after that
}

// Three answers get steps, of which some are synced; files are begun anew, and while that goes on there are steps, new
// answers and syncs too, between all calls of files that are made without a lock.
class Rotations {
 public:
  Rotations(test::ModelFileSystem& disk, DeliveryLogOptions options) : disk_(disk), options_(std::move(options)) {}

  void run() {
    answers_ = value_of(DeliveryLog::open(disk_, options_));
    disk_.ignored = [this](const test::ModelChange& change) { return between(change); };
    for (const std::string id : {"a", "b", "c"}) begin(id);
    for (int round = 0; round < 3; ++round) {
      more(2);
      sync();
      more(1);
      rotating_ = true, writes_ = 0;
      ASSERT_TRUE(succeeded(answers_->rotate()));
      rotating_ = false;
    }
    more(1);
    answers_.reset();
    answers_ = value_of(DeliveryLog::open(disk_, options_));
    more(1);
    sync();
    answers_.reset();
    disk_.ignored = nullptr;
  }
  // What had been given when the note `synced` was made.
  const std::map<std::string, size_t>& synced(int note) const { return synced_.at(static_cast<size_t>(note)); }

 private:
  bool between(const test::ModelChange& change) {
    using Kind = test::ModelChange::Kind;
    if (!rotating_ || inside_) return false;
    if (change.kind == Kind::kWrite && ++writes_ > 4)
      return false;  // the head, the engine, two answers; no lock is held
    if (change.kind != Kind::kWrite && change.kind != Kind::kSyncFile && change.kind != Kind::kSyncDirectory)
      return false;
    inside_ = true;
    more(1);
    if (change.kind != Kind::kWrite) begin("during-" + std::to_string(given_.size()));
    sync();
    more(1);
    inside_ = false;
    return false;
  }
  void begin(const std::string& id) {
    ASSERT_TRUE(succeeded(answers_->start(asked(id))));
    given_[id] = 0;
  }
  void more(int steps) {
    for (int i = 0; i < steps; ++i) {
      std::vector<AnswerStep> all;
      for (auto& [id, count] : given_) {
        all.push_back(given(id, static_cast<uint32_t>(count), {100 + static_cast<int32_t>(count)}, "x"));
        ++count;
      }
      ASSERT_TRUE(succeeded(answers_->step(all)));
    }
  }
  void sync() {
    ASSERT_TRUE(succeeded(answers_->sync()));
    disk_.note("synced", static_cast<int>(synced_.size()));
    synced_.push_back(given_);
  }

  test::ModelFileSystem& disk_;
  const DeliveryLogOptions options_;
  std::unique_ptr<DeliveryLog> answers_;
  std::map<std::string, size_t> given_;
  std::vector<std::map<std::string, size_t>> synced_;
  bool rotating_ = false;
  bool inside_ = false;
  int writes_ = 0;
};

// Wherever power goes, what was synced is there, and what is there was given.
TEST_F(DeliveryLogTest, APowerCutTakesOnlyWhatWasNotSynced) {
  test::ModelFileSystem disk;
  DeliveryLogOptions on_disk = options();
  on_disk.directory = "/answers";
  Rotations workload(disk, on_disk);
  workload.run();
  test::PowerCuts cuts(disk.record, test::ModelFileSystem().disk());
  std::mt19937_64 random(1);
  const int choices = test::next_case() == 1 ? 20 : 7;
  uint64_t states = 0;
  std::map<std::string, size_t> synced;
  while (!cuts.done()) {
    const test::ModelChange& change = disk.record[cuts.position()];
    if (change.kind == test::ModelChange::Kind::kNote) synced = workload.synced(change.target);
    cuts.step();
    for (int choice = 0; choice < choices; ++choice, ++states) {
      test::ModelFileSystem after(cuts.state(choice, random));
      const Result<std::unique_ptr<DeliveryLog>> answers = DeliveryLog::open(after, on_disk);
      ASSERT_TRUE(succeeded(answers)) << states;
      for (const auto& [id, count] : synced) {
        const std::optional<Answer> answer = (*answers)->get(id);
        ASSERT_TRUE(answer) << id << ", state " << states;
        ASSERT_GE(answer->request.output_token_ids.size(), count) << id << ", state " << states;
      }
      for (const Answer& answer : (*answers)->all()) {
        const std::vector<int32_t>& tokens = answer.request.output_token_ids;
        for (size_t i = 0; i < tokens.size(); ++i) ASSERT_EQ(tokens[i], 100 + static_cast<int32_t>(i)) << states;
        ASSERT_EQ(answer.text, std::string(tokens.size(), 'x')) << states;
      }
    }
  }
  EXPECT_GT(states, static_cast<uint64_t>(150 * choices));
}

// A kill takes nothing that was recorded, wherever the log stands at that moment: all calls of files have been made,
// one of them perhaps halfway.
TEST_F(DeliveryLogTest, AKillAtAnyMomentTakesNothingThatWasRecorded) {
  uint64_t killed = 0;
  for (const test::Fault fault : {test::Fault::kKillBefore, test::Fault::kKillAfter, test::Fault::kKillTorn}) {
    for (uint64_t call = 1;; call += static_cast<uint64_t>(test::next_case())) {
      DeliveryLogOptions own = options();
      own.directory = directory_ / fmt::format("{}-{}", static_cast<int>(fault), call);
      std::array<int, 2> pipe{};
      ASSERT_EQ(::pipe(pipe.data()), 0);
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        test::FaultyFileSystem faulty;
        auto answers = value_of(DeliveryLog::open(faulty, own));
        faulty.plan.set(fault, call);
        (void)answers->start(asked("a"));
        uint32_t at = 0;
        const auto more = [&] {
          if (answers->step({given("a", at, {100 + static_cast<int32_t>(at)}, "x")})) ++at;
          (void)!::write(pipe[1], &at, sizeof at);
        };
        more();
        more();
        (void)answers->rotate();
        more();
        const bool fired = faulty.plan.fired();  // what is no write cannot be torn
        faulty.plan.clear();
        ::_exit(fired ? 1 : 0);
      }
      ::close(pipe[1]);
      uint32_t recorded = 0;
      while (::read(pipe[0], &recorded, sizeof recorded) == sizeof recorded) continue;
      ::close(pipe[0]);
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      const auto answers = open(own);
      if (const std::optional<Answer> a = answers->get("a")) {
        ASSERT_GE(a->request.output_token_ids.size(), recorded) << call;
      } else {
        ASSERT_EQ(recorded, 0U) << call;
      }
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
      killed += WIFSIGNALED(status) ? 1 : 0;
    }
  }
  EXPECT_GT(killed * static_cast<uint64_t>(test::next_case()), 30U);
}

// Wherever the call that sets a log aside fails or is killed, the next server has the answers, and the log keeps its
// bytes. The log before this one was removed but for what was set aside, so that numbers began again.
TEST_F(DeliveryLogTest, ALogIsSetAsideAlsoIfThatIsInterrupted) {
  uint64_t interrupted = 0;
  for (const test::Fault fault : {test::Fault::kError, test::Fault::kKillBefore, test::Fault::kKillAfter}) {
    for (uint64_t call = 1;; call += static_cast<uint64_t>(test::next_case())) {
      DeliveryLogOptions own = options();
      own.directory = directory_ / fmt::format("{}-{}", static_cast<int>(fault), call);
      ASSERT_TRUE(succeeded(open(own)->start(asked("a"))));
      const Bytes before = read(own.directory + "/answers-000000000001");
      write(own.directory + "/answers-000000000002", {});  // begun, not complete
      const std::string earlier = own.directory + "/set-aside-answers-000000000001";
      write(earlier, Bytes{1, 2, 3});
      own.engine = {{"model", "b"}};
      own.other_engine = OtherEngine::kSetAside;
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        test::FaultyFileSystem faulty;
        faulty.plan.set(fault, call);
        const bool opened = DeliveryLog::open(faulty, own).has_value();
        ::_exit(opened && !faulty.plan.fired() ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      const auto answers = open(own);
      ASSERT_TRUE(answers->get("a")) << call;
      EXPECT_EQ(answers->get("a")->state, AnswerState::kFailed) << "it runs as this engine's own, call " << call;
      bool kept = false;
      for (const auto& entry : boost::filesystem::directory_iterator(own.directory)) {
        const bool aside = entry.path().filename().string().starts_with("set-aside-");
        kept = kept || (aside && read(entry.path().string()) == before);
      }
      EXPECT_TRUE(kept) << "fault " << static_cast<int>(fault) << " at call " << call;
      EXPECT_EQ(read(earlier), (Bytes{1, 2, 3}));
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
      ++interrupted;
    }
  }
  EXPECT_GT(interrupted * static_cast<uint64_t>(test::next_case()), 30U);
}

}  // namespace
}  // namespace torpor
