// SPDX-License-Identifier: Apache-2.0
#include "console/replay.h"

#include <algorithm>

#include <fmt/core.h>

#include "console/event_text.h"

namespace torpor::console {
namespace {

Error no_replay(std::string why, std::string next_step) {
  return {.code = Code::kFailedPrecondition, .what = std::move(why), .next_step = std::move(next_step)};
}

Status can_be_replayed(const SourceEvents& recording) {
  const std::vector<Event>& events = recording.events;
  const auto input = [](const Event& event) { return event.type == EventType::kInput; };
  if (std::any_of(events.begin(), events.end(),
                  [&](const Event& event) { return input(event) && is_of_vllm(static_cast<InputKind>(event.from)); }))
    return no_replay("its inputs are of vLLM", "use python -m torpor.vllm.replay, beside vLLM");
  if (std::none_of(events.begin(), events.end(), input)) {
    return no_replay("it has no inputs: its engine is not the reference engine",
                     "look at it with torpor console and torpor events, or compare it with torpor diff");
  }
  if (recording.lost > 0 || !input(events.front()) || events.front().sequence != 1)
    return no_replay("its beginning, or events in between, are missing", "record from the engine's start");
  if (std::any_of(events.begin(), events.end(), [](const Event& event) {
        return event.type == EventType::kStop || event.type == EventType::kControl;
      }))
    return no_replay("somebody stopped its engine in between", "record one that nobody stops");
  return ok();
}

bool has_words(const Event& input) {
  switch (static_cast<InputKind>(input.from)) {
    case InputKind::kEngine:
    case InputKind::kRequest:
    case InputKind::kAbort:
    case InputKind::kSleep:
    case InputKind::kWake: return true;
    default: return false;
  }
}

// Return the words that follow the input at `at`; none: the recording ends before they do.
// kFailedPrecondition: the run had threads of its own.
Result<std::optional<nlohmann::json>> words_of(const std::vector<Event>& events, size_t at) {
  EventTexts texts;
  for (size_t i = at + 1;; ++i) {
    if (i == events.size() && has_words(events[at])) return std::nullopt;
    if (i == events.size() || events[i].type != EventType::kText) break;
    const std::optional<EventText> text = texts.add(events[i]);
    if (!text) continue;
    if (text->kind != TextKind::kInput || text->transfer != events[at].sequence) break;
    nlohmann::json words = nlohmann::json::parse(text->words, nullptr, false);
    if (words.is_discarded()) break;
    if (words.is_object() && words.value("transfers_have_threads", false))
      return no_replay("its transfers had threads of their own, whose order nobody knows", "record one without");
    return std::optional(std::move(words));
  }
  return std::optional(nlohmann::json());
}

}  // namespace

Result<ReplayResult> replay(const SourceEvents& recording, RunHost host, uint64_t ring_events) {
  return try_catch([&]() -> Result<ReplayResult> {
    TORPOR_RETURN_IF_ERROR(can_be_replayed(recording));
    const std::vector<Event>& events = recording.events;
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<EventRing> ring, EventRing::in_memory(recording.source, ring_events));
    RunClock clock;
    ReferenceRun run(std::move(host), *ring, clock);
    EventReader reader(*ring);
    std::vector<Event> published;
    ReplayResult result;
    size_t at = 0;
    while (at < events.size()) {
      const Event& input = events[at];
      if (input.type != EventType::kInput) {
        result.difference = {at, input, std::nullopt};
        return result;
      }
      TORPOR_ASSIGN_OR_RETURN(const std::optional<nlohmann::json> words, words_of(events, at));
      if (!words) return result;
      clock.set(std::chrono::nanoseconds(within(input.time)));
      ++result.inputs;
      const Status given = run.give(static_cast<InputKind>(input.from), *words, input.a, input.b);
      if (!given && given.error().code == Code::kCorruption) return given.error();
      published.clear();
      reader.read(published, true);
      for (const Event& event : published) {
        if (at == events.size()) return result;
        if (events[at] != event) {
          result.difference = {at, events[at], event};
          return result;
        }
        ++at;
        ++result.events;
      }
    }
    return result;
  });
}

}  // namespace torpor::console
