// SPDX-License-Identifier: Apache-2.0
#include "kvcache/slot_table.h"

#include <algorithm>
#include <array>

#include <fmt/core.h>

namespace torpor {

std::string_view name(SlotState state) {
  constexpr std::array<std::string_view, kSlotStates> kNames = {
      "none",     "initialized",    "onboard staged", "onboarding", "prefilling", "skipped prefill",
      "decoding", "skipped decode", "preempted",      "finishing",  "finished"};
  return kNames[static_cast<size_t>(state)];
}

std::string_view name(SlotTrigger trigger) {
  constexpr std::array<std::string_view, kSlotTriggers> kNames = {"create",          "stage",   "give back", "onboard",
                                                                  "fail to onboard", "prefill", "decode",    "skip",
                                                                  "preempt",         "finish",  "end"};
  return kNames[static_cast<size_t>(trigger)];
}

Result<uint32_t> SlotTable::create(std::string id, int64_t tokens) {
  if (tokens < 1 || id.empty()) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("request \"{}\" has {} tokens", id, tokens),
                 .next_step = "give it an id and a prompt"};
  }
  uint32_t slot = static_cast<uint32_t>(slots_.size());
  if (free_.empty()) {
    slots_.emplace_back();
    free_.reserve(slots_.size());
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  slots_[slot] = {.info = {.id = std::move(id), .tokens = tokens}};
  port_.text(TextKind::kRequestName, slot + 1, 0, slots_[slot].info.id);
  (void)port_.record({.type = EventType::kRequest, .request = slot + 1, .a = static_cast<uint64_t>(tokens)});
  TORPOR_RETURN_IF_ERROR(move(slot, SlotTrigger::kCreate));
  return slot;
}

bool SlotTable::may_admit(uint32_t slot) const {
  if (!port_.holds() || !known(slot)) return true;
  return port_.may_go({.type = EventType::kRequest,
                       .request = slot + 1,
                       .a = static_cast<uint64_t>(std::max<int64_t>(slots_[slot].info.tokens, 0))});
}

Status SlotTable::known(uint32_t slot) const {
  if (slot < slots_.size() && !slots_[slot].info.id.empty()) return ok();
  return try_catch([&]() -> Status {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("there is no slot {}", slot),
                 .next_step = "this is a mistake in the calling code"};
  });
}

Status SlotTable::move(uint32_t slot, SlotTrigger trigger) {
  TORPOR_RETURN_IF_ERROR(known(slot));
  SlotInfo& info = slots_[slot].info;
  const std::optional<SlotState> next = next_state(info.state, trigger);
  if (!next) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("request {} is {}: it cannot {}", info.id, name(info.state), name(trigger)),
                 .next_step = "this is a mistake in the calling code"};
  }
  const SlotState from = std::exchange(info.state, *next);
  if (from != *next) publish(slot, from);
  return ok();
}

void SlotTable::publish(uint32_t slot, SlotState from) {
  Slot& of = slots_[slot];
  of.published_tokens = of.info.computed_tokens;
  (void)port_.record(
      {.type = EventType::kSlot,
       .from = static_cast<uint8_t>(from),
       .to = static_cast<uint8_t>(of.info.state),
       .request = slot + 1,
       .a = both(static_cast<uint64_t>(of.info.computed_tokens), static_cast<uint64_t>(of.info.tokens)),
       .b = both(static_cast<uint64_t>(of.info.device_blocks), static_cast<uint64_t>(of.info.staged_blocks))});
}

Status SlotTable::stage(uint32_t slot, int32_t blocks) {
  TORPOR_RETURN_IF_ERROR(known(slot));
  SlotInfo& info = slots_[slot].info;
  if (blocks == 0 && info.state != SlotState::kOnboardStaged) return ok();
  const int32_t before = std::exchange(info.staged_blocks, blocks);
  const Status moved = move(slot, blocks > 0 ? SlotTrigger::kStage : SlotTrigger::kGiveBack);
  if (!moved) info.staged_blocks = before;
  return moved;
}

Status SlotTable::onboard(uint32_t slot, int32_t device_blocks) {
  TORPOR_RETURN_IF_ERROR(known(slot));
  if (slots_[slot].info.state == SlotState::kOnboardStaged) slots_[slot].info.device_blocks = device_blocks;
  return move(slot, SlotTrigger::kOnboard);
}

Status SlotTable::onboard_failed(uint32_t slot) {
  TORPOR_RETURN_IF_ERROR(known(slot));
  if (slots_[slot].info.state == SlotState::kOnboarding) slots_[slot].info.staged_blocks = 0;
  return move(slot, SlotTrigger::kOnboardFailed);
}

Status SlotTable::scheduled(uint32_t slot, int64_t computed, int64_t now, int64_t tokens, int32_t device_blocks) {
  TORPOR_RETURN_IF_ERROR(known(slot));
  Slot& of = slots_[slot];
  const SlotTrigger trigger = tokens - computed > 1 ? SlotTrigger::kPrefill : SlotTrigger::kDecode;
  if (next_state(of.info.state, trigger)) {
    of.info.computed_tokens = computed + now;
    of.info.tokens = tokens;
    of.info.device_blocks = device_blocks;
    of.info.staged_blocks = 0;
  }
  TORPOR_RETURN_IF_ERROR(move(slot, trigger));
  if (of.info.computed_tokens - of.published_tokens >= kPublishedEvery) publish(slot, of.info.state);
  return ok();
}

Status SlotTable::preempt(uint32_t slot) {
  TORPOR_RETURN_IF_ERROR(known(slot));
  SlotInfo& info = slots_[slot].info;
  if (next_state(info.state, SlotTrigger::kPreempt)) info.computed_tokens = info.device_blocks = info.staged_blocks = 0;
  return move(slot, SlotTrigger::kPreempt);
}

Status SlotTable::keys(uint32_t slot, std::span<const std::string_view> keys, size_t first, KeyOf what) {
  TORPOR_RETURN_IF_ERROR(known(slot));
  for (size_t at = 0; at < keys.size(); ++at) {
    Event event{.type = EventType::kKey,
                .to = static_cast<uint8_t>(what),
                .request = slot + 1,
                .a = first + at,
                .b = first + keys.size()};
    std::copy_n(keys[at].begin(), std::min(keys[at].size(), event.key.bytes.size()), event.key.bytes.begin());
    (void)port_.record(event);
  }
  return ok();
}

Status SlotTable::finish(uint32_t slot, bool busy) {
  TORPOR_RETURN_IF_ERROR(move(slot, busy ? SlotTrigger::kFinish : SlotTrigger::kEnd));
  if (busy) return ok();
  slots_[slot].info = {};
  free_.push_back(slot);
  return ok();
}

void SlotTable::step(int32_t running, int32_t waiting, int64_t tokens, int64_t nanoseconds) {
  (void)port_.record({.type = EventType::kStep,
                      .a = both(static_cast<uint64_t>(running), static_cast<uint64_t>(waiting)),
                      .b = both(static_cast<uint64_t>(tokens), static_cast<uint64_t>(nanoseconds / 1000))});
  if (port_.half_gone(published_)) publish_all();
}

void SlotTable::publish_all() {
  published_ = port_.last_sequence();
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].info.state == SlotState::kNone) continue;
    port_.text(TextKind::kRequestName, slot + 1, 0, slots_[slot].info.id);
    publish(slot, slots_[slot].info.state);
  }
}

}  // namespace torpor
