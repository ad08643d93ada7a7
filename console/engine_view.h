// SPDX-License-Identifier: Apache-2.0
// EngineView: the current state of an engine, computed from its events. It works alike for a live engine, for the ring
// of a killed one and for a recording.
//
// It leaves out what it does not know. A view that began late learns each request when its slots are recorded again
// (kvcache/slot_table.h). Values of events are checked before use, because they may come from a damaged file. Times are
// those of the events, in nanoseconds.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/event_ring.h"
#include "console/event_text.h"
#include "kvcache/offload_queue.h"
#include "kvcache/slot_state.h"

namespace torpor::console {

struct SlotRow {
  SlotState state = SlotState::kNone;
  int64_t since = 0;  // in this state
  int64_t began = 0;
  uint32_t computed_tokens = 0;
  uint32_t tokens = 0;
  uint32_t device_blocks = 0;
  uint32_t staged_blocks = 0;
  uint64_t asked_blocks = 0;  // looked up in the tiers below, at the last lookup
  uint32_t host_blocks = 0;   // found of them
  uint32_t disk_blocks = 0;
};

struct CandidateRow {
  CandidateState state = CandidateState::kNone;
  uint64_t blocks = 0;
  int64_t since = 0;
  uint32_t request = 0;
};

struct LaneRow {  // one kind of job in one lane
  uint64_t under_way = 0;
  uint64_t batches = 0;
  uint64_t failed = 0;
  uint64_t unproven = 0;
  uint64_t bytes = 0;
  uint64_t nanoseconds = 0;  // sum over batches, some of which may have run at the same time
};

struct PhaseRow {
  uint8_t kind = 0;
  Edge edge = Edge::kBegin;
  uint64_t bytes = 0;
  uint64_t nanoseconds = 0;
  int64_t began = 0;
};
struct OperationRow {
  uint64_t number = 0;
  uint8_t kind = 0;
  Edge edge = Edge::kBegin;
  int64_t began = 0;
  uint64_t nanoseconds = 0;
  std::vector<PhaseRow> phases;
  std::string error;
};

struct TierRow {
  uint32_t used = 0;  // pinned ones, owned ones, and those never used again
  uint32_t pinned = 0;
  uint32_t cached = 0;
  uint32_t empty = 0;
};

// Memory of one rank, as recorded last.
struct MemoryRow {
  struct Tag {
    std::string name;
    std::array<uint64_t, 3> bytes{};  // in the device, in host memory, on disk
    uint64_t region_bytes = 0;        // in the device, when all of it is there
  };
  uint64_t device_bytes = 0;
  uint64_t device_capacity = 0;  // 0: no limit of its own
  uint64_t anybody_bytes = 0;    // used by any process, by the device's own count; 0: it has no count
  uint64_t arena_bytes = 0;
  uint64_t arena_budget = 0;  // 0: no limit
  uint64_t arena_held = 0;
  std::map<uint32_t, Tag> tags;
};

struct StandingRow {  // a stop
  uint8_t cause = 0;
  uint64_t event = 0;    // the event after which it stopped; 0: a pause
  uint32_t request = 0;  // of that event
  int64_t since = 0;
};

class EngineView {
 public:
  static constexpr size_t kOperations = 32;  // number of last operations that are kept
  void apply(const Event& event);

  const std::map<uint32_t, SlotRow>& slots() const { return slots_; }  // by the request's number
  std::string name_of(uint32_t request) const { return texts_.request(request); }
  // Return the names of requests by number, also of requests that have ended.
  const std::map<uint32_t, std::string>& names() const { return texts_.requests(); }
  const std::map<uint64_t, CandidateRow>& candidates() const { return candidates_; }      // that have not ended
  const OutcomeCounts& ended(Way way) const { return ended_[static_cast<size_t>(way)]; }  // blocks
  const std::vector<OperationRow>& operations() const { return operations_; }
  const std::map<uint64_t, StandingRow>& stops() const { return stops_; }         // by number
  const std::map<uint64_t, MemoryRow>& memory() const { return memory_; }         // by rank
  const std::optional<TierRow>& tier(size_t tier) const { return tiers_[tier]; }  // device, host memory, disk
  std::string_view engine() const;                                                // "": no event says it
  // Return since when the engine has been stopped for this operation; none: it serves while this checkpoint is written.
  std::optional<int64_t> stands_since(const OperationRow& row) const;
  int64_t last_copy() const { return last_copy_; }  // end of the last copy; 0: none
  uint64_t steps() const { return steps_; }
  uint64_t lost() const { return lost_; }
  uint64_t unknown() const { return unknown_; }  // events that make no sense here
  int64_t latest() const { return latest_; }
  nlohmann::ordered_json to_json() const;

 private:
  void apply_slot(const Event& event);
  void apply_hit(const Event& event);
  void apply_candidate(const Event& event);
  void apply_copy(const Event& event);
  void apply_operation(const Event& event);
  void apply_phase(const Event& event);
  void apply_stop(const Event& event);
  void apply_memory(const Event& event);
  nlohmann::ordered_json blocks_of(size_t tier) const;
  OperationRow& operation(uint64_t number, const Event& event);

  EventTexts texts_;
  std::map<uint32_t, SlotRow> slots_;
  std::map<uint64_t, CandidateRow> candidates_;
  std::array<OutcomeCounts, kWays> ended_{};
  std::array<std::array<LaneRow, 4>, 2> lanes_{};  // memory, disk; by JobKind
  std::array<std::optional<TierRow>, 3> tiers_;
  std::vector<OperationRow> operations_;
  std::map<uint64_t, StandingRow> stops_;
  std::map<uint64_t, MemoryRow> memory_;
  std::optional<uint8_t> engine_;
  int64_t engine_since_ = 0;
  int64_t last_copy_ = 0;
  std::array<uint64_t, 3> registered_{};  // by tier
  std::array<std::array<uint64_t, 4>, 3> dropped_{};
  uint64_t steps_ = 0;
  uint32_t running_ = 0;
  uint32_t waiting_ = 0;
  uint32_t step_microseconds_ = 0;
  uint64_t lost_ = 0;
  uint64_t unknown_ = 0;
  int64_t latest_ = 0;
};

}  // namespace torpor::console
