// SPDX-License-Identifier: Apache-2.0
// Errors as values: Status, Result<T> and the Error that they carry.
//
// Choose a code by what the caller should do next, not by where the failure happened. `what` says what was wrong and
// names the setting, file, region or field. `next_step` says what to do about it. Nothing here throws; exceptions exist
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
  kFailedPrecondition,  // the call does not fit the current state; change the state first
  kNotFound,            // the named thing does not exist
  kResourceExhausted,   // memory, disk space or a budget; free some and call again
  kUnavailable,         // call again with the same arguments
  kAborted,             // a larger operation was undone; start that again
  kCorruption,          // bytes do not match their digest or their own description
  kIncompatible,        // intact and well-formed, but made for something else; `what` names the field
  kUnauthenticated,     // sealed with another key than the given one, or no key was given; give the right key
  kUnsupported,         // this version cannot do a feature that is in use; `what` names it
  kTimeout,             // not done in the given time; nothing was changed
  kIo,                  // a system call on a file failed; `native` is errno
  kDevice,              // the device failed; `native` is its code
  kInternal,            // torpor broke an invariant of its own
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

  // Return the same error with `context` (what was being done) in front of `what`.
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
Error error_in_flight() noexcept;  // for use inside a catch block: the caught exception as a value
}

// Run `work`, a function that returns a Status or Result, and return its exceptions as an Error. Want of memory or
// threads becomes kResourceExhausted; every other exception becomes kInternal with its text. try_catch() itself needs
// no memory. Only the end of a thread from outside (pthread_exit, as Python's interpreter calls it when it ends) passes
// through.
//
// If `work` needs a lock, write that at the lambda (TORPOR_REQUIRES). clang cannot check that the lock is held here.
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

// Return an Error for errno's value `native`. It appends the system's text to `what` and derives the code: ENOSPC,
// EDQUOT, ENOMEM, EMFILE: kResourceExhausted; ENOENT: kNotFound; EACCES, EPERM, EROFS: kFailedPrecondition; any other:
// kIo.
Error system_error(int native, std::string what, std::string next_step = {});

}  // namespace torpor

// Return the error of `expression` (a Status or Result) from the enclosing function; continue if there is none.
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
