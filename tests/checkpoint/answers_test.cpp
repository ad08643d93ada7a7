#include "checkpoint/answers.h"

#include <array>
#include <atomic>
#include <fstream>
#include <future>
#include <random>
#include <set>

#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/watched_file_system.h"
#include "checkpoint/roll_forward.h"
#include "tests/support/example_state.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::failed_with;
using test::succeeded;
using test::value_of;

Answer asked(const std::string& id, std::string response = "", std::string tenant = "", int32_t choice = 0) {
  Answer answer{.request = test::example_request(id, RequestStatus::kWaiting, 3, 0, 0),
                .response = response.empty() ? "response-" + id : std::move(response),
                .tenant = std::move(tenant),
                .choice = choice};
  answer.front.data = std::string("front end");
  return answer;
}

AnswerStep given(std::string id, uint32_t at, std::vector<int32_t> tokens, std::string text) {
  return {.id = std::move(id), .at = at, .tokens = std::move(tokens), .text = std::move(text)};
}

AnswerStep ended(std::string id, uint32_t at) {
  return {.id = std::move(id),
          .at = at,
          .state = AnswerState::kFinished,
          .finish_reason = "stop",
          .stop_reason = {int64_t{7}}};
}

// Both clocks, moved by hand: time passes on both, the wall may be set to anything.
class TwoClocks final : public Clock {
 public:
  std::chrono::nanoseconds now() const override { return monotonic; }
  double unix_seconds() const override { return wall; }
  void pass(double seconds) {
    monotonic += std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
    wall += seconds;
  }
  std::chrono::nanoseconds monotonic{1};
  double wall = 1e9;
};

class AnswersTest : public ::testing::Test {
 protected:
  AnswersOptions options() {
    return {.clock = &clock_, .directory = directory_ / "answers", .engine = {{"model", "a"}}, .own_thread = false};
  }
  std::unique_ptr<Answers> open(AnswersOptions options) {
    return value_of(Answers::open(linux_file_system(), std::move(options)));
  }
  std::unique_ptr<Answers> open() { return open(options()); }
  // What the thread of the answers does.
  static Status rotate_if_due(Answers& answers) { return answers.rotation_due() ? answers.rotate() : ok(); }
  std::string file() const {
    std::string found;
    for (const auto& entry : boost::filesystem::directory_iterator(directory_ / "answers")) {
      if (entry.path().filename().string().starts_with("answers-")) found = entry.path().string();
    }
    return found;
  }
  static Bytes read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  static void write(const std::string& path, const Bytes& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }

  test::TemporaryDirectory directory_;
  TwoClocks clock_;
};

TEST_F(AnswersTest, WhatWasGivenIsThereAfterTheEndOfTheProcess) {
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    ASSERT_TRUE(succeeded(answers->start(asked("b"))));
    ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1, 2}, "Hé"), given("b", 0, {9}, "x")})));
    ASSERT_TRUE(succeeded(answers->step({given("a", 2, {3}, "llo"), ended("b", 1)})));
  }
  const auto answers = open();
  const Answer a = *answers->get("a");
  EXPECT_EQ(a.request.output_token_ids, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(a.request.prompt_token_ids, asked("a").request.prompt_token_ids);
  EXPECT_EQ(a.front, asked("a").front);
  EXPECT_EQ(a.text, "Héllo");
  EXPECT_EQ(a.text_ends, (std::vector<uint32_t>{0, 2, 5}));
  EXPECT_EQ(a.state, AnswerState::kRunning);
  const Answer b = *answers->get("b");
  EXPECT_EQ(b.state, AnswerState::kFinished);
  EXPECT_EQ(b.finish_reason, "stop");
  EXPECT_EQ(b.stop_reason, Value{int64_t{7}});
  EXPECT_EQ(answers->counts().running, 1U);
  EXPECT_EQ(answers->counts().ended, 1U);
  ASSERT_TRUE(succeeded(answers->step({given("a", 3, {4}, "!")})));  // and it goes on
}

