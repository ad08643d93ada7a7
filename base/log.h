// SPDX-License-Identifier: Apache-2.0
// Log lines: one log, "torpor", on standard error. TORPOR_LOG sets its level (trace…off; default warn). spdlog writes
// the lines. Only log.cpp includes spdlog: its calls are templates that compile most of fmt into each source that uses
// them.
//
// Logging throws nothing, so that a thread may log outside of try_catch(). The arguments are evaluated before: give an
// Error as it is, because its to_string() needs memory.
#pragma once

#include <fmt/core.h>

#include "base/status.h"

// An Error in a line: "<code>: <what> (<next_step>)".
template <>
struct fmt::formatter<torpor::Error> {
  constexpr auto parse(fmt::format_parse_context& context) { return context.begin(); }
  fmt::format_context::iterator format(const torpor::Error& error, fmt::format_context& context) const;
};

namespace torpor {

enum class LogLevel { kInfo, kWarn, kError, kCritical, kOff };

class Log {
 public:
  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) noexcept {
    write(LogLevel::kInfo, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void warn(fmt::format_string<Args...> text, Args&&... args) noexcept {
    write(LogLevel::kWarn, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void error(fmt::format_string<Args...> text, Args&&... args) noexcept {
    write(LogLevel::kError, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void critical(fmt::format_string<Args...> text, Args&&... args) noexcept {
    write(LogLevel::kCritical, text, fmt::make_format_args(args...));
  }

  void set_level(LogLevel least);

 private:
  // If there is no memory for the line, write the text without `args`; if there is none for that either, nothing.
  void write(LogLevel level, fmt::string_view text, fmt::format_args args) noexcept;
};

Log& log() noexcept;

}  // namespace torpor
