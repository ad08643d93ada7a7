// SPDX-License-Identifier: Apache-2.0
#include "console/event_export.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "base/text.h"
#include "engine/phases.h"
#include "kvcache/slot_table.h"
#include "tests/support/results.h"

namespace torpor::console {
namespace {

using test::value_of;

constexpr std::string_view kError = "the disk of /home/alpha is full";
constexpr std::string_view kInput = R"({"id": "alpha", "tokens": [11, 23, 42, 7, 8, 15, 16, 23, 42]})";

// The number that a field of 8 bytes holds for the characters of `text` from `at` on.
std::string as_number(std::string_view text, size_t at) {
  uint64_t number = 0;
  if (at < text.size()) std::memcpy(&number, text.data() + at, std::min<size_t>(8, text.size() - at));
  return std::to_string(number);
}

// The parent of the registered block: the first digits of its key.
uint64_t parent() {
  uint64_t digits = 0;
  for (size_t i = 0; i < sizeof digits; ++i) digits = digits << 8 | digest_of({}).bytes[i];
  return digits;
}

// Two requests, a sleep and a copy.
std::vector<SourceEvents> example() {
  const auto ring = value_of(EventRing::in_memory({}, 256));
  const EventPort port(*ring, system_clock());
  SlotTable table(port);
  const uint32_t a = value_of(table.create("alpha", 10));
  (void)value_of(table.create("beta, with \"commas\"", 4));
  EXPECT_SUCCEEDS(table.scheduled(a, 0, 10, 10));
  table.step(1, 1, 10, 2000);
  const uint64_t number =
      port.record({.type = EventType::kOperation, .from = 1, .to = static_cast<uint8_t>(Edge::kBegin)});
  const auto publish = [&](EventType type, uint8_t from, Edge edge) {
    (void)port.record({.type = type, .from = from, .to = static_cast<uint8_t>(edge), .transfer = number, .b = 1000});
  };
  publish(EventType::kPhase, number_of("save", kPhaseNames), Edge::kBegin);
  publish(EventType::kPhase, number_of("save", kPhaseNames), Edge::kFailed);
  port.text(TextKind::kError, 0, number, kError);
  port.text(TextKind::kInput, 0, number, kInput);
  publish(EventType::kOperation, 1, Edge::kFailed);
  (void)port.record(
      {.type = EventType::kCopy, .to = static_cast<uint8_t>(Edge::kEnd), .request = 1, .a = 4096, .b = 10});
  (void)port.record({.type = EventType::kRegistered, .transfer = parent(), .key = digest_of({}), .a = 3, .b = 4});
  std::vector<SourceEvents> sources(1);
  sources[0].source = this_process("core", 0, system_clock());
  EventReader(*ring).read(sources[0].events, true);
  return sources;
}

std::string written(EventExport::Format format, ExportOptions options = {}) {
  std::string text;
  EventExport writer = value_of(EventExport::create(std::move(options)));
  EXPECT_TRUE(writer.write(example(), format, [&](std::string_view more) {
    text += more;
    return true;
  }));
  return text;
}

std::vector<nlohmann::json> lines_of(const std::string& text) {
  std::vector<nlohmann::json> all;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    all.push_back(nlohmann::json::parse(text.substr(at, end - at)));
    at = end + 1;
  }
  return all;
}

TEST(EventExportTest, ALineIsAnObjectWithTheFieldsOfItsType) {
  const std::vector<nlohmann::json> all = lines_of(written(EventExport::Format::kNdjson));
  const auto slot = std::find_if(all.begin(), all.end(),
                                 [](const auto& line) { return line["type"] == "slot" && line["to"] == "prefilling"; });
  ASSERT_NE(slot, all.end());
  EXPECT_EQ((*slot)["request"], "alpha");
  EXPECT_EQ((*slot)["from"], "initialized");
  EXPECT_EQ((*slot)["computed_tokens"], 10);
  EXPECT_EQ((*slot)["process"], "core0");
  EXPECT_NEAR((*slot)["time"].get<double>(), system_clock().unix_seconds(), 60);
  const auto error = std::find_if(all.begin(), all.end(), [](const auto& line) { return line["type"] == "error"; });
  ASSERT_NE(error, all.end());
  EXPECT_EQ((*error)["words"], kError);
}

// A client names its requests, and anybody may have written a recording.
TEST(EventExportTest, NamesAndRolesReachNoTerminal) {
  const EventSource named = this_process("\x1b[2J\u009b\x9b", 0, system_clock());
  std::vector<std::byte> head(kEventHeadBytes);
  write_event_head(named, "torporev", head.data());
  const auto ring = value_of(EventRing::in_memory({}, 256));
  const EventPort port(*ring, system_clock());
  SlotTable table(port);
  (void)value_of(table.create("request \x1b]0;x\x07\u009b2J\u202e\u2028\xff ü", 10));
  port.text(TextKind::kError, 0, 1, "\x7f failed");
  port.text(TextKind::kInput, 0, 1,
            R"({"id": ")"
            "\x7f"
            R"("})");
  std::vector<SourceEvents> sources(1);
  sources[0].source = value_of(read_event_head("torporev", head));
  EventReader(*ring).read(sources[0].events, true);
  for (const auto format : {EventExport::Format::kLines, EventExport::Format::kCsv, EventExport::Format::kNdjson}) {
    std::string text;
    EventExport writer = value_of(EventExport::create({}));
    EXPECT_TRUE(writer.write(sources, format, [&](std::string_view more) {
      text += more;
      return true;
    }));
    std::erase(text, '\n');
    EXPECT_TRUE(is_harmless(text)) << harmless(text);
    EXPECT_NE(text.find("ü"), std::string::npos);
  }
  EXPECT_EQ(sources[0].source.role, R"(\x1b[2J\u009b\x9b)");
}

