// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery/delivery_log.h"

#include <array>

#include "tests/engine/delivery/delivery_log_scene.h"
namespace torpor {
namespace {

using test::asked;
using test::DeliveryLogTest;
using test::ended;
using test::failed_with;
using test::given;
using test::succeeded;
using test::value_of;

TEST_F(DeliveryLogTest, WhatWasGivenIsThereAfterTheEndOfTheProcess) {
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

// --- one server hands over to another one ----------------------------------------------------------------------------

TEST_F(DeliveryLogTest, AnotherServerOpensALogThatIsHandedOver) {
  const auto answers = open();
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1, 2}, "Hé")})));
  EXPECT_TRUE(failed_with(answers->take_back(), Code::kFailedPrecondition, "not handed over"));
  ASSERT_TRUE(succeeded(answers->hand_over()));
  EXPECT_TRUE(failed_with(answers->hand_over(), Code::kFailedPrecondition, "closed"));
  EXPECT_EQ(value_of(answers->part("a", 0)).text, "Hé");  // who reads here still gets it
  const auto next = open();
  EXPECT_EQ(next->get("a")->request.output_token_ids, (std::vector<int32_t>{1, 2}));
  const std::string its_file = file();
  EXPECT_TRUE(failed_with(answers->rotate(), Code::kUnavailable, "handed over"));  // it would delete that server's file
  EXPECT_EQ(file(), its_file);
  ASSERT_TRUE(succeeded(answers->step({given("a", 2, {9}, "?")})));  // not recorded
  EXPECT_EQ(answers->get("a")->request.output_token_ids.size(), 2U);
  EXPECT_TRUE(failed_with(answers->take_back(), Code::kUnavailable, "another server uses"));
  ASSERT_TRUE(succeeded(next->step({given("a", 2, {3}, "llo")})));
  EXPECT_EQ(next->get("a")->text, "Héllo");
}

TEST_F(DeliveryLogTest, ALogIsTakenBackAfterAServerThatCouldNotGoOn) {
  const auto answers = open();
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  ASSERT_TRUE(succeeded(answers->start(asked("b"))));
  ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "x"), given("b", 0, {5}, "y")})));
  ASSERT_TRUE(succeeded(answers->hand_over()));
  {  // one of another release, which says of an answer that it cannot go on
    DeliveryLogOptions other = options();
    other.engine = {{"model", "b"}};
    other.other_engine = OtherEngine::kTakeUp;
    const auto next = open(other);
    AnswerStep cannot = ended("a", 1);
    cannot.state = AnswerState::kFailed;
    ASSERT_TRUE(succeeded(next->step({cannot})));
  }
  ASSERT_TRUE(succeeded(answers->take_back()));
  EXPECT_EQ(answers->counts().running, 2U);
  EXPECT_TRUE(failed_with(DeliveryLog::open(linux_file_system(), options()), Code::kUnavailable));
  ASSERT_TRUE(succeeded(answers->step({given("a", 1, {2}, "z")})));
  ASSERT_TRUE(succeeded(answers->hand_over()));  // as often as it is asked
  ASSERT_TRUE(succeeded(answers->take_back()));
  answers->close();
  ASSERT_TRUE(succeeded(answers->sync()));
  EXPECT_EQ(value_of(answers->part("a", 0)).text, "xz");
}

TEST_F(DeliveryLogTest, ALogIsNotTakenBackWhereAnotherServerWentOn) {
  const auto went_on = [this](const std::vector<AnswerStep>& steps, bool begins) {
    const auto answers = open();
    if (!answers->get("a")) {
      ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    }
    ASSERT_TRUE(succeeded(answers->hand_over()));
    {
      const auto next = open();
      if (begins) {
        ASSERT_TRUE(succeeded(next->start(asked("new"))));
      }
      ASSERT_TRUE(succeeded(next->step(steps)));
    }
    const std::string file_before = file();
    EXPECT_TRUE(failed_with(answers->take_back(), Code::kFailedPrecondition, "another server went on"));
    EXPECT_EQ(file(), file_before);
    EXPECT_NE(open(), nullptr);  // the lock is free again, and the log as that server left it
  };
  went_on({given("a", 0, {7}, "")}, false);
  went_on({ended("a", 1)}, false);
  went_on({}, true);
}