TEST_F(AnswersTest, AReaderGoesOnAfterAnyTokenOrCharacter) {
  const auto answers = open();
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  const std::vector<std::string> pieces = {"Über", "", " 東京", "🌊!", "."};
  std::string whole;
  for (uint32_t i = 0; i < pieces.size(); ++i) {
    ASSERT_TRUE(succeeded(answers->step({given("a", i, {static_cast<int32_t>(i)}, pieces[i])})));
    whole += pieces[i];
  }
  for (uint32_t from = 0; from <= pieces.size(); ++from) {
    const AnswerPart part = value_of(answers->part("a", from));
    std::string rest;
    for (uint32_t i = from; i < pieces.size(); ++i) rest += pieces[i];
    EXPECT_EQ(part.text, rest) << from;
    EXPECT_EQ(part.tokens.size(), pieces.size() - from);
  }
  EXPECT_EQ(value_of(answers->part("a", 0, 6)).text, "京🌊!.");  // in the middle of a token: its text is not repeated …
  EXPECT_EQ(value_of(answers->part("a", 0, 6)).tokens, (std::vector<int32_t>{2, 3, 4}));  // … its id is
  EXPECT_EQ(value_of(answers->part("a", 0, 10)).text, "");
  EXPECT_TRUE(failed_with(answers->part("a", 6), Code::kInvalidArgument, "5 tokens"));
  EXPECT_TRUE(failed_with(answers->part("a", 0, 11), Code::kInvalidArgument, "10 characters"));
  EXPECT_TRUE(failed_with(answers->part("z", 0), Code::kNotFound, "no answer z"));
}

TEST_F(AnswersTest, OnlyItsTenantFindsAnAnswerAndTheNewestOfAnIdCounts) {
  const auto answers = open();
  ASSERT_TRUE(succeeded(answers->start(asked("1", "r", "alice", 0))));
  ASSERT_TRUE(succeeded(answers->start(asked("2", "r", "alice", 1))));
  ASSERT_TRUE(succeeded(answers->start(asked("3", "r", "bob", 0))));
  EXPECT_EQ(answers->find("r", "alice"), (std::vector<std::string>{"1", "2"}));
  EXPECT_EQ(answers->find("r", "bob"), (std::vector<std::string>{"3"}));
  EXPECT_TRUE(answers->find("r", "").empty());
  EXPECT_TRUE(answers->find("other", "alice").empty());
  ASSERT_TRUE(succeeded(answers->start(asked("4", "r", "alice", 0))));
  EXPECT_EQ(answers->find("r", "alice"), (std::vector<std::string>{"4", "2"}));
}

TEST_F(AnswersTest, ChoicesOfAnotherCallUnderTheSameIdAreNotMixedIn) {
  const auto begin = [](Answers& answers, const std::string& id, int32_t choice, uint64_t call) {
    Answer answer = asked(id, "r", "", choice);
    answer.call = call;
    ASSERT_TRUE(succeeded(answers.start(answer)));
  };
  auto answers = open();
  for (const int32_t choice : {0, 1}) begin(*answers, "old-" + std::to_string(choice), choice, 1);
  begin(*answers, "new-1", 1, 2);
  EXPECT_EQ(answers->find("r", ""), (std::vector<std::string>{"new-1"}));
  begin(*answers, "new-0", 0, 2);
  EXPECT_EQ(answers->find("r", ""), (std::vector<std::string>{"new-0", "new-1"}));
  answers.reset();
  answers = open();
  EXPECT_EQ(answers->find("r", ""), (std::vector<std::string>{"new-0", "new-1"}));
  EXPECT_EQ(value_of(answers->position("new-0")).call, 2U);
}

