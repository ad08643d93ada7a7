// SPDX-License-Identifier: Apache-2.0
// Log lines: one log, "torpor", on standard error. TORPOR_LOG sets its level (trace…off; default warn). spdlog writes
// the lines. Only log.cpp includes spdlog: its calls are templates that compile most of fmt into each source that uses
// them.
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
  // If there is no memory for the line, write the text without `args`.
  void write(LogLevel level, fmt::string_view text, fmt::format_args args);
};

Log& log();

}  // namespace torpor
