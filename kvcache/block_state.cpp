// SPDX-License-Identifier: Apache-2.0
#include "kvcache/block_state.h"

namespace torpor {

std::string_view name(BlockState state) {
  switch (state) {
    case BlockState::kEmpty: return "empty";
    case BlockState::kPartial: return "partial";
    case BlockState::kReadyForScheduling: return "ready for scheduling";
    case BlockState::kInflight: return "in flight";
    case BlockState::kComplete: return "complete";
    case BlockState::kRegistered: return "registered";
  }
  return "empty";
}

std::string_view name(DropReason reason) {
  switch (reason) {
    case DropReason::kEvicted: return "evicted";
    case DropReason::kCleared: return "cleared";
    case DropReason::kDiscarded: return "discarded";
    case DropReason::kRenamed: return "renamed";
  }
  return "evicted";
}

std::string_view name(BlockTrigger trigger) {
  switch (trigger) {
    case BlockTrigger::kInitialize: return "initialize";
    case BlockTrigger::kAddTokens:
    case BlockTrigger::kAddLastTokens: return "add tokens";
    case BlockTrigger::kScheduleCompute: return "schedule compute";
    case BlockTrigger::kCancelSchedule: return "cancel schedule";
    case BlockTrigger::kComputeDone:
    case BlockTrigger::kComputeDoneFull: return "compute done";
    case BlockTrigger::kRegister: return "register";
    case BlockTrigger::kReset: return "reset";
  }
  return "reset";
}

}  // namespace torpor
