// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace torpor {
namespace {

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("torpor", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    const char* level = std::getenv("TORPOR_LOG");
    made->set_level(level != nullptr ? spdlog::level::from_str(level) : spdlog::level::warn);
    return made;
  }();
  return *logger;
}

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarn: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
    case LogLevel::kCritical: return spdlog::level::critical;
    case LogLevel::kOff: break;
  }
  return spdlog::level::off;
}

}  // namespace

void Log::set_level(LogLevel least) { logger().set_level(spdlog_level(least)); }

void Log::write(LogLevel level, fmt::string_view text, fmt::format_args args) {
  const spdlog::level::level_enum at = spdlog_level(level);
  if (!logger().should_log(at)) return;
  std::string line;
  fmt::string_view said = text;
  try {
    line = fmt::vformat(text, args);
    said = line;
  } catch (const std::exception&) {  // no memory for the line
  }
  logger().log(at, said);
}

Log& log() {
  static Log only;
  return only;
}

}  // namespace torpor
