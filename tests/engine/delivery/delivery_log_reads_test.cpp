// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery/delivery_log.h"

#include "tests/engine/delivery/delivery_log_scene.h"
namespace torpor {
namespace {

using test::asked;
using test::DeliveryLogTest;
using test::ended;
using test::given;
using test::succeeded;
using test::value_of;

TEST_F(DeliveryLogTest, WhatItDropsForWantOfRoomItNames) {
  DeliveryLogOptions few = options();
  few.keep_seconds = 10;
  few.keep_bytes = 27'000;  // of two
  const auto answers = open(few);
  for (const std::string id : {"1", "2", "3"}) {
    ASSERT_TRUE(succeeded(answers->start(asked(id))));
    ASSERT_TRUE(succeeded(answers->step({given(id, 0, {1}, std::string(10'000, 'x'))})));
    EXPECT_EQ(answers->dropped(), 0U);
    ASSERT_TRUE(succeeded(answers->step({ended(id, 1)})));
  }
  ASSERT_TRUE(succeeded(answers->start(asked("runs"))));
  EXPECT_EQ(answers->dropped(), 1U);
  EXPECT_EQ(answers->counts().dropped, 1U);
  EXPECT_TRUE(answers->was_dropped("response-1", ""));
  EXPECT_FALSE(answers->was_dropped("response-1", "another tenant"));
  EXPECT_FALSE(answers->was_dropped("response-2", ""));
  EXPECT_FALSE(answers->was_dropped("response-runs", ""));
  clock_.advance(std::chrono::seconds(11));
  ASSERT_TRUE(succeeded(answers->rotate()));
  ASSERT_TRUE(succeeded(answers->start(asked("later"))));  // the others are too old: no want of room
  EXPECT_FALSE(answers->get("2"));
  EXPECT_EQ(answers->dropped(), 1U);
  EXPECT_FALSE(answers->was_dropped("response-1", "")) << "it would not have been kept so long";
}

// A call may say much that its answer needs no more: options, a schema, the prompt's text.
TEST_F(DeliveryLogTest, AnEndedAnswerHasOnlyWhatReadersAskFor) {
  const std::string much(10'000, 'x');
  Answer asks = asked("1");
  asks.request.engine = Value{Dict{{"structured", Value{much}}}};
  asks.request.sampling.engine = Value{Dict{{"extra_args", Value{much}}}};
  asks.front = Value{Dict{{"state", Value{much}}, {"echo", Value{std::string("the prompt")}}}};
  const Value echo{Dict{{"echo", Value{std::string("the prompt")}}}};
  for (const bool opened_again : {false, true}) {
    const auto answers = open(options());
    if (!opened_again) {
      ASSERT_TRUE(succeeded(answers->start(asks)));
      EXPECT_EQ(answers->get("1")->front, asks.front);
      ASSERT_TRUE(succeeded(answers->step({given("1", 0, {1}, "text")})));
      ASSERT_TRUE(succeeded(answers->step({ended("1", 1)})));
    }
    const Answer kept = *answers->get("1");
    EXPECT_EQ(kept.front, echo);
    EXPECT_EQ(kept.request.engine, Value{Dict{}});
    EXPECT_EQ(kept.request.sampling.engine, Value{Dict{}});
    EXPECT_EQ(kept.text, "text");
    ASSERT_TRUE(succeeded(answers->rotate()));
    EXPECT_LT(answers->counts().log_bytes, 5'000U);
  }
}

// A reader counts choices by their places: what is left of a response would be taken for all of it.
TEST_F(DeliveryLogTest, AResponseIsDroppedWholeAndOnlyWhenAllOfItHasEnded) {
  DeliveryLogOptions none = options();
  none.keep_bytes = 1;
  const auto answers = open(none);
  for (const int choice : {0, 1})
    ASSERT_TRUE(succeeded(answers->start(asked(std::to_string(choice), "both", "", choice))));
  ASSERT_TRUE(succeeded(answers->step({ended("0", 0)})));
  ASSERT_TRUE(succeeded(answers->start(asked("next"))));
  EXPECT_EQ(answers->find("both", ""), (std::vector<std::string>{"0", "1"}));
  EXPECT_FALSE(answers->was_dropped("both", ""));
  ASSERT_TRUE(succeeded(answers->step({ended("1", 0)})));
  ASSERT_TRUE(succeeded(answers->start(asked("after"))));
  EXPECT_TRUE(answers->find("both", "").empty());
  EXPECT_TRUE(answers->was_dropped("both", ""));
  EXPECT_EQ(answers->dropped(), 2U);
  EXPECT_EQ(answers->all().size(), 2U);
  ASSERT_TRUE(succeeded(answers->start(asked("again", "both"))));
  EXPECT_FALSE(answers->was_dropped("both", "")) << "it is begun again";
}

// Otherwise a client whose calls all have one id keeps its answers beyond the limit, and all others lose theirs.
TEST_F(DeliveryLogTest, EarlierAnswersOfAnIdThatIsInUseAreDroppedAsThoseOfOthers) {
  DeliveryLogOptions few = options();
  few.keep_bytes = 27'000;  // of two
  const auto answers = open(few);
  const auto start = [&](const std::string& id, const std::string& response, uint64_t call) {
    Answer answer = asked(id, response);
    answer.call = call;
    ASSERT_TRUE(succeeded(answers->start(answer)));
  };
  const auto give = [&](const std::string& id) {
    ASSERT_TRUE(succeeded(answers->step({given(id, 0, {1}, std::string(10'000, 'x'))})));
    ASSERT_TRUE(succeeded(answers->step({ended(id, 1)})));
  };
  start("a", "both", 1);
  give("a");
  start("b", "both", 2);
  give("b");
  start("other", "other", 3);
  give("other");
  start("c", "both", 4);
  EXPECT_FALSE(answers->get("a"));
  EXPECT_TRUE(answers->get("b"));
  EXPECT_TRUE(answers->get("other"));
  EXPECT_FALSE(answers->was_dropped("both", "")) << "its newest answer is here";
  give("c");
  start("d", "another", 5);
  EXPECT_FALSE(answers->get("b"));
  EXPECT_TRUE(answers->get("other"));
  EXPECT_EQ(answers->dropped(), 2U);
  for (const std::string id : {"d", "e", "f"}) {
    if (id != "d") start(id, "response-" + id, 6);
    give(id);
  }
  start("last", "last", 7);
  EXPECT_TRUE(answers->find("both", "").empty());
  EXPECT_TRUE(answers->was_dropped("both", ""));
}

// A log in memory never begins a new file, and that of a server with little to do seldom.
TEST_F(DeliveryLogTest, AnOldAnswerIsForgottenWithoutANewFile) {
  for (const std::string& directory : {std::string(), options().directory}) {
    DeliveryLogOptions few = options();
    few.keep_seconds = 10;
    few.directory = directory;
    const auto answers = open(few);
    ASSERT_TRUE(succeeded(answers->start(asked("old"))));
    ASSERT_TRUE(succeeded(answers->step({ended("old", 0)})));
    clock_.advance(std::chrono::seconds(9));
    ASSERT_TRUE(succeeded(answers->start(asked("soon"))));
    EXPECT_TRUE(answers->get("old"));
    clock_.advance(std::chrono::seconds(2));
    ASSERT_TRUE(succeeded(answers->start(asked("late"))));
    EXPECT_FALSE(answers->get("old"));
    EXPECT_EQ(answers->dropped(), 0U);
  }
}

TEST_F(DeliveryLogTest, TheChoicesOfACallGrowTooOldTogether) {
  DeliveryLogOptions few = options();
  few.keep_seconds = 10;
  auto answers = open(few);
  for (const int choice : {0, 1}) {
    Answer answer = asked(std::to_string(choice), "both", "", choice);
    answer.call = 7;
    ASSERT_TRUE(succeeded(answers->start(answer)));
  }
  Answer earlier = asked("earlier", "both");  // the client used its id before
  earlier.call = 6;
  ASSERT_TRUE(succeeded(answers->start(earlier)));
  ASSERT_TRUE(succeeded(answers->step({ended("0", 0), ended("earlier", 0)})));
  for (const bool opened_again : {false, true}) {
    clock_.advance(std::chrono::seconds(11));
    ASSERT_TRUE(succeeded(answers->rotate()));
    if (opened_again) {
      answers.reset();
      answers = open(few);
    } else {
      ASSERT_TRUE(succeeded(answers->start(asked("next"))));
    }
    EXPECT_EQ(answers->find("both", ""), (std::vector<std::string>{"0", "1"}));
    EXPECT_FALSE(answers->get("earlier"));
  }
  ASSERT_TRUE(succeeded(answers->step({ended("1", 0)})));
  clock_.advance(std::chrono::seconds(11));
  ASSERT_TRUE(succeeded(answers->rotate()));
  ASSERT_TRUE(succeeded(answers->start(asked("after"))));
  EXPECT_TRUE(answers->find("both", "").empty());
  EXPECT_EQ(answers->counts().ended, 0U);
}

// A client chooses the lengths of its ids, and of some fields of a request.
TEST_F(DeliveryLogTest, TheBudgetCountsAllTextsThatAnEndedAnswerKeeps) {
  const std::string long_text(10'000, 'x');
  std::vector<Answer> all(5, asked("1"));
  all[0].request.id += long_text;
  all[1].response += long_text;
  all[2].request.cache_salt = long_text;
  all[3].request.sampling.stop = {long_text};
  all[4].front = Value{Dict{{std::string(kEchoField), Value{long_text}}}};
  for (const Answer& each : all) {
    DeliveryLogOptions small = options();
    small.directory.clear();
    small.keep_bytes = 8'000;
    const auto answers = open(small);
    ASSERT_TRUE(succeeded(answers->start(asked("plain"))));
    ASSERT_TRUE(succeeded(answers->step({ended("plain", 0)})));
    ASSERT_TRUE(succeeded(answers->start(each)));
    EXPECT_EQ(answers->dropped(), 0U);
    ASSERT_TRUE(succeeded(answers->step({ended(each.request.id, 0)})));
    ASSERT_TRUE(succeeded(answers->start(asked("next"))));
    EXPECT_EQ(answers->dropped(), 2U);
  }
}

TEST_F(DeliveryLogTest, OneThatWasAbortedIsNoAnswerThatWasGiven) {
  DeliveryLogOptions none = options();
  none.keep_bytes = 1;
  const auto answers = open(none);
  ASSERT_TRUE(succeeded(answers->start(asked("1"))));
  AnswerStep aborted = ended("1", 0);
  aborted.state = AnswerState::kAborted;
  ASSERT_TRUE(succeeded(answers->step({aborted})));
  ASSERT_TRUE(succeeded(answers->start(asked("next"))));
  EXPECT_EQ(answers->dropped(), 1U);
  EXPECT_FALSE(answers->was_dropped("response-1", ""));
}

// A server without a log looks whether it may start, and must leave what is there as it is.
TEST_F(DeliveryLogTest, WhoCountsWhatRunsWritesNothing) {
  auto answers = open();
  for (const std::string id : {"1", "2"}) ASSERT_TRUE(succeeded(answers->start(asked(id))));
  ASSERT_TRUE(succeeded(answers->step({ended("1", 0)})));
  answers.reset();
  const auto files = [&] {
    std::map<std::string, std::string> content;
    for (const auto& entry : boost::filesystem::directory_iterator(options().directory)) {
      std::ifstream file(entry.path().string(), std::ios::binary);
      content[entry.path().filename().string()] = {std::istreambuf_iterator<char>(file), {}};
    }
    return content;
  };
  const std::map<std::string, std::string> before = files();
  DeliveryLogOptions impatient = options();
  impatient.keep_seconds = 0;
  impatient.keep_bytes = 0;
  EXPECT_EQ(value_of(DeliveryLog::count_running(linux_file_system(), impatient)), 1U);
  EXPECT_EQ(files(), before);
  EXPECT_TRUE(open()->get("1"));
}

// steps_record() writes by itself what an archive reads, and that refuses a byte too many.
TEST_F(DeliveryLogTest, ARecordOfStepsIsReadAsItWasWritten) {
  const std::vector<std::string> ids = {"a longer id than fits into a string itself, \u00e9", "b", "c", "d"};
  const std::vector<Value> reasons = {Value{int64_t{9}}, Value{std::string("t\u00e9xt")}, Value{int64_t{-3}}, {}};
  std::vector<AnswerStep> steps;
  for (size_t i = 0; i < ids.size(); ++i) {
    steps.push_back({.id = ids[i], .tokens = {1, static_cast<int32_t>(i), 1 << 30}, .text = "\u00e9t\u00e9"});
    if (i == 3) steps[i] = {.id = ids[i]};
    steps[i].state = static_cast<AnswerState>(i);
    steps[i].finish_reason = i == 0 ? "" : "reason";
    (i == 0 ? steps[i].note : steps[i].stop_reason) = reasons[i];
  }
  auto answers = open();
  for (const std::string& id : ids) ASSERT_TRUE(succeeded(answers->start(asked(id))));
  ASSERT_TRUE(succeeded(answers->step(steps)));
  const std::vector<Answer> before = answers->all();
  EXPECT_EQ(before[0].note, reasons[0]);
  EXPECT_EQ(before[1].stop_reason, reasons[1]);
  answers.reset();
  answers = open();
  EXPECT_EQ(answers->counts().lost_bytes, 0U);
  EXPECT_EQ(answers->all(), before);
}

TEST_F(DeliveryLogTest, EndsAreThoseOfAnswersThatRun) {
  const auto answers = open(options());
  ASSERT_TRUE(succeeded(answers->start(asked("a"))));
  ASSERT_TRUE(succeeded(answers->start(asked("over"))));
  ASSERT_TRUE(succeeded(answers->step({given("a", 0, {1, 2}, "\u00e9t\u00e9"), ended("over", 0)})));
  const std::vector<std::string_view> ids = {"a", "over", "nobody"};
  const std::vector<std::optional<AnswerEnds>> ends = answers->running_ends(ids);
  EXPECT_EQ(ends, (std::vector<std::optional<AnswerEnds>>{AnswerEnds{.tokens = 2, .text = 3}, {}, {}}));
}

}  // namespace
}  // namespace torpor
