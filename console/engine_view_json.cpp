// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "console/breakpoints.h"
#include "console/engine_view.h"
#include "console/schema.h"
#include "console/waits.h"
#include "engine/phases.h"
#include "kvcache/block_state.h"

namespace torpor::console {
namespace {

constexpr std::array<std::string_view, 2> kLaneNames = {"memory", "disk"};
constexpr std::array<std::string_view, 4> kJobs = {"save", "restore", "digest", "move"};
constexpr std::array<std::string_view, 3> kTiers = {"device", "host", "disk"};
constexpr std::array<std::string_view, kEdges> kRowStates = {"",         "running", "done",         "failed",
                                                             "unproven", "undone",  "unrecoverable"};

nlohmann::ordered_json to_json(const OperationRow& row) {
  nlohmann::ordered_json phases = nlohmann::ordered_json::array();
  for (const PhaseRow& phase : row.phases)
    phases.push_back({{"phase", kPhaseNames[phase.kind]},
                      {"state", kRowStates[static_cast<size_t>(phase.edge)]},
                      {"bytes", phase.bytes},
                      {"after_seconds", static_cast<double>(std::max<int64_t>(phase.began - row.began, 0)) * 1e-9},
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

// Return what became available in a tier and what no longer is.
nlohmann::ordered_json EngineView::blocks_of(size_t tier) const {
  nlohmann::ordered_json dropped = nlohmann::ordered_json::object();
  for (size_t i = 0; i < dropped_[tier].size(); ++i)
    dropped[std::string(name(static_cast<DropReason>(i)))] = dropped_[tier][i];
  return {{"registered", registered_[tier]}, {"dropped", std::move(dropped)}};
}

nlohmann::ordered_json EngineView::to_json() const {
  using Json = nlohmann::ordered_json;
  const auto age = [&](int64_t since) { return static_cast<double>(within(latest_) - within(since)) * 1e-9; };
  const Waits waits(*this);
  Json slots = Json::array();
  for (const auto& [number, row] : slots_)
    slots.push_back({{"slot", number - 1},
                     {"request", texts_.request(number)},
                     {"state", name(row.state)},
                     {"seconds_in_state", age(row.since)},
                     {"seconds", age(row.began)},
                     {"waiting_for", waits.of(number)},
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
