// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "base/text.h"

namespace torpor {
namespace {

constexpr size_t kLineBytes = 1024;  // a line of so many bytes needs no memory

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

void Log::write(LogLevel level, fmt::string_view text, fmt::format_args args) noexcept {
  (void)try_catch([&]() -> Status {
    const spdlog::level::level_enum at = spdlog_level(level);
    if (!logger().should_log(at)) return ok();
    fmt::basic_memory_buffer<char, kLineBytes> line;
    std::string escaped;  // of a line with text that somebody else has chosen
    const Status made = try_catch([&]() -> Status {
      fmt::vformat_to(std::back_inserter(line), text, args);
      const std::string_view whole(line.data(), line.size());
      if (!is_harmless(whole)) escaped = harmless(whole);
      return ok();
    });
    const fmt::string_view shown = escaped.empty() ? fmt::string_view(line.data(), line.size()) : escaped;
    logger().log(at, made ? shown : text);
    return ok();
  });
}

Log& log() noexcept {
  static Log only;
  return only;
}

}  // namespace torpor

fmt::format_context::iterator fmt::formatter<torpor::Error>::format(const torpor::Error& error,
                                                                    fmt::format_context& context) const {
  const std::string_view name = torpor::name(error.code);
  if (error.next_step.empty()) return fmt::format_to(context.out(), "{}: {}", name, error.what);
  return fmt::format_to(context.out(), "{}: {} ({})", name, error.what, error.next_step);
}
