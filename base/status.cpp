// SPDX-License-Identifier: Apache-2.0
#include "base/status.h"

#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>

#include <fmt/core.h>

namespace torpor {

std::string_view name(Code code) {
  switch (code) {
    case Code::kInvalidArgument: return "invalid_argument";
    case Code::kFailedPrecondition: return "failed_precondition";
    case Code::kNotFound: return "not_found";
    case Code::kResourceExhausted: return "resource_exhausted";
    case Code::kUnavailable: return "unavailable";
    case Code::kAborted: return "aborted";
    case Code::kCorruption: return "corruption";
    case Code::kIncompatible: return "incompatible";
    case Code::kUnauthenticated: return "unauthenticated";
    case Code::kUnsupported: return "unsupported";
    case Code::kTimeout: return "timeout";
    case Code::kIo: return "io";
    case Code::kDevice: return "device";
    case Code::kInternal: return "internal";
  }
  return "internal";
}

std::string_view name(Origin origin) {
  switch (origin) {
    case Origin::kTorpor: return "torpor";
    case Origin::kSystem: return "system";
    case Origin::kDevice: return "device";
    case Origin::kEngine: return "engine";
  }
  return "torpor";
}

Error Error::within(std::string_view context) const {
  Error wrapped = *this;
  wrapped.what = fmt::format("{}: {}", context, what);
  return wrapped;
}

std::string Error::to_string() const {
  return next_step.empty() ? fmt::format("{}: {}", name(code), what)
                           : fmt::format("{}: {} ({})", name(code), what, next_step);
}

Error detail::error_in_flight() noexcept {
  // These words fit into a std::string without an allocation.
  const auto no_memory = [] {
    return Error{.code = Code::kResourceExhausted, .what = "no memory", .next_step = "free some"};
  };
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return no_memory();
  } catch (const std::length_error&) {  // a container asked for more than is possible
    return no_memory();
  } catch (const std::system_error& thrown) {
    const bool no_thread = thrown.code() == std::errc::resource_unavailable_try_again;
    try {
      return Error{.code = no_thread ? Code::kResourceExhausted : Code::kInternal,
                   .what = fmt::format("{}: {}", no_thread ? "no thread to be had" : "an exception", thrown.what()),
                   .next_step = no_thread ? "raise the limit of threads, or end some" : "report it",
                   .origin = Origin::kSystem,
                   .native = thrown.code().value()};
    } catch (...) {
      return no_memory();
    }
  } catch (const std::exception& thrown) {
    try {
      return Error{.what = fmt::format("an exception: {}", thrown.what()), .next_step = "report it"};
    } catch (...) {
      return no_memory();
    }
  } catch (...) {
    return Error{.what = "an exception", .next_step = "report it"};
  }
}

Error system_error(int native, std::string what, std::string next_step) {
  Code code = Code::kIo;
  switch (native) {
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      code = Code::kResourceExhausted;
      if (next_step.empty()) next_step = "free some and try again";
      break;
    case ENOENT:
      code = Code::kNotFound;
      if (next_step.empty()) next_step = "check the path";
      break;
    case ENOTDIR:
      if (next_step.empty()) next_step = "give the path of a directory";
      break;
    case EACCES:
    case EPERM:
    case EROFS:
      code = Code::kFailedPrecondition;
      if (next_step.empty()) next_step = "check the permissions of the path";
      break;
    default:
      if (next_step.empty()) next_step = "check the file system";
  }
  return Error{.code = code,
               .what = fmt::format("{}: {}", what, std::generic_category().message(native)),
               .next_step = std::move(next_step),
               .origin = Origin::kSystem,
               .native = native};
}

}  // namespace torpor