TEST_F(DeliveryLogTest, ALogWithoutADirectoryIsNotHandedOver) {
  DeliveryLogOptions in_memory = options();
  in_memory.directory.clear();
  const auto answers = open(in_memory);
  EXPECT_TRUE(failed_with(answers->hand_over(), Code::kFailedPrecondition, "in memory only"));
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));  // it goes on
  EXPECT_TRUE(answers->get("a"));
}

TEST_F(DeliveryLogTest, ANoteOfARunningAnswerIsThereAfterARestartUntilItsNextStep) {
  const Value note{int64_t{7}};
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "x")})));
    AnswerStep step = given("a", 1, {}, "");
    step.note = note;
    ASSERT_TRUE(succeeded(answers->step({step})));
  }
  const auto answers = open();
  EXPECT_EQ(answers->get("a")->note, note);
  EXPECT_EQ(answers->get("a")->stop_reason, Value{});
  EXPECT_EQ(value_of(answers->position("a")).stop_reason, Value{});  // readers get none
  EXPECT_EQ(answers->counts().running, 1U);
  ASSERT_TRUE(succeeded(answers->step({given("a", 1, {2}, "y")})));
  EXPECT_EQ(answers->get("a")->note, Value{});
}

TEST_F(DeliveryLogTest, ANoteIsOfARunningAnswerAndAStopReasonOfAnEndedOne) {
  const auto answers = open();
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  AnswerStep noted = ended("a", 0);
  noted.note = Value{int64_t{7}};
  EXPECT_TRUE(failed_with(answers->step({noted}), Code::kInvalidArgument, "a note"));
  AnswerStep stopped = given("a", 0, {}, "");
  stopped.stop_reason = Value{int64_t{7}};
  EXPECT_TRUE(failed_with(answers->step({stopped}), Code::kInvalidArgument, "a stop reason"));
  AnswerStep note = given("a", 0, {}, "");
  note.note = Value{int64_t{7}};
  ASSERT_TRUE(succeeded(answers->step({note})));
  ASSERT_TRUE(succeeded(answers->step({ended("a", 0)})));
  EXPECT_EQ(answers->get("a")->note, Value{});
  EXPECT_EQ(answers->get("a")->stop_reason, Value{int64_t{7}});
}

TEST_F(DeliveryLogTest, AReaderGoesOnAfterAnyTokenOrCharacter) {
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

TEST_F(DeliveryLogTest, OnlyItsTenantFindsAnAnswerAndTheNewestOfAnIdCounts) {
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

TEST_F(DeliveryLogTest, ChoicesOfAnotherCallUnderTheSameIdAreNotMixedIn) {
  const auto begin = [](DeliveryLog& answers, const std::string& id, int32_t choice, uint64_t call) {
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

TEST_F(DeliveryLogTest, AStepThatDoesNotFitIsRefusedAndNothingOfItsRecordIsTaken) {
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
TEST_F(DeliveryLogTest, TokensThatDoNotFitTheirTextAreDamage) {
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
      const auto file = value_of(DeliveryLogFile::create(*opened, 1, nullptr, false));
      for (const Bytes& record : {engine_record({{"model", "a"}}), answer_record(asked("a")), answer_record(answer)})
        EXPECT_TRUE(succeeded(file->append(record)));
    }
    DeliveryLogOptions options = this->options();
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

TEST_F(DeliveryLogTest, CutOffAnywhereTheLogGivesWhatStandsBeforeTheCut) {
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
    DeliveryLogOptions copy = options();
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

TEST_F(DeliveryLogTest, NoFlippedBitIsBelieved) {
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
    DeliveryLogOptions copy = options();
    copy.directory = directory;
    const Result<std::unique_ptr<DeliveryLog>> answers = DeliveryLog::open(linux_file_system(), copy);
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

TEST_F(DeliveryLogTest, ALogIsRefusedByAnotherEngineWhileAnswersRunAndByAnotherKey) {
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  }
  DeliveryLogOptions other = options();
  other.engine = {{"model", "b"}};
  EXPECT_TRUE(failed_with(DeliveryLog::open(linux_file_system(), other), Code::kIncompatible, "model"));
  const std::shared_ptr<const Key> key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1});
  DeliveryLogOptions sealed = options();
  sealed.key = key;
  EXPECT_TRUE(failed_with(DeliveryLog::open(linux_file_system(), sealed), Code::kUnauthenticated, "not sealed"));
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->step({ended("a", 0)})));
  }
  const auto answers = open(other);  // text that has ended needs no engine
  EXPECT_EQ(answers->get("a")->state, AnswerState::kFinished);
}

TEST_F(DeliveryLogTest, AnotherEngineTakesUpTheAnswersThatStillRunWhereItsOperatorWantsThat) {
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1, 2}, "He")})));
  }
  DeliveryLogOptions other = options();
  other.engine = {{"model", "b"}};
  other.other_engine = OtherEngine::kTakeUp;
  {
    const auto answers = open(other);
    EXPECT_EQ(answers->get("a")->request.output_token_ids, (std::vector<int32_t>{1, 2}));
    EXPECT_NE(answers->counts().of_another.find("model"), std::string::npos);
    EXPECT_EQ(answers->counts().set_aside, "");
    ASSERT_TRUE(succeeded(answers->step({given("a", 2, {3}, "y")})));
  }
  const auto answers = open(other);  // they are its own from now on
  EXPECT_EQ(answers->get("a")->request.output_token_ids, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(answers->counts().of_another, "");
}

