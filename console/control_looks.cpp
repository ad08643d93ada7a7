// SPDX-License-Identifier: Apache-2.0
// Calls that change nothing: requests and events.
#include <unistd.h>

#include <algorithm>

#include <fmt/core.h>

#include "base/process.h"
#include "base/text.h"
#include "console/control.h"
#include "console/event_files.h"
#include "console/request_story.h"

namespace torpor::console {
namespace {

using Json = nlohmann::ordered_json;
using nlohmann::json;

constexpr uint64_t kMostAnswered = 10'000;

uint64_t whole_number(const json& params, const char* name, uint64_t otherwise) {
  return static_cast<uint64_t>(params.value(name, static_cast<double>(otherwise)));
}
uint64_t limit_of(const json& params, uint64_t otherwise) {
  return std::min(whole_number(params, "limit", otherwise), kMostAnswered);
}

SourceEvents all_of(const EventRing& ring, EventReader& reader) {
  SourceEvents all{.source = ring.source()};
  reader.read(all.events);
  return all;
}

// Return the rings, in the directory of `own`, of processes that this one has started: its ranks, where they are
// processes of their own. Rings of other engines there are left out.
std::vector<std::unique_ptr<EventRing>> rings_of_workers(const EventRing& own) {
  std::vector<std::unique_ptr<EventRing>> rings;
  const size_t folder = own.path().rfind('/');
  if (folder == std::string::npos) return rings;  // it is in memory
  Result<std::vector<std::unique_ptr<EventRing>>> all = open_rings(own.path().substr(0, folder));
  if (!all) return rings;
  for (auto& ring : *all) {  // consoles call this many times a second: not all processes of the machine are looked at
    const ProcessId of{.pid = ring->source().pid, .started = ring->source().process_start};
    if (is_descendant_of(of, ::getpid())) rings.push_back(std::move(ring));
  }
  return rings;
}

Json names_of(const std::vector<std::unique_ptr<EventRing>>& rings) {
  Json names = Json::array();
  for (const auto& ring : rings) {
    const EventSource& source = ring->source();
    names.push_back({{"process", fmt::format("{}{}", source.role, source.rank)}, {"pid", source.pid}});
  }
  return names;
}

// Sort by one of slot_orders(). kInvalidArgument: the error lists them.
Status sort_rows(Json& rows, const std::string& order, bool inverted) {
  const auto orders = slot_orders();
  if (!order.empty() && std::find(orders.begin(), orders.end(), order) == orders.end())
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("sort is \"{}\"", order),
                 .next_step = fmt::format("use one of: {}", joined(orders, ", "))};
  if (!order.empty())
    std::stable_sort(rows.begin(), rows.end(), [&](const Json& a, const Json& b) { return a[order] < b[order]; });
  if (inverted) std::reverse(rows.begin(), rows.end());
  return ok();
}

}  // namespace

Result<Json> Control::slots(const json& params) {
  const std::string match = params.value("match", "");
  Json all = now().to_json();
  Json rows = Json::array();
  for (Json& row : all["slots"]) {
    const bool wanted = match.empty() ||
                        row["request"].get_ref<const std::string&>().find(match) != std::string::npos ||
                        row["state"].get_ref<const std::string&>().find(match) != std::string::npos;
    if (wanted) rows.push_back(std::move(row));
  }
  TORPOR_RETURN_IF_ERROR(sort_rows(rows, params.value("sort", ""), params.value("invert", false)));
  if (const uint64_t limit = limit_of(params, kMostAnswered); rows.size() > limit)
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(limit), rows.end());
  return Json{{"slots", std::move(rows)}, {"at", reader_.next() - 1}};
}

Result<Json> Control::events(const json& params) {
  const uint64_t limit = limit_of(params, 1000);
  const uint64_t after = whole_number(params, "after", 0);
  const uint64_t until = params.contains("until") ? whole_number(params, "until", 0) : UINT64_MAX;
  if (until < after)
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("until is {}, before after, {}", until, after),
                 .next_step = "give two sequences in their order"};
  TORPOR_ASSIGN_OR_RETURN(
      EventExport writer,
      EventExport::create(
          {.types = params.value("types", ""), .match = params.value("match", ""), .after = after, .until = until}));
  const std::vector<std::unique_ptr<EventRing>> workers = rings_of_workers(ring_);
  const EventRing* ring = &ring_;
  if (params.contains("pid")) {
    const uint64_t pid = whole_number(params, "pid", 0);
    const auto asked = std::find_if(workers.begin(), workers.end(),
                                    [&](const auto& each) { return static_cast<uint64_t>(each->source().pid) == pid; });
    if (asked == workers.end())
      return Error{.code = Code::kNotFound,
                   .what = fmt::format("process {} is no worker of this engine that publishes events", pid),
                   .next_step = "use a pid of `workers`, or leave pid out"};
    ring = asked->get();
  }
  EventReader reader(*ring);
  const std::vector<SourceEvents> all = {all_of(*ring, reader)};
  Json found = Json::array();
  uint64_t next = std::min(reader.next() - 1, until);
  (void)writer.write(all, EventExport::Format::kNdjson, [&](std::string_view line) {
    if (found.size() >= limit) return false;
    found.push_back(Json::parse(line, nullptr, false));
    return true;
  });
  if (found.size() >= limit && !found.empty()) next = found.back().value("sequence", next);
  Json answer = {{"events", std::move(found)}, {"next", next}, {"lost", reader.lost()}};
  if (ring == &ring_) answer["workers"] = names_of(workers);
  return answer;
}

Result<Json> Control::request(const json& params) {
  const std::string wanted = params.value("request", "");
  if (wanted.empty())
    return Error{.code = Code::kInvalidArgument, .what = "which request?", .next_step = "give request=NAME"};
  EventReader reader(ring_);
  TORPOR_ASSIGN_OR_RETURN(Json story, request_story(all_of(ring_, reader), wanted, limit_of(params, 1000)));
  Json all = {{"request", wanted}, {"slot", nullptr}};
  Json rows = now().to_json()["slots"];
  for (Json& row : rows) {
    if (row["request"] == wanted) all["slot"] = std::move(row);
  }
  all.update(story);
  Json standing = stops();
  all["stops"] = Json::array();
  for (Json& stop : standing["stops"]) {
    if (stop["request"] == wanted) all["stops"].push_back(std::move(stop));
  }
  all["at"] = reader.next() - 1;
  all["lost"] = reader.lost();
  return all;
}

}  // namespace torpor::console
