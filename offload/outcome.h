// SPDX-License-Identifier: Apache-2.0
// The outcome of moving a chunk or a block. Each chunk or block that enters a pipeline or the transfer engine ends with
// exactly one outcome, and is counted by it (I6). Values.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace torpor {

enum class BlockOutcome : uint8_t {
  kTransferred,  // proven, and visible in the target store
  kPresent,      // the target had it already, or it was on its way
  kFiltered,     // a policy excluded it
  kPolicyTimeout,
  kCancelled,  // before a byte of it moved
  kPreconditionFailed,
  kEvicted,  // its source was evicted before it could be held
  kNoRoom,   // the target store is full
  kQueueFull,
  kDegraded,  // the target store accepts nothing for now: its medium failed
  kFailed,    // the copy failed, and is proven finished
  kUnproven,  // the copy may still be running; both sides are quarantined
  kShutDown,
  kDamaged,  // the stored bytes of a load are gone or changed: a miss from now on
  kAbsent,   // looked up, and not there
};
inline constexpr int kBlockOutcomes = 15;
std::string_view name(BlockOutcome outcome);  // "transferred", "present", …

using OutcomeCounts = std::array<uint64_t, kBlockOutcomes>;  // by BlockOutcome

}  // namespace torpor