TEST(EventExportTest, FiltersTakeTypesAndWords) {
  for (const auto& line : lines_of(written(EventExport::Format::kNdjson, {.types = "slot,phase"})))
    EXPECT_TRUE(line["type"] == "slot" || line["type"] == "phase") << line;
  for (const auto& line : lines_of(written(EventExport::Format::kNdjson, {.match = "alpha"})))
    EXPECT_EQ(line["request"], "alpha");
  EXPECT_FAILS(EventExport::create({.types = "slot,slots"}), Code::kInvalidArgument, "\"slots\"");
}

TEST(EventExportTest, WhatIsAnonymousHasNoNamesNoKeysAndNoWords) {
  const std::string plain = written(EventExport::Format::kNdjson);
  for (const EventExport::Format format :
       {EventExport::Format::kNdjson, EventExport::Format::kCsv, EventExport::Format::kLines}) {
    const std::string text = written(format, {.anonymous = true});
    for (const std::string& secret : {std::string("alpha"), std::string("beta"), std::string("42]"),
                                      digest_of({}).hex(), std::to_string(parent())}) {
      EXPECT_NE(plain.find(secret), std::string::npos) << secret;
      EXPECT_EQ(text.find(secret), std::string::npos) << secret << " in " << text;
    }
    // An event of a text has its last characters in two numbers.
    for (const std::string& characters :
         {as_number(kError, 16), as_number(kError, 24), as_number(kInput, 48), as_number(kInput, 56)})
      EXPECT_EQ(text.find(characters), std::string::npos) << characters << " in " << text;
  }
}

TEST(EventExportTest, CommaSeparatedValuesHaveAsManyColumnsEverywhere) {
  const std::string text = written(EventExport::Format::kCsv);
  EXPECT_NE(text.find(",0,0,0,0," + std::string(kError) + "\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\"beta, with \"\"commas\"\"\""), std::string::npos);
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    int columns = 1;
    bool quoted = false;
    for (const char c : text.substr(at, end - at)) {
      quoted = quoted != (c == '"');
      columns += c == ',' && !quoted ? 1 : 0;
    }
    EXPECT_EQ(columns, 15) << text.substr(at, end - at);
    at = end + 1;
  }
}