TEST_F(AnswersTest, AStepThatDoesNotFitIsRefusedAndNothingOfItsRecordIsTaken) {
  const auto answers = open();
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  ASSERT_TRUE(succeeded(answers->start(asked("b"))));
  EXPECT_TRUE(failed_with(answers->start(asked("a")), Code::kInvalidArgument, "already"));
  EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1}, "x"), given("b", 1, {1}, "x")}), Code::kInvalidArgument,
                          "b has 0 tokens"));
  EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1}, "x"), given("c", 0, {1}, "x")}), Code::kInvalidArgument,
                          "no answer c"));
  EXPECT_EQ(value_of(answers->position("a")).tokens_end, 0U);
  EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1, -1}, "x")}), Code::kInvalidArgument, "negative"));
  Answer short_one = asked("short");
  short_one.request.max_tokens = 2;
  ASSERT_TRUE(succeeded(answers->start(short_one)));
  ASSERT_TRUE(succeeded(answers->step({given("short", 0, {1}, "x")})));
  EXPECT_TRUE(failed_with(answers->step({given("short", 1, {2, 3}, "yz")}), Code::kInvalidArgument,
                          "may have 2 tokens, a step brings it to 3"));
  ASSERT_TRUE(succeeded(answers->step({given("short", 1, {2}, "y")})));
  ASSERT_TRUE(succeeded(answers->step({ended("a", 0)})));
  EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1}, "x")}), Code::kInvalidArgument, "has ended"));
}

// Digests are right where the writer was wrong: what was given must be of one piece all the same.
TEST_F(AnswersTest, TokensThatDoNotFitTheirTextAreDamage) {
  const auto with = [&](const std::vector<uint32_t>& text_ends) {
    Answer answer = asked("b");
    answer.request.output_token_ids.assign(text_ends.size(), 5);
    answer.text = "zw\xc3\xb6lf";
    answer.text_ends = text_ends;
    return answer;
  };
  const auto read = [&](const Answer& answer) {
    const test::TemporaryDirectory directory;
    {
      const auto opened = value_of(linux_file_system().open_directory(directory.path(), false));
      const auto file = value_of(AnswersFile::create(*opened, 1, nullptr, false));
      for (const Bytes& record : {engine_record({{"model", "a"}}), answer_record(asked("a")), answer_record(answer)})
        EXPECT_TRUE(succeeded(file->append(record)));
    }
    AnswersOptions options = this->options();
    options.directory = directory.path();
    const auto answers = open(options);
    EXPECT_TRUE(answers->get("a").has_value());
    EXPECT_EQ(answers->counts().lost_bytes == 0, answers->get("b").has_value());
    return answers->get("b").has_value();
  };
  EXPECT_TRUE(read(with({})));
  EXPECT_TRUE(read(with({2, 2, 5})));
  EXPECT_FALSE(read(with({3, 2, 5})));  // text that is taken back
  EXPECT_FALSE(read(with({2, 6})));     // and text that is not there: its bytes are six, its code points five
}

TEST_F(AnswersTest, CutOffAnywhereTheLogGivesWhatStandsBeforeTheCut) {
  std::vector<std::pair<uint64_t, uint32_t>> ends;  // of the file, and how many tokens it then has
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    for (uint32_t i = 0; i < 10; ++i) {
      ends.emplace_back(answers->counts().log_bytes, i);
      ASSERT_TRUE(succeeded(answers->step({given("a", i, {static_cast<int32_t>(i)}, "x")})));
    }
  }
  const std::string path = file();
  const Bytes whole = read(path);
  for (uint64_t size = ends.front().first; size < whole.size(); ++size) {
    write(path, Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    const auto directory = directory_ / "copy";
    boost::filesystem::create_directory(directory);
    boost::filesystem::permissions(directory, boost::filesystem::owner_all);
    write(directory + "/answers-000000000001", Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    boost::filesystem::permissions(directory + "/answers-000000000001",
                                   boost::filesystem::owner_read | boost::filesystem::owner_write);
    AnswersOptions copy = options();
    copy.directory = directory;
    const auto answers = open(copy);
    uint32_t expected = 0;
    for (const auto& [end, tokens] : ends) {
      if (end <= size) expected = tokens;
    }
    ASSERT_EQ(value_of(answers->position("a")).tokens_end, expected) << size;
    boost::filesystem::remove_all(directory);
  }
}

TEST_F(AnswersTest, NoFlippedBitIsBelieved) {
  std::vector<int32_t> tokens;
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    for (int32_t i = 0; i < 5; ++i) {
      ASSERT_TRUE(succeeded(answers->step({given("a", static_cast<uint32_t>(i), {1000 + i}, "x")})));
      tokens.push_back(1000 + i);
    }
  }
  const std::string path = file();
  const Bytes whole = read(path);
  int refused = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    const std::string directory = directory_ / "copy";
    boost::filesystem::create_directory(directory);
    boost::filesystem::permissions(directory, boost::filesystem::owner_all);
    Bytes damaged = whole;
    damaged[at] ^= static_cast<uint8_t>(1U << (at % 8));
    write(directory + "/answers-000000000001", damaged);
    boost::filesystem::permissions(directory + "/answers-000000000001",
                                   boost::filesystem::owner_read | boost::filesystem::owner_write);
    AnswersOptions copy = options();
    copy.directory = directory;
    const Result<std::unique_ptr<Answers>> answers = Answers::open(linux_file_system(), copy);
    if (!answers) {
      ++refused;  // another version, a seal without a key
    } else if (const std::optional<Answer> a = (*answers)->get("a")) {
      ASSERT_LE(a->request.output_token_ids.size(), tokens.size());
      ASSERT_TRUE(std::equal(a->request.output_token_ids.begin(), a->request.output_token_ids.end(), tokens.begin()))
          << at;
      ASSERT_EQ(a->request.prompt_token_ids, asked("a").request.prompt_token_ids) << at;
      // Bytes of the head that mean nothing may differ; all others take their record with them.
      if (at >= 64) {
        ASSERT_LT(a->request.output_token_ids.size(), tokens.size()) << at;
      }
    }
    boost::filesystem::remove_all(directory);
  }
  EXPECT_LT(refused, 9);
}

