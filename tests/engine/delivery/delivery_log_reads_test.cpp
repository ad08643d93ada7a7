#include "engine/delivery/delivery_log.h"

#include "tests/engine/delivery/delivery_log_scene.h"
namespace torpor {
namespace {

using test::asked;
using test::DeliveryLogTest;
using test::ended;
using test::given;
using test::succeeded;

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
  clock_.pass(11);
  ASSERT_TRUE(succeeded(answers->rotate()));
  ASSERT_TRUE(succeeded(answers->start(asked("later"))));  // the others are too old: no want of room
  EXPECT_FALSE(answers->get("2"));
  EXPECT_EQ(answers->dropped(), 1U);
  EXPECT_FALSE(answers->was_dropped("response-1", "")) << "it would not have been kept so long";
}

// steps_record() writes by itself what an archive reads, and that refuses a byte too many.
TEST_F(DeliveryLogTest, ARecordOfStepsIsReadAsItWasWritten) {
  const std::vector<std::string> ids = {"a longer id than fits into a string itself, \u00e9", "b", "c", "d"};
  const std::vector<Value> reasons = {{}, Value{std::string("t\u00e9xt")}, Value{int64_t{-3}}, {}};
  std::vector<AnswerStep> steps;
  for (size_t i = 0; i < ids.size(); ++i) {
    steps.push_back({.id = ids[i], .tokens = {1, static_cast<int32_t>(i), 1 << 30}, .text = "\u00e9t\u00e9"});
    if (i == 3) steps[i] = {.id = ids[i]};
    steps[i].state = static_cast<AnswerState>(i);
    steps[i].finish_reason = i == 0 ? "" : "reason";
    steps[i].stop_reason = reasons[i];
  }
  auto answers = open();
  for (const std::string& id : ids) ASSERT_TRUE(succeeded(answers->start(asked(id))));
  ASSERT_TRUE(succeeded(answers->step(steps)));
  const std::vector<Answer> before = answers->all();
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