TEST(EventExportTest, ATraceHasATrackForEachRequestAndOperation) {
  std::string text;
  EventExport writer = value_of(EventExport::create({}));
  ASSERT_TRUE(writer.write_perfetto(example(), [&](std::string_view more) {
    text += more;
    return true;
  }));
  std::set<std::string> names;
  const auto json = nlohmann::json::parse(text);
  for (const auto& event : json["traceEvents"]) {
    names.insert(event["name"]);
    if (event.contains("args") && event["args"].contains("name")) names.insert(event["args"]["name"]);
  }
  for (const char* name : {"alpha", "prefilling", "sleep failed", "save failed", "lane disk"})
    EXPECT_TRUE(names.contains(name)) << name << " is not in " << text;
}

// Names of what a trace has besides its tracks' own names.
std::set<std::string> traced(ExportOptions options, const std::vector<SourceEvents>& sources = example()) {
  std::string text;
  EXPECT_TRUE(value_of(EventExport::create(std::move(options))).write_perfetto(sources, [&](std::string_view more) {
    text += more;
    return true;
  }));
  std::set<std::string> names;
  const auto json = nlohmann::json::parse(text);
  for (const auto& event : json["traceEvents"]) {
    if (event["ph"] != "M") names.insert(event["name"]);
  }
  return names;
}

TEST(EventExportTest, ATraceHasWhatTheFiltersSelect) {
  EXPECT_EQ(traced({.types = "operation"}), std::set<std::string>{"sleep failed"});
  EXPECT_EQ(traced({.match = "alpha"}), (std::set<std::string>{"initialized", "prefilling"}));
  EXPECT_EQ(traced({.match = "beta"}), std::set<std::string>{"initialized"});
  EXPECT_EQ(traced({.match = "prefilling"}), std::set<std::string>{"prefilling"});
  std::vector<SourceEvents> sources = example();
  const int64_t end = sources[0].events.back().time;
  for (Event& event : sources[0].events) {
    if (event.type == EventType::kOperation || event.type == EventType::kStep) event.time = end - 60'000'000'000;
  }
  EXPECT_TRUE(traced({}, sources).contains("requests"));
  const std::set<std::string> late = traced({.since = 30}, sources);
  EXPECT_FALSE(late.contains("requests"));
  EXPECT_FALSE(late.contains("sleep failed"));
  EXPECT_TRUE(late.contains("prefilling"));
}

TEST(EventExportTest, CommaSeparatedValuesHaveOneHeadingHoweverOftenNothingHappens) {
  EventExport writer = value_of(EventExport::create({}));
  std::string text;
  for (int poll = 0; poll < 3; ++poll) {
    EXPECT_TRUE(writer.write({}, EventExport::Format::kCsv, [&](std::string_view more) {
      text += more;
      return true;
    }));
  }
  EXPECT_EQ(text, EventExport::csv_heading());
}

// The page is whole, and no name of a request ends its script.
TEST(EventExportTest, APageHoldsEveryEventAndNothingThatANameSays) {
  std::vector<SourceEvents> sources = example();
  const auto ring = value_of(EventRing::in_memory({}, 64));
  SlotTable table(EventPort(*ring, system_clock()));
  (void)value_of(table.create("</script><b>", 3));
  EventReader(*ring).read(sources.emplace_back().events, true);
  sources.back().source = this_process("other", 0, system_clock());
  std::string page;
  ASSERT_TRUE(value_of(EventExport::create({})).write_page(sources, [&](std::string_view more) {
    page += more;
    return true;
  }));
  const size_t begin = page.find("id=\"events\">\n");
  ASSERT_NE(begin, std::string::npos);
  const std::string behind = page.substr(begin + 13);
  const std::string events = behind.substr(0, behind.find('<'));
  EXPECT_TRUE(behind.substr(events.size()).starts_with("</script><script>\n"));
  EXPECT_EQ(lines_of(events).size(), lines_of(written(EventExport::Format::kNdjson)).size() + 2);
  EXPECT_NE(events.find("\\u003c/script>\\u003cb>"), std::string::npos);
  EXPECT_TRUE(page.ends_with("</html>\n"));
}

}  // namespace
}  // namespace torpor::console
