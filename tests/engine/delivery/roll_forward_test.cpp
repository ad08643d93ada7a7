// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery/roll_forward.h"

#include <set>

#include "engine/delivery/delivery_log_file.h"
#include "tests/support/example_state.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

Answer so_far(const RequestState& request, std::vector<int32_t> tokens, AnswerState state = AnswerState::kRunning) {
  Answer answer{.request = request, .state = state};
  answer.request.output_token_ids = std::move(tokens);
  return answer;
}

TEST(RollForwardTest, RequestsGetWhatWasGivenSinceAndNewOnesBeginAgain) {
  CapturedState state = test::example_checkpoint().state;
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

TEST(RollForwardTest, AnEngineThatCannotComputeOnTopBeginsThemAgain) {
  CapturedState state = test::example_checkpoint().state;
  const RequestState run = state.scheduler.requests[0];
  const std::vector<Answer> answers = {so_far(run, {200, 201, 55, 56})};
  const RolledForward rolled = value_of(roll_forward(state, answers, false, /*may_extend=*/false));
  EXPECT_TRUE(rolled.extended.empty());
  EXPECT_EQ(rolled.dropped, (std::vector<std::string>{"run"}));
  EXPECT_EQ(rolled.added, (std::vector<std::string>{"run"}));
  const RequestState& again = state.scheduler.requests.back();
  EXPECT_EQ(again.output_token_ids, (std::vector<int32_t>{200, 201, 55, 56}));
  EXPECT_EQ(again.num_computed_tokens, 0);
  EXPECT_EQ(again.status, RequestStatus::kPreempted);
}

TEST(RollForwardTest, EndedRequestsGoWithTheirBlocks) {
  CapturedState state = test::example_checkpoint().state;
  const std::vector<Answer> answers = {so_far(state.scheduler.requests[0], {200, 201, 9}, AnswerState::kAborted)};
  const RolledForward rolled = value_of(roll_forward(state, answers, false));
  EXPECT_EQ(rolled.dropped, (std::vector<std::string>{"run"}));
  EXPECT_EQ(state.scheduler.requests.size(), 2U);
  EXPECT_TRUE(state.scheduler.running.empty());
  EXPECT_TRUE(state.workers[0].rows.empty());
  EXPECT_EQ(state.kv.groups[0].tables.size(), 1U);
}

TEST(RollForwardTest, EndedRequestsGoWithTheirBlocksOfEveryGroup) {
  CapturedState state = test::example_of_two_groups().state;
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
  CapturedState state = test::example_checkpoint().state;
  const std::vector<Answer> answers = {so_far(state.scheduler.requests[0], {200, 999})};
  const RolledForward rolled = value_of(roll_forward(state, answers, false));
  EXPECT_EQ(rolled.added, (std::vector<std::string>{"run"}));
  EXPECT_EQ(state.scheduler.requests.back().output_token_ids, (std::vector<int32_t>{200, 999}));
  EXPECT_EQ(state.scheduler.requests.back().num_computed_tokens, 0);
}

TEST(RollForwardTest, ARequestThatBeginsAgainKeepsWhatOnlyTheCheckpointHas) {
  const Value with_images{Dict{{"features", {std::string("pixels")}}}};
  struct Case {
    size_t request;
    std::vector<int32_t> given;
    bool may_extend;
  };
  // It waited; it took another course; the engine cannot compute on top.
  for (const auto& [number, given, may_extend] :
       {Case{1, {7, 8}, true}, Case{0, {200, 999}, true}, Case{0, {200, 201, 55}, false}}) {
    CapturedState state = test::example_checkpoint().state;
    state.scheduler.requests[number].engine = with_images;
    Answer answer = so_far(state.scheduler.requests[number], given);
    answer.request.engine = Value{Dict{{"elsewhere", {std::string("images")}}}};
    const RolledForward rolled = value_of(roll_forward(state, {{answer}}, false, may_extend));
    EXPECT_EQ(rolled.added, (std::vector<std::string>{answer.request.id}));
    const RequestState& again = state.scheduler.requests.back();
    EXPECT_EQ(again.engine, with_images);
    EXPECT_EQ(again.output_token_ids, given);
    EXPECT_EQ(again.status, RequestStatus::kPreempted);
    EXPECT_EQ(again.num_computed_tokens, 0);
  }
}

TEST(RollForwardTest, AnotherRequestOfTheSameIdIsThatOfItsAnswer) {
  CapturedState state = test::example_checkpoint().state;
  Answer answer = so_far(state.scheduler.requests[1], {7});
  answer.request.prompt_token_ids = {1, 2};
  answer.request.engine = Value{Dict{}};
  state.scheduler.requests[1].engine = Value{Dict{{"features", {std::string("pixels")}}}};
  value_of(roll_forward(state, {{answer}}, false));
  EXPECT_EQ(state.scheduler.requests.back().engine, answer.request.engine);
  EXPECT_EQ(state.scheduler.requests.back().prompt_token_ids, answer.request.prompt_token_ids);
}

TEST(RollForwardTest, AStateThatIsAheadOfTheLogStays) {
  CapturedState state = test::example_checkpoint().state;
  const CapturedState before = state;
  const std::vector<Answer> answers = {so_far(state.scheduler.requests[0], {200})};
  const RolledForward rolled = value_of(roll_forward(state, answers, false));
  EXPECT_TRUE(rolled.extended.empty());
  EXPECT_EQ(state, before);
}

TEST(RollForwardTest, OnlyAStateThatWasGoneOnWithLosesRequestsThatNobodyRemembers) {
  CapturedState state = test::example_checkpoint().state;
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
