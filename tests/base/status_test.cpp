// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include <cerrno>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "base/status.h"
#include "base/units.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

Result<int> half(int number) {
  if (number % 2 != 0) return Error{.code = Code::kInvalidArgument, .what = "odd", .next_step = "give an even number"};
  return number / 2;
}

Result<int> quarter(int number) {
  TORPOR_ASSIGN_OR_RETURN(const int once, half(number));
  return half(once);
}

Status check_quarter(int number) {
  TORPOR_RETURN_IF_ERROR(quarter(number));
  return ok();
}

TEST(Status, TryAndAssignReturnTheFirstError) {
  EXPECT_EQ(test::value_of(quarter(8)), 2);
  EXPECT_FAILS(quarter(7), Code::kInvalidArgument, "odd");
  EXPECT_FAILS(quarter(6), Code::kInvalidArgument, "odd");
  EXPECT_SUCCEEDS(check_quarter(4));
  EXPECT_FAILS(check_quarter(2), Code::kInvalidArgument);
}

TEST(Status, EveryCodeHasAnOwnName) {
  std::set<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(kLastCode); ++i) names.insert(name(static_cast<Code>(i)));
  EXPECT_EQ(names.size(), static_cast<size_t>(kLastCode) + 1);
}

TEST(Status, SystemErrorsGetTheirCodeFromErrno) {
  EXPECT_EQ(system_error(ENOSPC, "x").code, Code::kResourceExhausted);
  EXPECT_EQ(system_error(EDQUOT, "x").code, Code::kResourceExhausted);
  EXPECT_EQ(system_error(ENOENT, "x").code, Code::kNotFound);
  EXPECT_EQ(system_error(EIO, "x").code, Code::kIo);
  for (const int native : {EACCES, EPERM, EROFS})  // nothing is broken, something is to be allowed
    EXPECT_FAILS(Status(system_error(native, "x")), Code::kFailedPrecondition, "permissions");
  EXPECT_EQ(system_error(EIO, "x").native, EIO);
}

// Calling again does not help, nor is the disk broken: permissions have to be changed first.
TEST(Status, WhatThePermissionsForbidIsAPreconditionAndNoFailureOfTheDisk) {
  for (const int native : {EACCES, EPERM, EROFS}) {
    EXPECT_EQ(system_error(native, "x").code, Code::kFailedPrecondition) << native;
    EXPECT_EQ(system_error(native, "x").next_step, "check the permissions of the path") << native;
  }
}

TEST(Status, TextNamesCodeCauseContextAndNextStep) {
  const Error error{.code = Code::kNotFound, .what = "no file", .next_step = "make one"};
  EXPECT_EQ(error.within("opening").to_string(), "not_found: opening: no file (make one)");
}

template <class Thrown>
Status caught(const Thrown& thrown) {
  return try_catch([&]() -> Status { throw thrown; });
}

TEST(Status, WhateverIsThrownIsAnErrorOfItsKind) {
  EXPECT_FAILS(caught(std::bad_alloc()), Code::kResourceExhausted, "no memory");
  EXPECT_FAILS(caught(std::length_error("too long")), Code::kResourceExhausted, "no memory");
  const auto no_thread = std::make_error_code(std::errc::resource_unavailable_try_again);
  EXPECT_FAILS(caught(std::system_error(no_thread)), Code::kResourceExhausted, "no thread to be had");
  EXPECT_EQ(caught(std::system_error(no_thread)).error().native, EAGAIN);
  EXPECT_FAILS(caught(std::system_error(EIO, std::generic_category())), Code::kInternal, "an exception");
  EXPECT_FAILS(caught(std::runtime_error("words of its own")), Code::kInternal, "words of its own");
  EXPECT_FAILS(caught(7), Code::kInternal, "an exception");
}

TEST(Status, WhatIsReturnedIsLeftAsItIs) {
  EXPECT_EQ(test::value_of(try_catch([] { return half(8); })), 4);
  EXPECT_FAILS(try_catch([] { return half(7); }), Code::kInvalidArgument, "odd");
  EXPECT_EQ(*test::value_of(try_catch([]() -> Result<std::unique_ptr<int>> { return std::make_unique<int>(3); })), 3);
}

// As Python's interpreter ends threads that ask for its lock too late: nothing may hold that up.
TEST(Status, AThreadThatIsEndedFromOutsideEnds) {
  bool unwound = false;
  bool went_on = false;
  std::thread([&] {
    struct Guard {
      bool& gone;
      ~Guard() { gone = true; }
    } const guard{unwound};
    (void)try_catch([]() -> Status { ::pthread_exit(nullptr); });
    went_on = true;
  }).join();
  EXPECT_TRUE(unwound);
  EXPECT_FALSE(went_on);
}

TEST(Units, ArithmeticThatWouldWrapHasNoValue) {
  EXPECT_EQ(checked_add(1, 2), 3u);
  EXPECT_EQ(checked_add(UINT64_MAX, 1), std::nullopt);
  EXPECT_EQ(checked_mul(uint64_t{1} << 40, uint64_t{1} << 40), std::nullopt);
  EXPECT_EQ(align_up(1, 4096), 4096u);
  EXPECT_EQ(align_up(4096, 4096), 4096u);
}

}  // namespace
}  // namespace torpor
