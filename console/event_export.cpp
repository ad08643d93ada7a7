// SPDX-License-Identifier: Apache-2.0
#include "console/event_export.h"

#include <algorithm>
#include <map>

#include <fmt/core.h>

#include "base/seal.h"
#include "base/text.h"
#include "console/event_page.h"
#include "console/schema.h"
#include "engine/phases.h"
#include "kvcache/slot_state.h"

namespace torpor::console {
namespace {

using Json = nlohmann::ordered_json;

std::string type_name(const Event& event) {
  const EventSchema* schema = schema_of(event.type);
  return schema != nullptr ? std::string(schema->name) : fmt::format("type {}", static_cast<int>(event.type));
}

template <class Add>
void each_field(const std::array<std::string_view, 2>& names, uint64_t value, const Add& add) {
  if (names[0].empty()) return;
  if (names[1].empty()) {
    add(names[0], value);
    return;
  }
  add(names[0], high_of(value));
  add(names[1], low_of(value));
}

std::string dump(const Json& json) { return harmless_json(json.dump(-1, ' ', false, Json::error_handler_t::replace)); }

std::string csv_cell(std::string text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  for (size_t at = 0; (at = text.find('"', at)) != std::string::npos; at += 2) text.insert(at, 1, '"');
  return '"' + text + '"';
}

}  // namespace

Result<EventExport> EventExport::create(ExportOptions options) {
  EventExport made(std::move(options));
  const SealId random = random_seal_id();
  std::copy_n(random.begin(), made.secret_.bytes.size(), made.secret_.bytes.begin());
  std::string_view rest = made.options_.types;
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    bool found = false;
    for (int i = 0; i < kEventTypes; ++i) {
      const EventSchema* schema = schema_of(static_cast<EventType>(i));
      if (schema == nullptr || schema->name != one) continue;
      made.types_.push_back(static_cast<EventType>(i));
      found = true;
    }
    if (found) continue;
    std::string names;
    for (int i = 0; i < kEventTypes; ++i) {
      if (const EventSchema* schema = schema_of(static_cast<EventType>(i)))
        names += (names.empty() ? "" : ", ") + std::string(schema->name);
    }
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("there are no events of type \"{}\"", one),
                 .next_step = fmt::format("use some of: {}", names)};
  }
  return made;
}

std::string EventExport::request(const EventSource&, const EventTexts& texts, uint32_t number) {
  const std::string name = texts.request(number);
  if (!options_.anonymous || name.starts_with('#')) return name;
  StreamingDigest digest;  // a request has the same name in all its processes
  digest.update(std::as_bytes(std::span(secret_.bytes)));
  digest.update(std::as_bytes(std::span(name)));
  return "request-" + digest.finish().hex().substr(0, 8);
}

std::string EventExport::key(const Digest& key) const {
  if (!options_.anonymous || key == Digest{}) return key.hex();
  StreamingDigest digest;
  digest.update(std::as_bytes(std::span(secret_.bytes)));
  digest.update(std::as_bytes(std::span(key.bytes)));
  return digest.finish().hex();
}

uint64_t EventExport::transfer(const Event& event) const {
  // The parent of a block is the beginning of a key.
  return options_.anonymous && event.type == EventType::kRegistered ? 0 : event.transfer;
}

bool EventExport::of_wanted_type(const Event& event) const {
  return types_.empty() || std::find(types_.begin(), types_.end(), event.type) != types_.end();
}

bool EventExport::matches(std::string_view words) const { return words.find(options_.match) != std::string_view::npos; }

bool EventExport::wanted(const EventTexts& texts, const Event& event) const {
  return of_wanted_type(event) && ((names_a_request(event) && matches(texts.request(event.request))) ||
                                   matches(from_name(event)) || matches(to_name(event)));
}

