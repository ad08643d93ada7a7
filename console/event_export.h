// SPDX-License-Identifier: Apache-2.0
// Events for other programs: a JSON object a line, a trace for Perfetto (ui.perfetto.dev), comma-separated values, a
// web page (event_page.h).
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "console/event_files.h"
#include "console/event_text.h"

namespace torpor::console {

struct ExportOptions {
  std::string types;            // only these, with commas between them; empty: all
  std::string match;            // only where a name or word has this in it
  double since = 0;             // seconds before the last event; 0: all
  uint64_t after = 0;           // only what was told after the event with this sequence
  uint64_t until = UINT64_MAX;  // nothing that was told after the event with this sequence
  bool anonymous = false;       // other names for requests, other keys, no words of errors: as a report may have
};

// Gives each event's words, one source after the other or merged; who is called writes them.
class EventExport {
 public:
  // kInvalidArgument names a type that there is not.
  static Result<EventExport> create(ExportOptions options);

  nlohmann::ordered_json to_json(const EventSource& source, const EventTexts& texts, const Event& event);
  std::string to_line(const EventSource& source, const EventTexts& texts, const Event& event);
  static std::string csv_heading();
  std::string to_csv(const EventSource& source, const EventTexts& texts, const Event& event);

  using Write = std::function<bool(std::string_view)>;  // false: nobody reads any more
  enum class Format : uint8_t { kLines, kNdjson, kCsv };
  bool write(const std::vector<SourceEvents>& sources, Format format, const Write& write);
  // A track for each slot, lane and operation of each source.
  bool write_perfetto(const std::vector<SourceEvents>& sources, const Write& write);
  bool write_page(const std::vector<SourceEvents>& sources, const Write& write);
  // Whether this event is one of those that are asked for.
  bool wanted(const EventTexts& texts, const Event& event) const;

 private:
  explicit EventExport(ExportOptions options) : options_(std::move(options)) {}
  std::string request(const EventSource& source, const EventTexts& texts, uint32_t number);
  std::string key(const Digest& key) const;
  const ExportOptions options_;
  std::vector<EventType> types_;
  Digest secret_;
  std::map<std::string, EventTexts> texts_;  // by source: what comes next goes on from what came before
};

}  // namespace torpor::console
