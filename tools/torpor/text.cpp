// SPDX-License-Identifier: Apache-2.0
#include "tools/torpor/text.h"

#include <algorithm>

#include <fmt/chrono.h>
#include <fmt/core.h>

namespace torpor::cli {
namespace {

bool colours = false;

std::string coloured(const char* code, const std::string& text) {
  return colours ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : text;
}

}  // namespace

void use_colours(bool on) { colours = on; }
std::string good(const std::string& text) { return coloured("32", text); }
std::string bad(const std::string& text) { return coloured("31", text); }

std::string cell(const Json& value) { return harmless(value.is_string() ? value.get<std::string>() : dump(value)); }

std::string dump(const Json& json, int indent) {
  return harmless_json(json.dump(indent, ' ', false, Json::error_handler_t::replace));
}

Json metadata_json(const Metadata& metadata) {
  Json json = Json::object();
  for (const auto& [name, value] : metadata)
    json[name] = value.is_json ? Json::parse(value.words, nullptr, false) : Json(value.words);
  return json;
}

std::string metadata_text(const Json& metadata) {
  std::string text;
  for (const auto& [name, value] : metadata.items())
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", harmless(name), cell(value));
  return text;
}

std::string size_text(const Json& bytes) {
  const auto count = bytes.get<double>();
  if (count >= 1e9) return fmt::format("{:.2f} GB", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.1f} MB", count / 1e6);
  if (count >= 1e3) return fmt::format("{:.1f} kB", count / 1e3);
  return fmt::format("{:.0f} B", count);
}

std::string time_text(double unix_seconds) {
  if (!(unix_seconds >= 0 && unix_seconds < 4e9)) return "unknown";
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(static_cast<std::time_t>(unix_seconds)));
}

std::string table(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], columns_of(row[i]));
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += padded(row[i], widths[i] + 2);
    line.erase(line.find_last_not_of(' ') + 1);
    text += (&row == &rows.front() ? coloured("1", line) : line) + '\n';
  }
  return text;
}

}  // namespace torpor::cli