int64_t EventExport::earliest(const std::vector<SourceEvents>& sources) const {
  if (options_.since <= 0) return INT64_MIN;
  int64_t latest = INT64_MIN;
  for (const SourceEvents& of : sources) {
    for (const Event& event : of.events) {
      if (event.type != EventType::kLost) latest = std::max(latest, of.source.wall(event.time));
    }
  }
  return latest == INT64_MIN ? latest : latest - static_cast<int64_t>(std::min(options_.since, 1e9) * 1e9);
}

Json EventExport::to_json(const EventSource& source, const EventTexts& texts, const Event& event) {
  Json json = {{"time", source.wall_seconds(event.time)},
               {"process", fmt::format("{}{}", source.role, source.rank)},
               {"pid", source.pid},
               {"sequence", event.sequence},
               {"type", type_name(event)}};
  if (event.type == EventType::kLost) json.erase("time");
  const EventSchema* schema = schema_of(event.type);
  if (schema == nullptr) return json;
  if (const std::string_view from = from_name(event); !from.empty()) json["from"] = from;
  if (const std::string_view to = to_name(event); !to.empty()) json["to"] = to;
  if (event.type == EventType::kCopy) {
    json["lane"] = event.request == 0 ? "memory" : "disk";
  } else if (event.type == EventType::kMemory) {
    if (event.request != 0)
      json["tag"] = options_.anonymous ? fmt::format("tag-{}", event.request) : texts.tag(event.request);
  } else if (event.request != 0) {
    json["request"] = request(source, texts, event.request);
  }
  if (const uint64_t number = transfer(event); !schema->transfer.empty() && number != 0)
    json[std::string(schema->transfer)] = number;
  if (!schema->key.empty()) json[std::string(schema->key)] = key(event.key);
  const auto add = [&](std::string_view name, uint64_t value) { json[std::string(name)] = value; };
  if (event.type == EventType::kCopy) {  // its fields mean other things at the begin than at the end
    const bool begins = static_cast<Edge>(event.to) == Edge::kBegin;
    add(begins ? "chunks" : "bytes", event.a);
    add(begins ? "bytes" : "nanoseconds", event.b);
    return json;
  }
  each_field(schema->a, event.a, add);
  each_field(schema->b, event.b, add);
  return json;
}

std::string EventExport::to_line(const EventSource& source, const EventTexts& texts, const Event& event) {
  const Json json = to_json(source, texts, event);
  const double wall = source.wall_seconds(event.time);
  const auto of_day = static_cast<int64_t>(wall) % 86'400;
  std::string line =
      event.type == EventType::kLost
          ? std::string(15, ' ')
          : fmt::format("{:02}:{:02}:{:02}.{:06}", of_day / 3600, of_day / 60 % 60, of_day % 60,
                        static_cast<int64_t>((wall - static_cast<double>(static_cast<int64_t>(wall))) * 1e6));
  line += fmt::format("  {:<7} {:<10}", json["process"].get<std::string>(), json["type"].get<std::string>());
  for (const auto& [name, value] : json.items()) {
    if (name == "time" || name == "process" || name == "pid" || name == "sequence" || name == "type") continue;
    const std::string text = value.is_string() ? value.get<std::string>() : dump(value);
    line += name == "from" ? " " + text
            : name == "to" ? (json.contains("from") ? " > " : " ") + text
                           : fmt::format("  {}={}", name, text);
  }
  return line + '\n';
}

std::string EventExport::csv_heading() {
  return "time,process,pid,sequence,type,from,to,request,transfer,key,a_high,a_low,b_high,b_low,words\n";
}

std::string EventExport::to_csv(const EventSource& source, const EventTexts& texts, const Event& event,
                                std::string_view words) {
  const EventSchema* schema = schema_of(event.type);
  const bool split_a = schema != nullptr && !schema->a[1].empty();
  const bool split_b = schema != nullptr && !schema->b[1].empty();
  const bool keyed = schema != nullptr && !schema->key.empty();
  // The fields of a text hold characters of it.
  const uint64_t a = event.type == EventType::kText ? 0 : event.a;
  const uint64_t b = event.type == EventType::kText ? 0 : event.b;
  return fmt::format("{:.6f},{}{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", source.wall_seconds(event.time),
                     csv_cell(source.role), source.rank, source.pid, event.sequence, type_name(event), from_name(event),
                     to_name(event), names_a_request(event) ? csv_cell(request(source, texts, event.request)) : "",
                     transfer(event), keyed ? key(event.key) : "", split_a ? high_of(a) : 0, split_a ? low_of(a) : a,
                     split_b ? high_of(b) : 0, split_b ? low_of(b) : b, csv_cell(std::string(words)));
}

