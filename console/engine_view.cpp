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
constexpr size_t kMostRows = 1 << 20;  // of slots or candidates: more there never are
constexpr std::array<std::string_view, 2> kLaneNames = {"memory", "disk"};
constexpr std::array<std::string_view, 4> kJobs = {"save", "restore", "digest", "move"};
constexpr std::array<std::string_view, 3> kTiers = {"device", "host", "disk"};
constexpr std::array<std::string_view, kEdges> kRowStates = {"",         "running", "done", "failed",
                                                             "unproven", "undone",  "lost"};

nlohmann::ordered_json to_json(const OperationRow& row) {
  nlohmann::ordered_json phases = nlohmann::ordered_json::array();
  for (const PhaseRow& phase : row.phases)
    phases.push_back({{"phase", kPhaseNames[phase.kind]},
                      {"state", kRowStates[static_cast<size_t>(phase.edge)]},
                      {"bytes", phase.bytes},
                      {"seconds", static_cast<double>(phase.nanoseconds) * 1e-9}});
  return {{"number", row.number},
          {"operation", kOperationNames[row.kind]},
          {"state", kRowStates[static_cast<size_t>(row.edge)]},
          {"seconds", static_cast<double>(row.nanoseconds) * 1e-9},
          {"phases", std::move(phases)},
          {"error", row.error}};
}

nlohmann::ordered_json to_json(uint64_t rank, const MemoryRow& row) {
  nlohmann::ordered_json tags = nlohmann::ordered_json::array();
  for (const auto& [number, tag] : row.tags)
    tags.push_back({{"tag", tag.name},
                    {"device_bytes", tag.bytes[0]},
                    {"region_bytes", tag.region_bytes},
                    {"host_bytes", tag.bytes[1]},
                    {"disk_bytes", tag.bytes[2]}});
  return {{"rank", rank},
          {"device_bytes", row.device_bytes},
          {"device_capacity_bytes", row.device_capacity},
          {"device_bytes_of_anybody", row.anybody_bytes},
          {"arena_bytes", row.arena_bytes},
          {"arena_budget_bytes", row.arena_budget},
          {"arena_held_bytes", row.arena_held},
          {"tags", std::move(tags)}};
}

}  // namespace

std::string_view EngineView::engine() const { return engine_ ? kEngineStates[*engine_] : std::string_view(); }

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
    case EventType::kEngine: engine_ = event.to; break;
    case EventType::kStop: apply_stop(event); break;
    case EventType::kMemory: apply_memory(event); break;
    case EventType::kPlanned:
    case EventType::kBlock:
    case EventType::kControl:
    case EventType::kKey:
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

// A scheduler of offloading has numbers of its own: it is the request of the same name.
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
  ++row.batches;
  row.failed += edge == Edge::kFailed ? 1 : 0;
  row.unproven += edge == Edge::kUnproven ? 1 : 0;
  row.bytes += event.a;
  row.nanoseconds += event.b;
}