TEST_F(DeliveryLogTest, ALogThatIsSetAsideKeepsItsBytesUnderAnotherName) {
  Bytes before;
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    before = read(file());
  }
  DeliveryLogOptions other = options();
  other.engine = {{"model", "b"}};
  other.other_engine = OtherEngine::kSetAside;
  {
    const auto answers = open(other);
    EXPECT_EQ(answers->get("a")->state, AnswerState::kFailed);
    EXPECT_EQ(answers->counts().discarded, 1u);
    const std::string aside = answers->counts().set_aside;
    EXPECT_NE(aside.find("/set-aside-answers-"), std::string::npos);
    EXPECT_EQ(read(aside), before);
    ASSERT_TRUE(succeeded(answers->rotate()));  // later files go as usual
    EXPECT_EQ(read(aside), before);
  }
  DeliveryLogOptions sealed = other;
  sealed.key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1});
  const auto answers = open(sealed);  // it cannot read this one
  EXPECT_FALSE(answers->get("a"));
  EXPECT_NE(answers->counts().of_another.find("not sealed"), std::string::npos);
  EXPECT_TRUE(boost::filesystem::exists(answers->counts().set_aside));
  ASSERT_TRUE(succeeded(answers->start(asked("b"))));
}

TEST_F(DeliveryLogTest, ASealedLogHidesAndProvesItsContent) {
  const auto key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1});
  DeliveryLogOptions sealed = options();
  sealed.key = key;
  sealed.encrypt = true;
  {
    const auto answers = open(sealed);
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "a secret sentence")})));
  }
  const Bytes bytes = read(file());
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()).find("secret"), std::string::npos);
  EXPECT_TRUE(failed_with(DeliveryLog::open(linux_file_system(), options()), Code::kUnauthenticated, "is sealed"));
  DeliveryLogOptions wrong = sealed;
  wrong.key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{2});
  EXPECT_TRUE(failed_with(DeliveryLog::open(linux_file_system(), wrong), Code::kUnauthenticated, "another key"));
  EXPECT_EQ(open(sealed)->get("a")->text, "a secret sentence");
}

TEST_F(DeliveryLogTest, ADirectoryHasOneServer) {
  const auto answers = open();
  EXPECT_TRUE(failed_with(DeliveryLog::open(linux_file_system(), options()), Code::kUnavailable, "another server"));
}

