// SPDX-License-Identifier: Apache-2.0
#include "scheduler_state/fork_ancestry.h"

#include "tests/support/results.h"
#include "tests/support/running_request.h"

namespace torpor {
namespace {

Value step(Value::Data request, Value::Data at) {
  return {Dict{{"request", {std::move(request)}}, {"at", {std::move(at)}}}};
}

RequestState forked(Value::Data entry) {
  RequestState request = test::running_request("child", 8);
  request.engine = {Dict{{"other", {true}}, {std::string(kForkedField), {std::move(entry)}}}};
  return request;
}

TEST(ForkAncestry, IsReadFromTheFirstRequestToTheParent) {
  EXPECT_EQ(test::value_of(fork_ancestry(test::running_request("r", 8))), std::vector<ForkStep>{});
  const RequestState child = forked(List{step("root", int64_t{12}), step("parent", int64_t{0})});
  EXPECT_EQ(test::value_of(fork_ancestry(child)), (std::vector<ForkStep>{{"root", 12}, {"parent", 0}}));
}

TEST(ForkAncestry, IsRefusedIfItIsNoListOfForks) {
  const List most(kMostForkSteps, step("root", int64_t{1}));
  EXPECT_EQ(test::value_of(fork_ancestry(forked(most))).size(), kMostForkSteps);
  List more = most;
  more.push_back(most[0]);
  for (const Value::Data& wrong : {Value::Data(true), Value::Data(List{Value{"root"}}), Value::Data(std::move(more)),
                                   Value::Data(List{step("", int64_t{1})}), Value::Data(List{step("r", int64_t{-1})}),
                                   Value::Data(List{step(int64_t{1}, int64_t{1})}), Value::Data(List{step("r", 1.5)}),
                                   Value::Data(List{Value{Dict{{"request", {"r"}}}}})})
    EXPECT_FAILS(fork_ancestry(forked(wrong)), Code::kCorruption, "request child");
}

}  // namespace
}  // namespace torpor