bool EventExport::write(const std::vector<SourceEvents>& sources, Format format, const Write& write) {
  const int64_t since = earliest(sources);
  if (format == Format::kCsv && !has_heading_ && !write(csv_heading())) return false;
  has_heading_ = true;
  for (const Placed& each : merged(sources)) {
    const EventSource& source = sources[each.source].source;
    EventTexts& known = texts_[sources[each.source].path];
    const Event& event = *each.event;
    // Names are written with the events that they belong to; texts of errors and inputs are written by themselves.
    const std::optional<EventText> text = known.add(event);
    const bool error = text && (text->kind == TextKind::kError || text->kind == TextKind::kInput);
    if (event.type == EventType::kText && !error) continue;
    if (!wanted(known, event)) continue;
    if ((event.type == EventType::kLost ? event.a + event.b : event.sequence) <= options_.after) continue;
    if ((event.type == EventType::kLost ? event.a : event.sequence) > options_.until) continue;
    if (event.type != EventType::kLost && source.wall(event.time) < since) continue;
    std::string out;
    if (error) {
      Json json = {{"time", source.wall_seconds(event.time)},
                   {"process", fmt::format("{}{}", source.role, source.rank)},
                   {"pid", source.pid},
                   {"sequence", event.sequence},
                   {"type", text->kind == TextKind::kError ? "error" : "given"},
                   {text->kind == TextKind::kError ? "operation" : "input", text->transfer},
                   {"words", options_.anonymous ? "" : text->words}};
      if (format == Format::kNdjson) out = dump(json) + '\n';
      if (format == Format::kLines)
        out = fmt::format("{:15}  {:<7} {:<10} {}={}  {}\n", "", json["process"].get<std::string>(),
                          json["type"].get<std::string>(), text->kind == TextKind::kError ? "operation" : "input",
                          text->transfer, json["words"].get<std::string>());
      if (format == Format::kCsv) out = to_csv(source, known, event, json["words"].get<std::string>());
    } else if (format == Format::kNdjson) {
      out = dump(to_json(source, known, event)) + '\n';
    } else {
      out = format == Format::kCsv ? to_csv(source, known, event) : to_line(source, known, event);
    }
    if (!write(out)) return false;
  }
  return true;
}

// A name could contain the end of the script: no "<" of a name is written into the page.
bool EventExport::write_page(const std::vector<SourceEvents>& sources, const Write& write) {
  const auto escaped = [&](std::string_view text) {
    std::string out(text);
    for (size_t at = 0; (at = out.find('<', at)) != std::string::npos; at += 6) out.replace(at, 1, "\\u003c");
    return write(out);
  };
  return write(event_page_head()) && this->write(sources, Format::kNdjson, escaped) && write(event_page_tail());
}

