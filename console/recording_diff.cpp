// SPDX-License-Identifier: Apache-2.0
#include "console/recording_diff.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "console/engine_view.h"
#include "console/event_export.h"
#include "console/schema.h"
#include "engine/phases.h"
#include "kvcache/offload_queue.h"

namespace torpor::console {
namespace {

using OrderedJson = nlohmann::ordered_json;

struct Figures {
  std::map<std::string, double> numbers;               // must be equal
  std::map<std::string, std::vector<double>> seconds;  // compared by median and p99
};

Figures figures_of(const SourceEvents& recording) {
  Figures figures;
  EventTexts texts;
  std::map<uint32_t, std::pair<std::string, int64_t>> states;
  std::map<uint64_t, int64_t> promoted;
  for (const Event& event : recording.events) {
    (void)texts.add(event);
    if (!is_known(event)) continue;
    const int64_t time = within(event.time);
    const auto count = [&](const std::string& what, uint64_t by = 1) {
      figures.numbers[what] += static_cast<double>(by);
    };
    const auto took = [&](const std::string& what, int64_t nanoseconds) {
      figures.seconds[what].push_back(static_cast<double>(nanoseconds) * 1e-9);
    };
    const std::string to(to_name(event));
    switch (event.type) {
      case EventType::kStep:
        count("steps");
        count("tokens computed", high_of(event.b));
        break;
      case EventType::kRequest: count("requests"); break;
      case EventType::kSlot: {
        auto& [state, since] = states[event.request];
        if (!state.empty() && state != to) took("seconds " + state, time - since);
        if (state != to) {
          since = time;
          count("requests that became " + to);
        }
        state = to;
        if (static_cast<SlotState>(event.to) == SlotState::kFinished) states.erase(event.request);
        break;
      }
      case EventType::kHit:
        count("blocks asked for", event.a);
        count("blocks hit in host memory", high_of(event.b));
        count("blocks hit on disk", low_of(event.b));
        break;
      case EventType::kCached:
        count("tokens cached on the device", high_of(event.a));
        count("tokens cached in host memory", low_of(event.a));
        count("tokens cached on disk", high_of(event.b));
        count("tokens cached in the remote store", low_of(event.b));
        count("tokens cached elsewhere", event.transfer);
        break;
      case EventType::kCandidate: {
        if (event.transfer >> 48 >= kWays) break;
        const std::string way(name(static_cast<Way>(event.transfer >> 48)));
        const auto state = static_cast<CandidateState>(event.to);
        if (state == CandidateState::kPromoted) promoted[event.transfer] = time;
        if (const auto found = promoted.find(event.transfer);
            found != promoted.end() && state == CandidateState::kCompleted) {
          took("seconds of a transfer " + way, time - found->second);
          promoted.erase(found);
        }
        break;
      }
      case EventType::kEnded:
        if (event.transfer >> 48 < kWays)
          count(fmt::format("blocks {} {}", name(static_cast<Way>(event.transfer >> 48)), to), event.a);
        break;
      case EventType::kDropped: count("blocks " + to); break;
      case EventType::kRegistered: count("blocks registered"); break;
      case EventType::kCopy:
        if (event.to == static_cast<uint8_t>(Edge::kEnd)) {
          const std::string job(from_name(event));
          count(fmt::format("bytes of {}", job), event.a);
          took(fmt::format("seconds of a batch of {}", job), static_cast<int64_t>(event.b & INT64_MAX));
        }
        break;
      case EventType::kOperation:
        if (event.to == static_cast<uint8_t>(Edge::kBegin)) break;
        count(fmt::format("{} {}", from_name(event), to));
        took(fmt::format("seconds of a {}", from_name(event)), static_cast<int64_t>(event.b & INT64_MAX));
        break;
      default: break;
    }
  }
  figures.numbers["events lost"] = static_cast<double>(recording.lost);
  return figures;
}

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

bool same(const Event& a, const Event& b) {
  Event other = b;
  other.sequence = a.sequence;
  other.time = a.time;
  return a == other;
}

OrderedJson shown(const SourceEvents& recording, size_t at) {
  OrderedJson rows = OrderedJson::array();
  EventTexts texts;
  Result<EventExport> writer = EventExport::create({});
  const size_t first = at < 10 ? 0 : at - 10;
  for (size_t i = 0; i < std::min(at + 1, recording.events.size()); ++i) {
    (void)texts.add(recording.events[i]);
    if (i >= first && writer) rows.push_back(writer->to_json(recording.source, texts, recording.events[i]));
  }
  return rows;
}

}  // namespace

nlohmann::ordered_json diff_recordings(const SourceEvents& a, const SourceEvents& b) {
  const std::vector<Event>& of_a = a.events;
  const std::vector<Event>& of_b = b.events;
  const size_t most = std::min(of_a.size(), of_b.size());
  size_t first = 0;
  while (first < most && same(of_a[first], of_b[first])) ++first;
  const bool equal = first == of_a.size() && first == of_b.size();
  const Figures in_a = figures_of(a);
  const Figures in_b = figures_of(b);
  OrderedJson differences = OrderedJson::array();
  const auto differ = [&](const std::string& what, double x, double y) {
    if (x != y) differences.push_back({{"what", what}, {"a", x}, {"b", y}});
  };
  std::map<std::string, bool> names;
  for (const Figures* each : {&in_a, &in_b}) {
    for (const auto& [what, number] : each->numbers) names[what] = true;
  }
  const auto number_in = [](const Figures& in, const std::string& what) {
    const auto found = in.numbers.find(what);
    return found == in.numbers.end() ? 0 : found->second;
  };
  for (const auto& [what, known] : names) differ(what, number_in(in_a, what), number_in(in_b, what));
  OrderedJson times = OrderedJson::array();
  names.clear();
  for (const Figures* each : {&in_a, &in_b}) {
    for (const auto& [what, values] : each->seconds) names[what] = true;
  }
  for (const auto& [what, known] : names) {
    const auto values = [&](const Figures& in) {
      const auto found = in.seconds.find(what);
      return found == in.seconds.end() ? std::vector<double>() : found->second;
    };
    const std::vector<double> x = values(in_a);
    const std::vector<double> y = values(in_b);
    times.push_back({{"what", what},
                     {"count", {x.size(), y.size()}},
                     {"median", {quantile(x, 0.5), quantile(y, 0.5)}},
                     {"p99", {quantile(x, 0.99), quantile(y, 0.99)}}});
  }
  OrderedJson first_difference;
  if (!equal) first_difference = {{"event", first}, {"a", shown(a, first)}, {"b", shown(b, first)}};
  return {{"equal", equal},
          {"events", {of_a.size(), of_b.size()}},
          {"differences", std::move(differences)},
          {"times", std::move(times)},
          {"first_difference", std::move(first_difference)}};
}

}  // namespace torpor::console
