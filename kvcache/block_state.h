// SPDX-License-Identifier: Apache-2.0
// The states of a KV block and every transition between them.
//
//   Empty -> Partial -> ReadyForScheduling -> Inflight -> Partial (not full) or Complete -> Registered -> Empty
//
// Only the owner of a block moves it (kvcache/block_pool.h). A transition that is not in the table is an error (I1).
// The device may write to a block that is Inflight: only the end of that work takes it out of this state (I3). The
// states are those of the block manager of NVIDIA Dynamo (https://github.com/ai-dynamo/dynamo, lib/llm).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace torpor {

enum class BlockState : uint8_t { kEmpty, kPartial, kReadyForScheduling, kInflight, kComplete, kRegistered };
inline constexpr int kBlockStates = 6;

enum class BlockTrigger : uint8_t {
  kInitialize,     // its position in a sequence is known: salt, parent
  kAddTokens,      // more tokens follow before it is computed
  kAddLastTokens,  // these tokens are computed now
  kScheduleCompute,
  kCancelSchedule,
  kComputeDone,  // the block is not full
  kComputeDoneFull,
  kRegister,
  kReset,  // by its owner, or by an eviction
};
inline constexpr int kBlockTriggers = 9;

// Why a block can no longer be found.
enum class DropReason : uint8_t { kEvicted, kCleared, kDiscarded, kRenamed };
inline constexpr int kDropReasons = 4;

std::string_view name(DropReason reason);     // "evicted", "cleared", …
std::string_view name(BlockState state);      // "empty", "partial", "ready for scheduling", …
std::string_view name(BlockTrigger trigger);  // "initialize", "add tokens", …

// Return the next state; no value if the transition is not allowed.
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
