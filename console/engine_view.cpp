// SPDX-License-Identifier: Apache-2.0
#include "console/engine_view.h"

#include <algorithm>

#include "console/breakpoints.h"
#include "console/schema.h"
#include "engine/phases.h"
#include "kvcache/block_state.h"

namespace torpor::console {
namespace {

constexpr size_t kMostRanks = 4096;
constexpr size_t kMostTags = 1024;     // of a rank
constexpr size_t kMostRows = 1 << 20;  // of slots or candidates; no engine has more

}  // namespace

std::string_view EngineView::engine() const { return engine_ ? kEngineStates[*engine_] : std::string_view(); }

// A background checkpoint leaves the engine awake except for a stop in its middle. A checkpoint that stops the engine
// records that it falls asleep as it begins (engine/background_events.h).
std::optional<int64_t> EngineView::stands_since(const OperationRow& row) const {
  if (kOperationNames[row.kind] != "checkpoint") return row.began;
  if (!engine_ || *engine_ == 0) return std::nullopt;
  return std::max(row.began, engine_since_);
}

void EngineView::apply(const Event& event) {
  if (!is_known(event)) {
    ++unknown_;
    return;
  }
  if (event.type != EventType::kLost) latest_ = std::max(latest_, event.time);
  switch (event.type) {
    case EventType::kText:
      if (const std::optional<EventText> text = texts_.add(event); text && text->kind == TextKind::kError) {
        for (OperationRow& row : operations_) {
          if (row.number == text->transfer) row.error = text->words;
        }
      }
      break;
    case EventType::kLost: lost_ += event.b; break;
    case EventType::kStep:
      ++steps_;
      running_ = high_of(event.a);
      waiting_ = low_of(event.a);
      step_microseconds_ = low_of(event.b);
      break;
    case EventType::kRequest: break;
    case EventType::kSlot: apply_slot(event); break;
    case EventType::kHit: apply_hit(event); break;
    case EventType::kCandidate: apply_candidate(event); break;
    case EventType::kEnded:
      if (event.transfer >> 48 < kWays) ended_[event.transfer >> 48][event.to] += event.a;
      break;
    case EventType::kRegistered: registered_[event.from] += event.key == Digest{} ? low_of(event.a) : 1; break;
    case EventType::kDropped: dropped_[event.from][event.to] += event.key == Digest{} ? event.a : 1; break;
    case EventType::kCopy: apply_copy(event); break;
    case EventType::kTier:
      tiers_[event.from] = {high_of(event.a), low_of(event.a), high_of(event.b), low_of(event.b)};
      break;
    case EventType::kOperation: apply_operation(event); break;
    case EventType::kPhase: apply_phase(event); break;
    case EventType::kEngine:
      engine_ = event.to;
      engine_since_ = event.time;
      break;
    case EventType::kStop: apply_stop(event); break;
    case EventType::kMemory: apply_memory(event); break;
    case EventType::kPlanned:
    case EventType::kBlock:
    case EventType::kControl:
    case EventType::kKey:
    case EventType::kCached:
    case EventType::kInput: break;
  }
}

void EngineView::apply_slot(const Event& event) {
  const auto state = static_cast<SlotState>(event.to);
  if (state == SlotState::kFinished || state == SlotState::kNone) {
    slots_.erase(event.request);
    return;
  }
  if (slots_.size() >= kMostRows) slots_.clear();
  auto [at, made] = slots_.try_emplace(event.request);
  SlotRow& row = at->second;
  if (state == SlotState::kInitialized && event.from == 0) row = {};
  if (made || row.began == 0) row.began = event.time;
  if (row.state != state) row.since = event.time;
  row.state = state;
  row.computed_tokens = high_of(event.a);
  row.tokens = low_of(event.a);
  row.device_blocks = high_of(event.b);
  row.staged_blocks = low_of(event.b);
}

// A scheduler of offloading has request numbers of its own, so the name identifies the request.
void EngineView::apply_hit(const Event& event) {
  const std::string name = texts_.request(event.request);
  for (auto& [number, row] : slots_) {
    if (number != event.request && texts_.request(number) != name) continue;
    row.asked_blocks = event.a;
    row.host_blocks = high_of(event.b);
    row.disk_blocks = low_of(event.b);
    return;
  }
}

void EngineView::apply_candidate(const Event& event) {
  const auto state = static_cast<CandidateState>(event.to);
  if (event.transfer >> 48 >= kWays) {
    ++unknown_;
    return;
  }
  if (state == CandidateState::kCompleted || state == CandidateState::kSkipped) {
    candidates_.erase(event.transfer);
    return;
  }
  if (candidates_.size() >= kMostRows) candidates_.clear();
  candidates_[event.transfer] = {state, event.a, event.time, event.request};
}

void EngineView::apply_copy(const Event& event) {
  if (event.request >= lanes_.size()) {
    ++unknown_;
    return;
  }
  LaneRow& row = lanes_[event.request][event.from];
  const auto edge = static_cast<Edge>(event.to);
  if (edge == Edge::kBegin) {
    ++row.under_way;
    return;
  }
  if (row.under_way > 0) --row.under_way;
  last_copy_ = std::max(last_copy_, event.time);
  ++row.batches;
  row.failed += edge == Edge::kFailed ? 1 : 0;
  row.unproven += edge == Edge::kUnproven ? 1 : 0;
  row.bytes += event.a;
  row.nanoseconds += event.b;
}

// Return the row of an operation. If it is unknown, its begin was lost.
OperationRow& EngineView::operation(uint64_t number, const Event& event) {
  for (OperationRow& row : operations_) {
    if (row.number == number) return row;
  }
  if (operations_.size() >= kOperations) operations_.erase(operations_.begin());
  return operations_.emplace_back(OperationRow{.number = number, .began = event.time});
}

void EngineView::apply_operation(const Event& event) {
  const auto edge = static_cast<Edge>(event.to);
  OperationRow& row = operation(edge == Edge::kBegin ? event.sequence : event.transfer, event);
  row.kind = event.from;
  row.edge = edge;
  row.nanoseconds = event.b;
}

void EngineView::apply_phase(const Event& event) {
  OperationRow& row = operation(event.transfer, event);
  const auto edge = static_cast<Edge>(event.to);
  if (edge == Edge::kBegin) {
    if (row.phases.size() < 256) row.phases.push_back({.kind = event.from, .began = event.time});
    return;
  }
  // The last phase of this kind that this event can end.
  const auto found = std::find_if(row.phases.rbegin(), row.phases.rend(), [&](const PhaseRow& phase) {
    return phase.kind == event.from &&
           (phase.edge == Edge::kBegin || (edge == Edge::kUndone && phase.edge == Edge::kEnd));
  });
  if (found == row.phases.rend()) return;
  found->edge = edge;
  if (edge == Edge::kUndone) return;
  found->bytes = event.a;
  found->nanoseconds = event.b;
}

void EngineView::apply_stop(const Event& event) {
  if (static_cast<StopEdge>(event.to) != StopEdge::kBegun) {
    stops_.erase(event.transfer);
    return;
  }
  if (stops_.size() >= kMostRows) stops_.clear();
  stops_[event.transfer] = {event.from, event.a, event.request, event.time};
}

void EngineView::apply_memory(const Event& event) {
  const auto part = static_cast<MemoryPart>(event.from);
  if (part == MemoryPart::kDevice) {  // the events that follow describe everything again
    if (memory_.size() >= kMostRanks) memory_.clear();
    memory_[event.transfer] = {.device_bytes = event.a, .device_capacity = event.b};
    return;
  }
  const auto found = memory_.find(event.transfer);
  if (found == memory_.end()) return;  // its begin was lost
  MemoryRow& row = found->second;
  switch (part) {
    case MemoryPart::kAnybody: row.anybody_bytes = event.a; break;
    case MemoryPart::kArena:
      row.arena_bytes = event.a;
      row.arena_budget = event.b;
      break;
    case MemoryPart::kArenaHeld: row.arena_held = event.a; break;
    case MemoryPart::kTag: {
      if (row.tags.size() >= kMostTags) break;
      MemoryRow::Tag& tag = row.tags[event.request];
      tag.name = texts_.tag(event.request);
      tag.bytes[event.to] = event.a;
      if (event.to == 0) tag.region_bytes = event.b;
      break;
    }
    default: break;
  }
}

}  // namespace torpor::console