// The begin of one that is not known was lost.
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
  // The last one of this kind that can still go there.
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
  if (part == MemoryPart::kDevice) {  // all that follows is told anew
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

// What became findable in a tier and what no longer is.
nlohmann::ordered_json EngineView::blocks_of(size_t tier) const {
  nlohmann::ordered_json dropped = nlohmann::ordered_json::object();
  for (size_t i = 0; i < dropped_[tier].size(); ++i)
    dropped[std::string(name(static_cast<DropReason>(i)))] = dropped_[tier][i];
  return {{"registered", registered_[tier]}, {"dropped", std::move(dropped)}};
}

nlohmann::ordered_json EngineView::to_json() const {
  using Json = nlohmann::ordered_json;
  const auto age = [&](int64_t since) { return static_cast<double>(within(latest_) - within(since)) * 1e-9; };
  Json slots = Json::array();
  for (const auto& [number, row] : slots_)
    slots.push_back({{"slot", number - 1},
                     {"request", texts_.request(number)},
                     {"state", name(row.state)},
                     {"seconds_in_state", age(row.since)},
                     {"seconds", age(row.began)},
                     {"computed_tokens", row.computed_tokens},
                     {"tokens", row.tokens},
                     {"device_blocks", row.device_blocks},
                     {"staged_blocks", row.staged_blocks},
                     {"asked_blocks", row.asked_blocks},
                     {"host_hit_blocks", row.host_blocks},
                     {"disk_hit_blocks", row.disk_blocks}});
  Json transfers = Json::array();
  for (int way = 0; way < kWays; ++way) {
    Json now = Json::object();
    double oldest = 0;
    std::array<uint64_t, kCandidateStates> blocks{};
    for (const auto& [transfer, row] : candidates_) {
      if (transfer >> 48 != static_cast<uint64_t>(way)) continue;
      blocks[static_cast<size_t>(row.state)] += row.blocks;
      oldest = std::max(oldest, age(row.since));
    }
    for (const CandidateState state : {CandidateState::kWaiting, CandidateState::kQueued, CandidateState::kPromoted})
      now[std::string(name(state))] = blocks[static_cast<size_t>(state)];
    Json outcomes = Json::object();
    for (int i = 0; i < kBlockOutcomes; ++i) {
      if (const uint64_t count = ended_[static_cast<size_t>(way)][static_cast<size_t>(i)]; count > 0)
        outcomes[std::string(name(static_cast<BlockOutcome>(i)))] = count;
    }
    if (oldest == 0 && outcomes.empty()) continue;
    transfers.push_back({{"way", name(static_cast<Way>(way))},
                         {"blocks", std::move(now)},
                         {"oldest_seconds", oldest},
                         {"ended_blocks", std::move(outcomes)}});
  }
  Json copies = Json::array();
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    for (size_t kind = 0; kind < lanes_[lane].size(); ++kind) {
      const LaneRow& row = lanes_[lane][kind];
      if (row.batches + row.under_way == 0) continue;
      copies.push_back({{"lane", kLaneNames[lane]},
                        {"job", kJobs[kind]},
                        {"under_way", row.under_way},
                        {"batches", row.batches},
                        {"failed", row.failed},
                        {"unproven", row.unproven},
                        {"bytes", row.bytes},
                        {"batch_seconds", static_cast<double>(row.nanoseconds) * 1e-9}});
    }
  }
  Json tiers = Json::array();
  for (size_t i = 0; i < tiers_.size(); ++i) {
    if (const auto& row = tiers_[i])
      tiers.push_back({{"tier", kTiers[i]},
                       {"used_blocks", row->used},
                       {"pinned_blocks", row->pinned},
                       {"cached_blocks", row->cached},
                       {"empty_blocks", row->empty}});
  }
  Json memory = Json::array();
  for (const auto& [rank, row] : memory_) memory.push_back(console::to_json(rank, row));
  Json blocks = blocks_of(0);
  for (size_t i = 1; i < kTiers.size(); ++i) {
    if (registered_[i] > 0) blocks[std::string(kTiers[i])] = blocks_of(i);
  }
  Json operations = Json::array();
  for (const OperationRow& row : operations_) operations.push_back(console::to_json(row));
  Json stops = Json::array();
  for (const auto& [number, row] : stops_)
    stops.push_back({{"stop", number},
                     {"cause", name(static_cast<StopCause>(row.cause))},
                     {"event", row.event},
                     {"request", row.request == 0 ? Json() : Json(texts_.request(row.request))},
                     {"seconds", age(row.since)}});
  return {
      {"engine", engine_ ? Json(engine()) : Json()},
      {"steps", {{"seen", steps_}, {"running", running_}, {"waiting", waiting_}, {"microseconds", step_microseconds_}}},
      {"slots", std::move(slots)},
      {"transfers", std::move(transfers)},
      {"copies", std::move(copies)},
      {"tiers", std::move(tiers)},
      {"memory", std::move(memory)},
      {"blocks", std::move(blocks)},
      {"operations", std::move(operations)},
      {"stops", std::move(stops)},
      {"lost_events", lost_},
      {"unknown_events", unknown_}};
}

}  // namespace torpor::console