TEST_F(AnswersTest, ALogIsRefusedByAnotherEngineWhileAnswersRunAndByAnotherKey) {
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  }
  AnswersOptions other = options();
  other.engine = {{"model", "b"}};
  EXPECT_TRUE(failed_with(Answers::open(linux_file_system(), other), Code::kIncompatible, "model"));
  const std::shared_ptr<const Key> key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1});
  AnswersOptions sealed = options();
  sealed.key = key;
  EXPECT_TRUE(failed_with(Answers::open(linux_file_system(), sealed), Code::kUnauthenticated, "not sealed"));
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->step({ended("a", 0)})));
  }
  const auto answers = open(other);  // text that has ended needs no engine
  EXPECT_EQ(answers->get("a")->state, AnswerState::kFinished);
}

TEST_F(AnswersTest, ASealedLogHidesAndProvesItsContent) {
  const auto key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1});
  AnswersOptions sealed = options();
  sealed.key = key;
  sealed.encrypt = true;
  {
    const auto answers = open(sealed);
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "a secret sentence")})));
  }
  const Bytes bytes = read(file());
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()).find("secret"), std::string::npos);
  EXPECT_TRUE(failed_with(Answers::open(linux_file_system(), options()), Code::kUnauthenticated, "is sealed"));
  AnswersOptions wrong = sealed;
  wrong.key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{2});
  EXPECT_TRUE(failed_with(Answers::open(linux_file_system(), wrong), Code::kUnauthenticated, "another key"));
  EXPECT_EQ(open(sealed)->get("a")->text, "a secret sentence");
}

TEST_F(AnswersTest, ADirectoryHasOneServer) {
  const auto answers = open();
  EXPECT_TRUE(failed_with(Answers::open(linux_file_system(), options()), Code::kUnavailable, "another server"));
}

TEST_F(AnswersTest, EndedAnswersGoByAgeAndSizeAndRunningOnesStay) {
  AnswersOptions few = options();
  few.keep_seconds = 10;
  auto answers = open(few);
  ASSERT_TRUE(succeeded(answers->start(asked("old"))));
  ASSERT_TRUE(succeeded(answers->start(asked("runs"))));
  ASSERT_TRUE(succeeded(answers->step({ended("old", 0)})));
  clock_.pass(11);
  ASSERT_TRUE(succeeded(answers->start(asked("new"))));
  ASSERT_TRUE(succeeded(answers->step({ended("new", 0)})));
  answers.reset();
  answers = open(few);
  EXPECT_FALSE(answers->get("old"));
  EXPECT_TRUE(answers->find("response-old", "").empty());
  EXPECT_TRUE(answers->get("runs"));
  EXPECT_TRUE(answers->get("new"));
  answers.reset();
  few.keep_bytes = 0;
  answers = open(few);
  EXPECT_FALSE(answers->get("new"));
  EXPECT_TRUE(answers->get("runs"));
}