TEST_F(DeliveryLogTest, EndedAnswersGoByAgeAndSizeAndRunningOnesStay) {
  DeliveryLogOptions few = options();
  few.keep_seconds = 10;
  auto answers = open(few);
  ASSERT_TRUE(succeeded(answers->start(asked("old"))));
  ASSERT_TRUE(succeeded(answers->start(asked("runs"))));
  ASSERT_TRUE(succeeded(answers->step({ended("old", 0)})));
  clock_.advance(std::chrono::seconds(11));
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

TEST_F(DeliveryLogTest, AnIdThatIsUsedAgainAfterItsAnswerWasForgottenLosesNothing) {
  DeliveryLogOptions few = options();
  few.keep_bytes = 0;
  auto answers = open(few);
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  ASSERT_TRUE(succeeded(answers->start(asked("x"))));
  ASSERT_TRUE(succeeded(answers->step({ended("x", 0)})));
  ASSERT_TRUE(succeeded(answers->start(asked("y"))));  // forgets x
  ASSERT_TRUE(succeeded(answers->start(asked("x", "again"))));
  ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1}, "1"), given("x", 0, {2}, "2")})));
  ASSERT_TRUE(succeeded(answers->sync()));
  answers.reset();
  answers = open(few);
  EXPECT_EQ(answers->counts().lost_bytes, 0U);
  EXPECT_EQ(answers->get("a")->text, "1");
  EXPECT_EQ(answers->get("x")->text, "2");
  EXPECT_TRUE(answers->get("y"));
  EXPECT_EQ(answers->find("again", ""), (std::vector<std::string>{"x"}));
  EXPECT_TRUE(answers->find("response-x", "").empty());
  EXPECT_EQ(answers->counts().running, 3U);
}

TEST_F(DeliveryLogTest, TheLogDoesNotGrowWithoutEnd) {
  DeliveryLogOptions small = options();
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

TEST_F(DeliveryLogTest, AClockThatIsSetForwardTakesNoAnswerAwayBeforeItsTime) {
  DeliveryLogOptions few = options();
  few.keep_seconds = 10;
  few.keep_bytes = 27'000;  // of two
  const auto answers = open(few);
  for (const std::string id : {"1", "2", "3"}) {
    ASSERT_TRUE(succeeded(answers->start(asked(id))));
    ASSERT_TRUE(succeeded(answers->step({given(id, 0, {1}, std::string(10'000, 'x'))})));
    if (id == "3") clock_.set_wall(std::chrono::hours(24));
    ASSERT_TRUE(succeeded(answers->step({ended(id, 1)})));
  }
  ASSERT_TRUE(succeeded(answers->start(asked("4"))));
  EXPECT_FALSE(answers->get("1"));  // for want of room
  EXPECT_TRUE(answers->get("2"));
  EXPECT_TRUE(answers->get("3"));
}

TEST_F(DeliveryLogTest, AnAnswerThatEndedInTheFutureIsForgottenInItsTimeAllTheSame) {
  DeliveryLogOptions few = options();
  few.keep_seconds = 10;
  clock_.set_wall(std::chrono::hours(24));  // a clock that is set right later
  {
    const auto answers = open(few);
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    ASSERT_TRUE(succeeded(answers->step({ended("a", 0)})));
  }
  clock_.set_wall(-std::chrono::hours(24));
  EXPECT_TRUE(open(few)->get("a"));
  clock_.advance(std::chrono::seconds(11));
  EXPECT_FALSE(open(few)->get("a"));
}

TEST_F(DeliveryLogTest, OneRecordHasOneStepOfAnAnswer) {
  {
    const auto answers = open();
    ASSERT_TRUE(succeeded(answers->start(asked("a"))));
    EXPECT_TRUE(failed_with(answers->step({given("a", 0, {1}, "x"), given("a", 0, {2}, "y")}), Code::kInvalidArgument));
    EXPECT_EQ(answers->get("a")->text, "");
    ASSERT_TRUE(succeeded(answers->step({given("a", 0, {3}, "z")})));
  }
  EXPECT_EQ(open()->get("a")->text, "z");
}

TEST_F(DeliveryLogTest, NothingIsRecordedAfterClose) {
  auto answers = open();
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  answers->close();
  EXPECT_TRUE(succeeded(answers->step({ended("a", 0)})));
  answers.reset();
  EXPECT_EQ(open()->get("a")->state, AnswerState::kRunning);
}

}  // namespace
}  // namespace torpor
