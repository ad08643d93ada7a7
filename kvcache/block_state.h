// SPDX-License-Identifier: Apache-2.0
// The states of a KV block and every transition between them.
//
//   Empty -> Partial -> ReadyForScheduling -> Inflight -> Partial (room is left) or Complete -> Registered -> Empty
//
// Only the owner of a block moves it (kvcache/block_pool.h). A transition that is not in the table is an error value
// (I1). A block that is Inflight may be written by the device: nothing but the end of that work takes it out of this
// state (I3). Source of the states: the block manager of NVIDIA Dynamo (https://github.com/ai-dynamo/dynamo, lib/llm).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace torpor {

enum class BlockState : uint8_t { kEmpty, kPartial, kReadyForScheduling, kInflight, kComplete, kRegistered };
inline constexpr int kBlockStates = 6;

enum class BlockTrigger : uint8_t {
  kInitialize,     // its place in a sequence is known: salt, parent
  kAddTokens,      // and more will come before it is computed
  kAddLastTokens,  // these are to be computed now
  kScheduleCompute,
  kCancelSchedule,
  kComputeDone,  // room is left
  kComputeDoneFull,
  kRegister,
  kReset,  // by its owner, or by eviction
};
inline constexpr int kBlockTriggers = 9;

// Why a block is not found any more.
enum class DropReason : uint8_t { kEvicted, kCleared, kDiscarded, kRenamed };
inline constexpr int kDropReasons = 4;

std::string_view name(DropReason reason);     // "evicted", "cleared", …
std::string_view name(BlockState state);      // "empty", "partial", "ready for scheduling", …
std::string_view name(BlockTrigger trigger);  // "initialize", "add tokens", …

// The state that follows, or no value where the trigger is not allowed.
constexpr std::optional<BlockState> next_state(BlockState state, BlockTrigger trigger) {
  using enum BlockState;
  using enum BlockTrigger;
  switch (trigger) {
    case kInitialize: return state == kEmpty ? std::optional(kPartial) : std::nullopt;
    case kAddTokens: return state == kPartial ? std::optional(kPartial) : std::nullopt;
    case kAddLastTokens: return state == kPartial ? std::optional(kReadyForScheduling) : std::nullopt;
    case kScheduleCompute: return state == kReadyForScheduling ? std::optional(kInflight) : std::nullopt;
    case kCancelSchedule: return state == kReadyForScheduling ? std::optional(kPartial) : std::nullopt;
    case kComputeDone: return state == kInflight ? std::optional(kPartial) : std::nullopt;
    case kComputeDoneFull: return state == kInflight ? std::optional(kComplete) : std::nullopt;
    case kRegister: return state == kComplete ? std::optional(kRegistered) : std::nullopt;
    case kReset: return state == kInflight ? std::nullopt : std::optional(kEmpty);
  }
  return std::nullopt;
}

}  // namespace torpor
