// SPDX-License-Identifier: Apache-2.0
#include "console/schema.h"

#include <vector>

#include "console/breakpoints.h"
#include "console/control_methods.h"
#include "console/input_kind.h"
#include "engine/phases.h"
#include "kvcache/block_state.h"
#include "kvcache/offload_queue.h"
#include "kvcache/slot_state.h"

namespace torpor::console {
namespace {

template <class Enum, size_t size>
std::array<std::string_view, size> names_of() {
  std::array<std::string_view, size> names;
  for (size_t i = 0; i < size; ++i) names[i] = name(static_cast<Enum>(i));
  return names;
}

constexpr std::array<std::string_view, kTextKinds> kTexts = {"request", "operation", "error", "input", "tag"};
constexpr std::array<std::string_view, kEdges> kEdgeNames = {"",         "begin",  "end",          "failed",
                                                             "unproven", "undone", "unrecoverable"};
constexpr std::array<std::string_view, 4> kJobNames = {"save", "restore", "digest", "move"};
constexpr std::array<std::string_view, 2> kKeysOf = {"prompt", "made"};
constexpr std::array<std::string_view, 3> kTierNames = {"device", "host", "disk"};

std::vector<EventSchema> make() {
  static const auto slots = names_of<SlotState, kSlotStates>();
  static const auto candidates = names_of<CandidateState, kCandidateStates>();
  static const auto outcomes = names_of<BlockOutcome, kBlockOutcomes>();
  static const auto drops = names_of<DropReason, kDropReasons>();
  static const auto blocks = names_of<BlockState, kBlockStates>();
  static const auto inputs = names_of<InputKind, kInputKinds>();
  static const auto causes = names_of<StopCause, kStopCauses>();
  static const auto stop_edges = names_of<StopEdge, kStopEdges>();
  std::vector<EventSchema> all(kEventTypes);
  const auto at = [&](EventType type) -> EventSchema& { return all[static_cast<size_t>(type)]; };
  at(EventType::kText) = {.name = "text", .from = kTexts, .transfer = "subject"};
  at(EventType::kLost) = {.name = "lost", .a = {"first"}, .b = {"count"}};
  at(EventType::kStep) = {.name = "step", .a = {"running", "waiting"}, .b = {"tokens", "microseconds"}};
  at(EventType::kRequest) = {.name = "request", .a = {"tokens"}};
  at(EventType::kSlot) = {.name = "slot",
                          .from = slots,
                          .to = slots,
                          .a = {"computed_tokens", "tokens"},
                          .b = {"device_blocks", "staged_blocks"}};
  at(EventType::kHit) = {.name = "hit", .a = {"asked_blocks"}, .b = {"host_blocks", "disk_blocks"}};
  at(EventType::kCandidate) = {
      .name = "candidate", .from = candidates, .to = candidates, .transfer = "candidate", .a = {"blocks"}};
  at(EventType::kPlanned) = {.name = "planned", .transfer = "candidate", .a = {"job"}, .b = {"blocks"}};
  at(EventType::kEnded) = {.name = "ended", .to = outcomes, .transfer = "candidate", .a = {"blocks"}};
  at(EventType::kRegistered) = {.name = "registered",
                                .from = kTierNames,
                                .transfer = "parent",
                                .key = "key",
                                .a = {"tokens", "block_or_blocks"},
                                .b = {"version_or_group"}};
  at(EventType::kDropped) = {.name = "dropped",
                             .from = kTierNames,
                             .to = drops,
                             .key = "key",
                             .a = {"block_or_blocks"},
                             .b = {"version_or_group"}};
  at(EventType::kBlock) = {
      .name = "block", .from = blocks, .to = blocks, .key = "key", .a = {"tier_number", "block"}, .b = {"generation"}};
  at(EventType::kCopy) = {.name = "copy",
                          .from = kJobNames,
                          .to = kEdgeNames,
                          .transfer = "job",
                          .a = {"chunks_or_bytes"},
                          .b = {"bytes_or_ns"}};
  at(EventType::kTier) = {.name = "tier",
                          .from = kTierNames,
                          .a = {"used_blocks", "pinned_blocks"},
                          .b = {"cached_blocks", "empty_blocks"}};
  at(EventType::kOperation) = {
      .name = "operation", .from = kOperationNames, .to = kEdgeNames, .transfer = "operation", .b = {"nanoseconds"}};
  at(EventType::kPhase) = {.name = "phase",
                           .from = kPhaseNames,
                           .to = kEdgeNames,
                           .transfer = "operation",
                           .a = {"bytes"},
                           .b = {"nanoseconds"}};
  at(EventType::kEngine) = {.name = "engine", .from = kEngineStates, .to = kEngineStates};
  at(EventType::kStop) = {
      .name = "stop", .from = causes, .to = stop_edges, .transfer = "stop", .a = {"event"}, .b = {"nanoseconds"}};
  at(EventType::kControl) = {
      .name = "control", .from = control_method_names(), .to = outcome_names(), .a = {"uid"}, .b = {"pid"}};
  at(EventType::kInput) = {.name = "input", .from = inputs, .transfer = "input", .a = {"a"}, .b = {"b"}};
  at(EventType::kMemory) = {
      .name = "memory", .from = kMemoryParts, .to = kTierNames, .transfer = "rank", .a = {"bytes"}, .b = {"of_bytes"}};
  at(EventType::kKey) = {.name = "key", .to = kKeysOf, .key = "key", .a = {"position"}, .b = {"of"}};
  at(EventType::kCached) = {.name = "cached",
                            .transfer = "other_tokens",
                            .a = {"device_tokens", "host_tokens"},
                            .b = {"disk_tokens", "kv_store_tokens"}};
  return all;
}

std::string_view name_in(std::span<const std::string_view> names, uint8_t value) {
  return value < names.size() ? names[value] : std::string_view();
}

}  // namespace

const EventSchema* schema_of(EventType type) {
  static const std::vector<EventSchema> all = make();
  const auto number = static_cast<size_t>(type);
  return number < all.size() && !all[number].name.empty() ? &all[number] : nullptr;
}

bool is_known(const Event& event) {
  const EventSchema* schema = schema_of(event.type);
  if (schema == nullptr) return false;
  if (event.type == EventType::kText) return (event.from & ~kLastPart) < kTextKinds;
  return (schema->from.empty() ? event.from == 0 : event.from < schema->from.size()) &&
         (schema->to.empty() ? event.to == 0 : event.to < schema->to.size());
}

bool names_a_request(const Event& event) {
  return event.request != 0 && event.type != EventType::kCopy && event.type != EventType::kMemory;
}

std::string_view from_name(const Event& event) {
  const EventSchema* schema = schema_of(event.type);
  if (schema == nullptr) return {};
  return name_in(schema->from, event.type == EventType::kText ? event.from & ~kLastPart : event.from);
}

std::string_view to_name(const Event& event) {
  const EventSchema* schema = schema_of(event.type);
  return schema == nullptr ? std::string_view() : name_in(schema->to, event.to);
}

}  // namespace torpor::console
