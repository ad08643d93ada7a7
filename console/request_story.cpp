// SPDX-License-Identifier: Apache-2.0
#include "console/request_story.h"

#include <deque>
#include <map>
#include <set>
#include <vector>

#include <fmt/core.h>

#include "base/text.h"
#include "console/event_export.h"
#include "console/schema.h"
#include "kvcache/offload_queue.h"

namespace torpor::console {
namespace {

using Json = nlohmann::ordered_json;

struct Transfer {
  uint64_t candidate = 0;
  uint64_t blocks = 0;
  std::string_view state;
  double began = 0;
  double time = 0;  // of its last event
  std::set<uint64_t> jobs;
  std::map<std::string_view, uint64_t> ended;
};

class Story {
 public:
  Story(const SourceEvents& source, EventExport writer, size_t limit)
      : source_(source.source), writer_(std::move(writer)), limit_(limit) {}

  // Request numbers are used again, and a scheduler of offloading has numbers of its own.
  void take(const Event& event, const std::string& request) {
    const std::optional<EventText> text = texts_.add(event);
    if (text && text->kind == TextKind::kRequestName) {
      if (text->words == request) {
        numbers_.insert(text->request);
      } else {
        numbers_.erase(text->request);
      }
    }
    if (event.type == EventType::kText || !names_a_request(event) || !numbers_.contains(event.request)) return;
    const double time = source_.wall_seconds(event.time);
    switch (event.type) {
      case EventType::kRequest: prompt_tokens_ = event.a; break;
      case EventType::kSlot: add_state(event, time); break;
      case EventType::kHit:
        hits_.push_back({{"time", time},
                         {"asked_blocks", event.a},
                         {"host_blocks", high_of(event.b)},
                         {"disk_blocks", low_of(event.b)}});
        break;
      case EventType::kCached:
        cached_ = {{"device", high_of(event.a)},
                   {"host", low_of(event.a)},
                   {"disk", high_of(event.b)},
                   {"kv_store", low_of(event.b)},
                   {"other", event.transfer}};
        break;
      case EventType::kCandidate: {
        Transfer& transfer = transfer_of(event, time);
        transfer.state = to_name(event);
        transfer.blocks = event.a;
        break;
      }
      case EventType::kPlanned: transfer_of(event, time).jobs.insert(event.a); break;
      case EventType::kEnded: transfer_of(event, time).ended[to_name(event)] += event.a; break;
      default: break;
    }
    events_.push_back(writer_.to_json(source_, texts_, event));
    if (events_.size() > limit_) events_.pop_front();
  }

  bool empty() const { return events_.empty() && numbers_.empty(); }
  Json to_json() const {
    Json transfers = Json::array();
    for (size_t i = transfers_.size() - std::min(transfers_.size(), limit_); i < transfers_.size(); ++i) {
      const Transfer& one = transfers_[i];
      transfers.push_back({{"candidate", one.candidate},
                           {"way", name(static_cast<Way>(one.candidate >> 48))},
                           {"blocks", one.blocks},
                           {"state", one.state},
                           {"began", one.began},
                           {"time", one.time},
                           {"jobs", one.jobs},
                           {"ended_blocks", Json::object()}});
      for (const auto& [outcome, blocks] : one.ended) transfers.back()["ended_blocks"][std::string(outcome)] = blocks;
    }
    return {{"prompt_tokens", prompt_tokens_ ? Json(*prompt_tokens_) : Json()},
            {"states", states_},
            {"hits", hits_},
            {"cached_tokens", cached_},
            {"transfers", std::move(transfers)},
            {"events", events_}};
  }

 private:
  // A state that is only recorded again, before the ring overwrites it, is not a new one.
  void add_state(const Event& event, double time) {
    const std::string_view state = to_name(event);
    if (!states_.empty() && states_.back()["state"] == state) return;
    states_.push_back({{"time", time},
                       {"state", state},
                       {"computed_tokens", high_of(event.a)},
                       {"tokens", low_of(event.a)},
                       {"device_blocks", high_of(event.b)},
                       {"staged_blocks", low_of(event.b)}});
  }
  Transfer& transfer_of(const Event& event, double time) {
    const auto [at, made] = by_candidate_.try_emplace(event.transfer, transfers_.size());
    if (made) transfers_.push_back({.candidate = event.transfer, .began = time});
    transfers_[at->second].time = time;
    return transfers_[at->second];
  }

  const EventSource source_;
  EventExport writer_;
  const size_t limit_;
  EventTexts texts_;
  std::set<uint32_t> numbers_;  // current numbers of the request
  std::optional<uint64_t> prompt_tokens_;
  Json states_ = Json::array();
  Json hits_ = Json::array();
  Json cached_;  // null until the request has ended
  std::vector<Transfer> transfers_;
  std::map<uint64_t, size_t> by_candidate_;
  std::deque<Json> events_;
};

}  // namespace

Result<Json> request_story(const SourceEvents& source, const std::string& request, size_t limit) {
  TORPOR_ASSIGN_OR_RETURN(EventExport writer, EventExport::create({}));
  Story story(source, std::move(writer), limit);
  for (const Event& event : source.events) {
    const bool of_a_way =
        event.type != EventType::kCandidate && event.type != EventType::kPlanned && event.type != EventType::kEnded;
    if (is_known(event) && (of_a_way || event.transfer >> 48 < kWays)) story.take(event, request);
  }
  if (!story.empty()) return story.to_json();
  return Error{.code = Code::kNotFound,
               .what = fmt::format("no event that is still there has a request \"{}\"", first_bytes(request, 64)),
               .next_step = "give the whole name: slots lists the requests that have not ended"};
}

}  // namespace torpor::console