TEST_F(AnswersTest, TheLogDoesNotGrowWithoutEnd) {
  AnswersOptions small = options();
  small.file_bytes = 4096;
  small.keep_bytes = 10'000;
  auto answers = open(small);
  const std::string text(1000, 'x');
  for (int i = 0; i < 15'000; ++i) {
    const std::string id = std::to_string(i);
    ASSERT_TRUE(succeeded(answers->start(asked(id))));
    ASSERT_TRUE(succeeded(answers->step({given(id, 0, {1}, text)})));
    ASSERT_TRUE(succeeded(answers->step({ended(id, 1)})));
    ASSERT_TRUE(succeeded(rotate_if_due(*answers)));
  }
  EXPECT_LT(answers->counts().log_bytes, 12ULL << 20);
  EXPECT_LT(answers->counts().ended, 100U);
  size_t files = 0;
  for (const auto& entry : boost::filesystem::directory_iterator(directory_ / "answers"))
    files += entry.path().filename().string().starts_with("answers-") ? 1 : 0;
  EXPECT_EQ(files, 1U);
}

TEST_F(AnswersTest, ALogThatCannotBeWrittenLosesNothingInMemoryAndIsWrittenWholeLater) {
  test::FaultyFileSystem faulty;
  test::FaultPlan& plan = faulty.plan;
  auto answers = value_of(Answers::open(faulty, options()));
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  plan.set(test::Fault::kError, 1, ENOSPC, true);
  EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1}, "x")}), Code::kResourceExhausted));
  EXPECT_TRUE(succeeded(answers->step({given("a", 1, {2}, "y")})));  // said once, and in the counts
  EXPECT_NE(answers->counts().problem, "");
  EXPECT_EQ(answers->get("a")->text, "xy");
  plan.clear();
  EXPECT_FALSE(answers->rotation_due());  // not a second later yet
  clock_.pass(2);
  ASSERT_TRUE(succeeded(answers->step({given("a", 2, {3}, "z")})));
  ASSERT_TRUE(answers->rotation_due());
  ASSERT_TRUE(succeeded(answers->rotate()));
  EXPECT_EQ(answers->counts().problem, "");
  answers.reset();
  EXPECT_EQ(open()->get("a")->text, "xyz");
}

TEST_F(AnswersTest, AClockThatIsSetBackDoesNotKeepALogThatFailedFromBeingWrittenAgain) {
  test::FaultyFileSystem faulty;
  auto answers = value_of(Answers::open(faulty, options()));
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  faulty.plan.set(test::Fault::kError, 1, ENOSPC, true);
  EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1}, "x")}), Code::kResourceExhausted));
  faulty.plan.clear();
  clock_.pass(2);
  clock_.wall -= 86400;
  ASSERT_TRUE(succeeded(answers->step({given("a", 1, {2}, "y")})));
  ASSERT_TRUE(succeeded(rotate_if_due(*answers)));
  EXPECT_EQ(answers->counts().problem, "");
  answers.reset();
  EXPECT_EQ(open()->get("a")->text, "xy");
}

