// SPDX-License-Identifier: Apache-2.0
// What became of a chunk or block that was to be moved. Each that is given to a pipeline or to the transfer engine ends
// as exactly one of these, and is counted (I6).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace torpor {

enum class BlockOutcome : uint8_t {
  kTransferred,  // proven, and visible in the target store
  kPresent,      // it was there already, or on its way
  kFiltered,     // a policy said no
  kPolicyTimeout,
  kCancelled,  // before a byte of it moved
  kPreconditionFailed,
  kEvicted,  // its source was gone when it was to be kept
  kNoRoom,   // the target store has no room
  kQueueFull,
  kDegraded,  // the target store takes nothing for now: its medium failed
  kFailed,    // the copy failed, and is proven over
  kUnproven,  // the copy may still be running; both sides are quarantined
  kShutDown,
  kDamaged,  // what was to come up is not there any more as it was stored: a miss from now on
  kAbsent,   // it was asked for, and is not there
};
inline constexpr int kBlockOutcomes = 15;
std::string_view name(BlockOutcome outcome);  // "transferred", "present", …

using OutcomeCounts = std::array<uint64_t, kBlockOutcomes>;  // by BlockOutcome

}  // namespace torpor
