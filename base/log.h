// SPDX-License-Identifier: Apache-2.0
// Log lines: one log, "torpor", on standard error, its level from TORPOR_LOG (trace…off; default warn). spdlog writes
// them. Only log.cpp includes it: its calls are templates that compile most of fmt into each source that makes them.
#pragma once

#include <fmt/core.h>

namespace torpor {

enum class LogLevel { kInfo, kWarn, kError, kCritical, kOff };

class Log {
 public:
  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) {
    write(LogLevel::kInfo, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void warn(fmt::format_string<Args...> text, Args&&... args) {
    write(LogLevel::kWarn, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void error(fmt::format_string<Args...> text, Args&&... args) {
    write(LogLevel::kError, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void critical(fmt::format_string<Args...> text, Args&&... args) {
    write(LogLevel::kCritical, text, fmt::make_format_args(args...));
  }

  void set_level(LogLevel least);

 private:
  // Where there is no memory for the line, its text is written without `args`.
  void write(LogLevel level, fmt::string_view text, fmt::format_args args);
};

Log& log();

}  // namespace torpor