TEST_F(AnswersTest, AClockThatIsSetForwardTakesNoAnswerAwayBeforeItsTime) {
  AnswersOptions few = options();
  few.keep_seconds = 10;
  few.keep_bytes = 27'000;  // of two
  const auto answers = open(few);
  for (const std::string id : {"1", "2", "3"}) {
    ASSERT_TRUE(succeeded(answers->start(asked(id))));
    ASSERT_TRUE(succeeded(answers->step({given(id, 0, {1}, std::string(10'000, 'x'))})));
    if (id == "3") clock_.wall += 86400;
    ASSERT_TRUE(succeeded(answers->step({ended(id, 1)})));
  }
  ASSERT_TRUE(succeeded(answers->start(asked("4"))));
  EXPECT_FALSE(answers->get("1"));  // for want of room
  EXPECT_TRUE(answers->get("2"));
  EXPECT_TRUE(answers->get("3"));
}

TEST_F(AnswersTest, AnAnswerThatEndedInTheFutureIsForgottenInItsTimeAllTheSame) {
  AnswersOptions few = options();
  few.keep_seconds = 10;
  clock_.wall += 86400;  // a clock that is set right later
  {
    const auto answers = open(few);
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    ASSERT_TRUE(succeeded(answers->step({ended("a", 0)})));
  }
  clock_.wall -= 86400;
  EXPECT_TRUE(open(few)->get("a"));
  clock_.pass(11);
  EXPECT_FALSE(open(few)->get("a"));
}

TEST_F(AnswersTest, NobodyWaitsForANewFileOfTheLog) {
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
  AnswersOptions small = options();
  small.file_bytes = 1024;
  small.own_thread = true;
  auto answers = value_of(Answers::open(*watched, small));
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  uint32_t at = 0;
  for (; at < 6; ++at) ASSERT_TRUE(succeeded(answers->step({given("a", at, {1}, std::string(1 << 20, 'x'))})));
  begun.get_future().wait();  // the new file is being synced, and that takes long
  auto others = std::async(std::launch::async, [&]() -> Status {
    TORPOR_TRY(answers->start(asked("b")));
    TORPOR_TRY(answers->step({given("a", at, {2}, "y"), given("b", 0, {1}, "x")}));
    TORPOR_TRY(answers->part("b", 0));
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
TEST_F(AnswersTest, NoLockIsHeldOverASyncOrAnythingElseOfANewFile) {
  Answers* answers = nullptr;
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
  const auto opened = value_of(Answers::open(*watched, options()));
  answers = opened.get();
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "x")})));
  ASSERT_TRUE(succeeded(answers->sync()));
  ASSERT_TRUE(succeeded(answers->rotate()));
  answers = nullptr;
  EXPECT_GT(readers, 10);
}

TEST_F(AnswersTest, OneRecordHasOneStepOfAnAnswer) {
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1}, "x"), given("a", 0, {2}, "y")}), Code::kInvalidArgument));
    EXPECT_EQ(answers->get("a")->text, "");
    ASSERT_TRUE(succeeded(answers->step({given("a", 0, {3}, "z")})));
  }
  EXPECT_EQ(open()->get("a")->text, "z");
}

