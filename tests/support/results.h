// SPDX-License-Identifier: Apache-2.0
// Assertions about Status and Result.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"

namespace torpor {
inline void PrintTo(const Error& error, std::ostream* out) { *out << error.to_string(); }
}  // namespace torpor

namespace torpor::test {

template <class T>
::testing::AssertionResult succeeded(const Result<T>& result) {
  if (result.has_value()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << result.error().to_string();
}

template <class T>
::testing::AssertionResult failed_with(const Result<T>& result, Code code, std::string_view part = {}) {
  if (result.has_value()) return ::testing::AssertionFailure() << "no error, expected " << name(code);
  const Error& error = result.error();
  if (error.code != code)
    return ::testing::AssertionFailure() << "expected " << name(code) << ", got " << error.to_string();
  if (error.to_string().find(part) == std::string::npos)
    return ::testing::AssertionFailure() << "\"" << part << "\" is not in: " << error.to_string();
  return ::testing::AssertionSuccess();
}

// Return the value. On an error, record a failure and abort the test program.
template <class T>
T value_of(Result<T> result) {
  if (!result) {
    ADD_FAILURE() << result.error().to_string();
    std::abort();
  }
  return std::move(*result);
}

}  // namespace torpor::test

#define ASSERT_SUCCEEDS(expression) ASSERT_TRUE(::torpor::test::succeeded(expression))
#define EXPECT_SUCCEEDS(expression) EXPECT_TRUE(::torpor::test::succeeded(expression))
#define EXPECT_FAILS(expression, ...) EXPECT_TRUE(::torpor::test::failed_with(expression, __VA_ARGS__))
