#include "tools/torpor/render.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

namespace torpor::render {
namespace {

using inspect::Json;
using Row = std::vector<std::string>;

std::string size_text(const Json& bytes) {
  const auto count = bytes.get<double>();
  if (count >= 1e9) return fmt::format("{:.2f} GB", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.1f} MB", count / 1e6);
  if (count >= 1e3) return fmt::format("{:.1f} kB", count / 1e3);
  return fmt::format("{:.0f} B", count);
}

std::string cell(const Json& value) { return value.is_string() ? harmless(value.get<std::string>()) : value.dump(); }

// Columns as wide as their widest cell; the first row is the heading.
std::string table(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace

std::string harmless(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

std::string list(const Json& json) {
  if (json["checkpoints"].empty()) return fmt::format("no checkpoints in {}\n", cell(json["directory"]));
  std::vector<Row> rows = {{"NAME", "CREATED", "SIZE", "RANKS", "CREATOR"}};
  for (const Json& entry : json["checkpoints"]) {
    if (entry["readable"]) {
      rows.push_back({cell(entry["name"]), cell(entry["created"]), size_text(entry["bytes"]), cell(entry["ranks"]), cell(entry["creator"])});
    } else {
      rows.push_back({cell(entry["name"]), "damaged:", cell(entry["problem"]["what"])});
    }
  }
  return table(rows);
}

std::string info(const Json& json) {
  std::string text = fmt::format("{}\n  created {} by {}, format {}, {}\n", cell(json["path"]), cell(json["created"]), cell(json["creator"]),
                                 cell(json["format_version"]), size_text(json["bytes"]));
  const Json& requests = json["requests"];
  text += fmt::format("  {} requests running, {} waiting, {} held; {} tokens\n", cell(requests["running"]), cell(requests["waiting"]),
                      cell(requests["held"]), cell(requests["tokens"]));
  text += fmt::format("  {} of {} KV blocks kept, {} entries in the prefix index\n", cell(json["kv"]["kept_blocks"]),
                      cell(json["kv"]["num_blocks"]), cell(json["kv"]["prefix_entries"]));
  std::vector<Row> memory = {{"RANK", "TAG", "CHUNKS", "BYTES", "STORED"}};
  for (const Json& entry : json["memory"]) {
    memory.push_back({cell(entry["rank"]), cell(entry["tag"]), cell(entry["chunks"]), size_text(entry["bytes"]), size_text(entry["stored_bytes"])});
  }
  std::vector<Row> sections = {{"SECTION", "BYTES", "STORED"}};
  for (const Json& entry : json["sections"]) {
    sections.push_back({cell(entry["name"]), size_text(entry["bytes"]), size_text(entry["stored_bytes"])});
  }
  std::vector<Row> fields = {{"MUST BE EQUAL", "VALUE"}};
  for (const auto& [name, value] : json["fingerprint"].items()) fields.push_back({harmless(name), cell(value)});
  return text + '\n' + table(memory) + '\n' + table(sections) + '\n' + table(fields);
}

std::string requests(const Json& json) {
  if (json["requests"].empty()) return "no requests\n";
  std::vector<Row> rows = {{"REQUEST", "QUEUE", "STATUS", "PROMPT", "OUTPUT", "MAX", "COMPUTED", "BLOCKS", "SAMPLING"}};
  for (const Json& request : json["requests"]) {
    rows.push_back({cell(request["id"]), cell(request["queue"]), cell(request["status"]), cell(request["prompt_tokens"]),
                    cell(request["output_tokens"]), cell(request["max_tokens"]), cell(request["computed_tokens"]), cell(request["blocks"]),
                    harmless(request["sampling"].dump())});
  }
  return table(rows);
}

std::string verify(const Json& json) {
  if (json["whole"]) return fmt::format("{}: whole\n", cell(json["path"]));
  std::string text = fmt::format("{}: {} problems\n", cell(json["path"]), json["problems"].size());
  for (const Json& problem : json["problems"]) text += fmt::format("  {}: {}\n", cell(problem["code"]), cell(problem["what"]));
  return text;
}

}  // namespace torpor::render