TEST_F(AnswersTest, AfterAFailedSyncAllGoesIntoANewFile) {
  test::FaultyFileSystem faulty;
  test::FaultPlan& plan = faulty.plan;
  auto answers = value_of(Answers::open(faulty, options()));
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

// Three answers get steps, of which some are synced; files are begun anew, and while that goes on there are steps, new
// answers and syncs too, between all calls of files that are made without a lock.
class Rotations {
 public:
  Rotations(test::ModelFileSystem& disk, AnswersOptions options) : disk_(disk), options_(std::move(options)) {}

  void run() {
    answers_ = value_of(Answers::open(disk_, options_));
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
    answers_ = value_of(Answers::open(disk_, options_));
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
  const AnswersOptions options_;
  std::unique_ptr<Answers> answers_;
  std::map<std::string, size_t> given_;
  std::vector<std::map<std::string, size_t>> synced_;
  bool rotating_ = false;
  bool inside_ = false;
  int writes_ = 0;
};

// Wherever power goes, what was synced is there, and what is there was given.
TEST_F(AnswersTest, APowerCutTakesOnlyWhatWasNotSynced) {
  test::ModelFileSystem disk;
  AnswersOptions on_disk = options();
  on_disk.directory = "/answers";
  Rotations workload(disk, on_disk);
  workload.run();
  test::PowerCuts cuts(disk.record, test::ModelFileSystem().disk());
  std::mt19937_64 random(1);
  uint64_t states = 0;
  std::map<std::string, size_t> synced;
  while (!cuts.done()) {
    const test::ModelChange& change = disk.record[cuts.position()];
    if (change.kind == test::ModelChange::Kind::kNote) synced = workload.synced(change.target);
    cuts.step();
    for (int choice = 0; choice < 20; ++choice, ++states) {
      test::ModelFileSystem after(cuts.state(choice, random));
      const Result<std::unique_ptr<Answers>> answers = Answers::open(after, on_disk);
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
  EXPECT_GT(states, 3000U);
}

// A kill takes nothing that was recorded, wherever the log stands at that moment: all calls of files have been made,
// one of them perhaps halfway.
TEST_F(AnswersTest, AKillAtAnyMomentTakesNothingThatWasRecorded) {
  uint64_t killed = 0;
  for (const test::Fault fault : {test::Fault::kKillBefore, test::Fault::kKillAfter, test::Fault::kKillTorn}) {
    for (uint64_t call = 1;; ++call) {
      AnswersOptions own = options();
      own.directory = directory_ / fmt::format("{}-{}", static_cast<int>(fault), call);
      std::array<int, 2> pipe{};
      ASSERT_EQ(::pipe(pipe.data()), 0);
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        test::FaultyFileSystem faulty;
        auto answers = value_of(Answers::open(faulty, own));
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
  EXPECT_GT(killed, 30U);
}

TEST_F(AnswersTest, NothingIsRecordedAfterClose) {
  auto answers = open();
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  answers->close();
  EXPECT_TRUE(succeeded(answers->step({ended("a", 0)})));
  answers.reset();
  EXPECT_EQ(open()->get("a")->state, AnswerState::kRunning);
}

// --- rolling forward
// ----------------------------------------------------------------------------------------------------

Answer so_far(const RequestState& request, std::vector<int32_t> tokens, AnswerState state = AnswerState::kRunning) {
  Answer answer{.request = request, .state = state};
  answer.request.output_token_ids = std::move(tokens);
  return answer;
}

TEST(RollForwardTest, RequestsGetWhatWasGivenSinceAndNewOnesBeginAgain) {
  SchedulerCheckpoint state = test::example_checkpoint().state;
  const RequestState run = state.scheduler.requests[0];
  const RequestState fresh = test::example_request("fresh", RequestStatus::kWaiting, 4, 0, 0);
  const RequestState begun = test::example_request("begun", RequestStatus::kRunning, 4, 0, 0);
  const std::vector<Answer> answers = {
      so_far(run, {200, 201, 55, 56}), so_far(fresh, {}), so_far(begun, {7, 8}),
      so_far(test::example_request("long ago", RequestStatus::kWaiting, 1, 0, 0), {}, AnswerState::kFinished)};
  const RolledForward rolled = value_of(roll_forward(state, answers, false));
  EXPECT_EQ(rolled.extended, (std::vector<std::string>{"run"}));
  EXPECT_EQ(rolled.added, (std::vector<std::string>{"fresh", "begun"}));
  EXPECT_TRUE(rolled.dropped.empty());
  EXPECT_EQ(state.scheduler.requests[0].output_token_ids, (std::vector<int32_t>{200, 201, 55, 56}));
  EXPECT_EQ(state.scheduler.requests[0].num_computed_tokens, run.num_computed_tokens);
  EXPECT_EQ(state.scheduler.waiting, (std::vector<std::string>{"wait", "fresh", "begun"}));
  EXPECT_EQ(state.scheduler.requests[3].status, RequestStatus::kWaiting);
  EXPECT_EQ(state.scheduler.requests[4].status, RequestStatus::kPreempted);
  EXPECT_EQ(state.scheduler.requests[4].num_computed_tokens, 0);
  EXPECT_TRUE(state.scheduler.requests[4].block_hashes.empty());
}

TEST(RollForwardTest, EndedRequestsGoWithTheirBlocks) {
  SchedulerCheckpoint state = test::example_checkpoint().state;
  const std::vector<Answer> answers = {so_far(state.scheduler.requests[0], {200, 201, 9}, AnswerState::kAborted)};
  const RolledForward rolled = value_of(roll_forward(state, answers, false));
  EXPECT_EQ(rolled.dropped, (std::vector<std::string>{"run"}));
  EXPECT_EQ(state.scheduler.requests.size(), 2U);
  EXPECT_TRUE(state.scheduler.running.empty());
  EXPECT_TRUE(state.workers[0].rows.empty());
  EXPECT_EQ(state.kv.groups[0].tables.size(), 1U);
}

TEST(RollForwardTest, EndedRequestsGoWithTheirBlocksOfEveryGroup) {
  SchedulerCheckpoint state = test::example_of_two_groups().state;
  const std::vector<Answer> answers = {so_far(state.scheduler.requests[0], {200, 201, 9}, AnswerState::kAborted),
                                       so_far(state.scheduler.requests[2], {200, 55})};
  const RolledForward rolled = value_of(roll_forward(state, answers, false));
  EXPECT_EQ(rolled.dropped, (std::vector<std::string>{"run"}));
  EXPECT_EQ(rolled.extended, (std::vector<std::string>{"held"}));
  for (const KvGroup& group : state.kv.groups) EXPECT_EQ(group.tables.size(), 1U);
  EXPECT_EQ(state.kv.groups[1].tables[0].blocks, (std::vector<int32_t>{0, 6}));
  EXPECT_EQ(state.kv.free_order, (std::vector<int32_t>{7, 4, 2, 5}));
}

TEST(RollForwardTest, ARequestThatTookAnotherCourseIsComputedAnewFromWhatWasGiven) {
  SchedulerCheckpoint state = test::example_checkpoint().state;
  const std::vector<Answer> answers = {so_far(state.scheduler.requests[0], {200, 999})};
  const RolledForward rolled = value_of(roll_forward(state, answers, false));
  EXPECT_EQ(rolled.added, (std::vector<std::string>{"run"}));
  EXPECT_EQ(state.scheduler.requests.back().output_token_ids, (std::vector<int32_t>{200, 999}));
  EXPECT_EQ(state.scheduler.requests.back().num_computed_tokens, 0);
}

TEST(RollForwardTest, AStateThatIsAheadOfTheLogStays) {
  SchedulerCheckpoint state = test::example_checkpoint().state;
  const SchedulerCheckpoint before = state;
  const std::vector<Answer> answers = {so_far(state.scheduler.requests[0], {200})};
  const RolledForward rolled = value_of(roll_forward(state, answers, false));
  EXPECT_TRUE(rolled.extended.empty());
  EXPECT_EQ(state, before);
}

TEST(RollForwardTest, OnlyAStateThatWasGoneOnWithLosesRequestsThatNobodyRemembers) {
  SchedulerCheckpoint state = test::example_checkpoint().state;
  const std::vector<Answer> answers = {
      so_far(state.scheduler.requests[2], state.scheduler.requests[2].output_token_ids)};
  EXPECT_TRUE(value_of(roll_forward(state, answers, false)).dropped.empty());
  const RolledForward rolled = value_of(roll_forward(state, answers, true));
  EXPECT_EQ(std::set<std::string>(rolled.dropped.begin(), rolled.dropped.end()),
            (std::set<std::string>{"run", "wait"}));
  ASSERT_EQ(state.scheduler.requests.size(), 1U);
  EXPECT_EQ(state.scheduler.requests[0].id, "held");
}

TEST(RollForwardTest, AnswersTravelWhole) {
  const std::vector<Answer> answers = {
      so_far(test::example_request("a", RequestStatus::kWaiting, 3, 0, 0), {1, 2}),
      so_far(test::example_request("b", RequestStatus::kWaiting, 3, 0, 0), {3}, AnswerState::kFinished)};
  const Bytes packed = pack_answers(answers);
  const std::vector<Answer> unpacked = value_of(unpack_answers(std::as_bytes(std::span(packed))));
  ASSERT_EQ(unpacked.size(), 2U);
  EXPECT_EQ(unpacked[0].request, answers[0].request);
  EXPECT_EQ(unpacked[1].request.id, "b");
  EXPECT_EQ(unpacked[1].state, AnswerState::kFinished);
  EXPECT_TRUE(unpacked[1].request.prompt_token_ids.empty());
  for (size_t size = 0; size < packed.size(); ++size)
    EXPECT_FALSE(unpack_answers(std::as_bytes(std::span(packed)).first(size)));
}

}  // namespace
}  // namespace torpor