bool EventExport::write_perfetto(const std::vector<SourceEvents>& sources, const Write& write) {
  const int64_t earliest_wall = earliest(sources);
  if (!write("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")) return false;
  bool first = true;
  const auto put = [&](const Json& json) {
    const std::string text = (first ? "" : ",\n") + dump(json);
    first = false;
    return write(text);
  };
  for (size_t i = 0; i < sources.size(); ++i) {
    const SourceEvents& of = sources[i];
    const auto pid = static_cast<int64_t>(i + 1);
    if (!put({{"ph", "M"},
              {"pid", pid},
              {"name", "process_name"},
              {"args", {{"name", fmt::format("{}{} ({})", of.source.role, of.source.rank, of.source.pid)}}}}))
      return false;
    EventTexts texts;
    std::map<uint32_t, std::pair<std::string, int64_t>> slots;  // state, since
    int64_t latest = 0;
    const auto us = [&](int64_t time) { return of.source.wall_seconds(time) * 1e6; };
    const auto span = [&](const char* category, std::string_view name, int64_t track, int64_t begin, int64_t end) {
      if (of.source.wall(end) < earliest_wall) return true;
      return put({{"ph", "X"},
                  {"pid", pid},
                  {"tid", track},
                  {"cat", category},
                  {"name", name},
                  {"ts", us(begin)},
                  {"dur", static_cast<double>(std::max<int64_t>(end - begin, 0)) / 1e3}});
    };
    constexpr int64_t kOperations = 1;
    constexpr int64_t kPhases = 2;
    constexpr int64_t kLanes = 10;
    constexpr int64_t kSlots = 1000;
    for (const Event& event : of.events) {
      (void)texts.add(event);
      if (!is_known(event) || event.type == EventType::kLost) continue;
      const int64_t time = within(event.time);
      latest = std::max(latest, time);
      // A slot needs each of its events, to know how long a state lasts. Its spans are chosen below.
      if (event.type == EventType::kSlot ? !of_wanted_type(event) : !wanted(texts, event)) continue;
      bool more = true;
      const auto edge = static_cast<Edge>(event.to);
      const auto ns = static_cast<int64_t>(event.b & INT64_MAX);
      if (event.type == EventType::kSlot) {
        auto& [state, since] = slots[event.request];
        const int64_t track = kSlots + event.request;
        const bool named = matches(texts.request(event.request));
        if (!state.empty() && state != to_name(event) && (named || matches(state)))
          more = span("slot", state, track, since, time);
        if (state.empty() || event.from == 0)
          more = more && put({{"ph", "M"},
                              {"pid", pid},
                              {"tid", track},
                              {"name", "thread_name"},
                              {"args", {{"name", request(of.source, texts, event.request)}}}});
        if (state != to_name(event)) since = time;
        state = to_name(event);
        if (static_cast<SlotState>(event.to) == SlotState::kFinished) slots.erase(event.request);
      } else if (event.type == EventType::kCopy && edge != Edge::kBegin) {
        more = span("copy", fmt::format("{} {}", from_name(event), edge == Edge::kEnd ? "" : to_name(event)),
                    kLanes + event.request, time - ns, time);
      } else if (event.type == EventType::kOperation && edge != Edge::kBegin) {
        more = span("operation", fmt::format("{} {}", from_name(event), to_name(event)), kOperations, time - ns, time);
      } else if (event.type == EventType::kPhase && (edge == Edge::kEnd || edge == Edge::kFailed)) {
        more = span("phase", fmt::format("{}{}", from_name(event), edge == Edge::kFailed ? " failed" : ""), kPhases,
                    time - ns, time);
      } else if (event.type == EventType::kStep && of.source.wall(time) >= earliest_wall) {
        more = put({{"ph", "C"},
                    {"pid", pid},
                    {"name", "requests"},
                    {"ts", us(time)},
                    {"args", {{"running", high_of(event.a)}, {"waiting", low_of(event.a)}}}});
      }
      if (!more) return false;
    }
    for (const auto& [number, slot] : slots) {
      if (!matches(texts.request(number)) && !matches(slot.first)) continue;
      if (!span("slot", slot.first, kSlots + number, slot.second, latest)) return false;
    }
    for (const auto& [track, name] : {std::pair(kOperations, "operations"), std::pair(kPhases, "phases"),
                                      std::pair(kLanes, "lane memory"), std::pair(kLanes + 1, "lane disk")}) {
      if (!put({{"ph", "M"}, {"pid", pid}, {"tid", track}, {"name", "thread_name"}, {"args", {{"name", name}}}}))
        return false;
    }
  }
  return write("\n]}\n");
}

}  // namespace torpor::console
