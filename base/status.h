// SPDX-License-Identifier: Apache-2.0
// Errors as values: Status, Result<T> and the Error they carry.
//
// A code is chosen by what the caller should do next, not by where the failure happened. `what` says what was wrong and
// names the setting, file, region or field; `next_step` says what to do about it. Nothing here throws; exceptions exist
// only at the Python border (bindings/).
#pragma once

#include <cxxabi.h>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <tl/expected.hpp>

#include "base/thread_annotations.h"

namespace torpor {

enum class Code : uint8_t {
  kInvalidArgument,     // the call is wrong; correct it
  kFailedPrecondition,  // the call does not fit the present state; change the state first
  kNotFound,            // the named thing does not exist
  kResourceExhausted,   // memory, disk space or a budget; free some and call again
  kUnavailable,         // call the same again
  kAborted,             // a larger operation was undone; start that again
  kCorruption,          // bytes do not match their digest or their own description
  kIncompatible,        // whole and well-formed, but made for something else; `what` names the field
  kUnauthenticated,     // sealed with a key that was not given, or another one; give the right key
  kUnsupported,         // a feature in use that this version cannot do; `what` names it
  kTimeout,             // not done in the given time; nothing was changed
  kIo,                  // a system call on a file failed; `native` is errno
  kDevice,              // the device failed; `native` is its code
  kInternal,            // a broken invariant of torpor's own
};
inline constexpr Code kLastCode = Code::kInternal;

enum class Origin : uint8_t { kTorpor, kSystem, kDevice, kEngine };

std::string_view name(Code code);      // "invalid_argument" …, the spelling that users see
std::string_view name(Origin origin);  // "torpor", "system", "device", "engine"

struct Error {
  Code code = Code::kInternal;
  std::string what{};
  std::string next_step{};
  Origin origin = Origin::kTorpor;
  int64_t native = 0;
  // False: the failed call changed nothing, or undid what it had changed.
  bool state_changed = false;

  // The same error, with `context` (what was being done) in front of its sentence.
  Error within(std::string_view context) const;
  std::string to_string() const;  // "<code>: <what> (<next_step>)"

  friend bool operator==(const Error&, const Error&) = default;
};

template <class T>
class [[nodiscard]] Result : public tl::expected<T, Error> {
 public:
  using tl::expected<T, Error>::expected;
  Result(Error error)
      : tl::expected<T, Error>(tl::unexpect, std::move(error)) {}  // NOLINT(google-explicit-constructor)
};

using Status = Result<void>;

inline Status ok() { return {}; }

namespace detail {
Error error_in_flight() noexcept;  // inside a catch block: what was thrown, as a value
}

// Runs `work`, a function that returns a Status or Result; whatever it throws comes back as an Error: want of memory or
// of threads as kResourceExhausted, all else as kInternal with the words that came with it. Takes no memory itself.
// Only the end of a thread from outside (pthread_exit, as Python's interpreter does it when it ends) passes through.
//
// A lock that `work` needs is written at the lambda (TORPOR_REQUIRES); that it is held here, clang cannot follow.
template <class Work>
TORPOR_NO_THREAD_SAFETY_ANALYSIS auto try_catch(Work&& work) -> decltype(work()) {
  try {
    return work();
  } catch (const abi::__forced_unwind&) {
    throw;
  } catch (...) {
    return detail::error_in_flight();
  }
}

// Builds an Error from errno's value `native`: `what` gets the system's text appended, the code follows the errno
// (ENOSPC, EDQUOT, ENOMEM, EMFILE: kResourceExhausted; ENOENT: kNotFound; EACCES, EPERM, EROFS: kFailedPrecondition;
// others: kIo).
Error system_error(int native, std::string what, std::string next_step = {});

}  // namespace torpor

// Returns the error of `expression` (a Status or Result) from the enclosing function; otherwise goes on.
#define TORPOR_RETURN_IF_ERROR(expression)                           \
  do {                                                               \
    if (auto torpor_try_result = (expression); !torpor_try_result) { \
      return std::move(torpor_try_result).error();                   \
    }                                                                \
  } while (false)

#define TORPOR_CONCAT_INNER(a, b) a##b
#define TORPOR_CONCAT(a, b) TORPOR_CONCAT_INNER(a, b)

// `TORPOR_ASSIGN_OR_RETURN(auto file, directory.open("x"));` declares `file` with the value, or returns the error.
#define TORPOR_ASSIGN_OR_RETURN(declaration, expression)               \
  auto TORPOR_CONCAT(torpor_result_, __LINE__) = (expression);         \
  if (!TORPOR_CONCAT(torpor_result_, __LINE__)) {                      \
    return std::move(TORPOR_CONCAT(torpor_result_, __LINE__)).error(); \
  }                                                                    \
  declaration = std::move(*TORPOR_CONCAT(torpor_result_, __LINE__))
