// SPDX-License-Identifier: Apache-2.0
// Exports events for other programs: JSON, one object a line; a trace for Perfetto (ui.perfetto.dev); comma-separated
// values; a web page (event_page.h).
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
  std::string types;            // only these, separated by commas; empty: all
  std::string match;            // only if a name or word contains this
  double since = 0;             // seconds before the last event; 0: all
  uint64_t after = 0;           // only events after the one with this sequence
  uint64_t until = UINT64_MAX;  // no events after the one with this sequence
  // Replace the names of requests and the keys, leave out parents of blocks and texts: for reports to others.
  bool anonymous = false;
};

// Turns events into text, of sources one after the other or merged. The caller's function writes the text.
class EventExport {
 public:
  // Make an export. kInvalidArgument: a type does not exist; the error names it.
  static Result<EventExport> create(ExportOptions options);

  nlohmann::ordered_json to_json(const EventSource& source, const EventTexts& texts, const Event& event);
  std::string to_line(const EventSource& source, const EventTexts& texts, const Event& event);
  static std::string csv_heading();
  // `words`: the text that the event completes, if any.
  std::string to_csv(const EventSource& source, const EventTexts& texts, const Event& event,
                     std::string_view words = {});

  using Write = std::function<bool(std::string_view)>;  // false: stop, nobody reads any more
  enum class Format : uint8_t { kLines, kNdjson, kCsv };
  bool write(const std::vector<SourceEvents>& sources, Format format, const Write& write);
  // Write a trace with a track for each slot, lane and operation of each source. `match` selects spans by their request
  // and their own name, `since` what ended since then.
  bool write_perfetto(const std::vector<SourceEvents>& sources, const Write& write);
  bool write_page(const std::vector<SourceEvents>& sources, const Write& write);
  // Return whether the options select this event.
  bool wanted(const EventTexts& texts, const Event& event) const;

 private:
  explicit EventExport(ExportOptions options) : options_(std::move(options)) {}
  std::string request(const EventSource& source, const EventTexts& texts, uint32_t number);
  std::string key(const Digest& key) const;
  uint64_t transfer(const Event& event) const;
  bool of_wanted_type(const Event& event) const;
  bool matches(std::string_view words) const;
  // Return the time from which on `since` selects events, in nanoseconds of the wall clock.
  int64_t earliest(const std::vector<SourceEvents>& sources) const;
  const ExportOptions options_;
  std::vector<EventType> types_;
  Digest secret_;
  bool has_heading_ = false;                 // of comma-separated values
  std::map<std::string, EventTexts> texts_;  // by source, for the names: a later call continues an earlier one
};

}  // namespace torpor::console
