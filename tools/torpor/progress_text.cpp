// SPDX-License-Identifier: Apache-2.0
#include "tools/torpor/progress_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include <fmt/core.h>

namespace torpor::cli {
namespace {

constexpr size_t kWidestBar = 30;
constexpr size_t kNarrowestBar = 5;
constexpr std::array<std::string_view, 8> kEighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};

std::string bytes_text(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.2f} GB", bytes / 1e9);
  if (bytes >= 1e6) return fmt::format("{:.1f} MB", bytes / 1e6);
  return fmt::format("{:.1f} kB", bytes / 1e3);
}

std::string seconds_text(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(std::min(seconds, 1e9)));
  if (whole < 120) return fmt::format("{} s", whole);
  if (whole < 7200) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole / 60 % 60);
}

// `columns` columns, of which `part` (0 to 1) is full.
std::string bar(double part, size_t columns) {
  const auto eighths = static_cast<size_t>(part * static_cast<double>(columns * kEighths.size()));
  const size_t full = eighths / kEighths.size();
  const std::string_view last = full < columns ? kEighths[eighths % kEighths.size()] : "";
  std::string text;
  for (size_t i = 0; i < full; ++i) text += "█";
  text += last;
  for (size_t i = full + (last.empty() ? 0 : 1); i < columns; ++i) text += "░";
  return text;
}

}  // namespace

std::string progress_text(const Progress& progress, size_t columns) {
  const auto done = static_cast<double>(progress.bytes_done);
  const auto total = static_cast<double>(progress.bytes_total);
  const std::string rate = bytes_text(progress.bytes_per_second()) + "/s";
  if (progress.bytes_total == 0)
    return fmt::format("{}  {}  {}", progress.phase, bytes_text(done), rate).substr(0, columns);
  const double part = std::min(done / total, 1.0);
  const std::string words = fmt::format("{:3.0f} %  {} of {}  {}  {} left", std::floor(100 * part), bytes_text(done),
                                        bytes_text(total), rate, seconds_text(progress.seconds_left()));
  const size_t others = progress.phase.size() + 2 + 1 + words.size();
  const size_t rest = columns > others ? columns - others : 0;
  if (rest < kNarrowestBar) return fmt::format("{} {}", progress.phase, words).substr(0, columns);
  return fmt::format("{}  {} {}", progress.phase, bar(part, std::min(rest, kWidestBar)), words);
}

}  // namespace torpor::cli
