// SPDX-License-Identifier: Apache-2.0
// The states of a request as it is served, and every transition between them.
//
//   Initialized -> Onboard staged -> Onboarding -> Prefilling -> Decoding -> Finishing -> Finished
//
// Skipped: scheduled before, but not in this step. Preempted: it lost its device blocks and kept its tokens. Onboarding
// ends when the request is scheduled; if its load failed, it is Initialized again. Finishing waits for copies that can
// still read or write its blocks. The states are those of the KVBM connector of NVIDIA Dynamo.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace torpor {

enum class SlotState : uint8_t {
  kNone,
  kInitialized,
  kOnboardStaged,
  kOnboarding,
  kPrefilling,
  kSkippedPrefill,
  kDecoding,
  kSkippedDecode,
  kPreempted,
  kFinishing,
  kFinished,
};
inline constexpr int kSlotStates = 11;

enum class SlotTrigger : uint8_t {
  kCreate,
  kStage,          // blocks of lower tiers were found and are kept
  kGiveBack,       // they are no longer kept
  kOnboard,        // they are being loaded
  kOnboardFailed,  // blocks that were not loaded are computed
  kPrefill,        // scheduled: computes more than the newest token
  kDecode,         // scheduled: computes the newest token
  kSkip,
  kPreempt,
  kFinish,  // committed copies are still under way
  kEnd,     // no copy is under way
};
inline constexpr int kSlotTriggers = 11;

std::string_view name(SlotState state);      // "initialized", "onboard staged", …
std::string_view name(SlotTrigger trigger);  // "create", "stage", …

// Return the next state; no value if the transition is not allowed. kSkip changes nothing for a request that is not
// running.
constexpr std::optional<SlotState> next_state(SlotState state, SlotTrigger trigger) {
  using enum SlotState;
  using enum SlotTrigger;
  const bool waits = state == kInitialized || state == kPreempted;
  const bool runs = state == kPrefilling || state == kDecoding || state == kSkippedPrefill || state == kSkippedDecode;
  const auto only = [](bool allowed, SlotState to) { return allowed ? std::optional(to) : std::nullopt; };
  switch (trigger) {
    case kCreate: return only(state == kNone, kInitialized);
    case kStage: return only(waits || state == kOnboardStaged, kOnboardStaged);
    case kGiveBack: return only(state == kOnboardStaged, kInitialized);
    case kOnboard: return only(state == kOnboardStaged, kOnboarding);
    case kOnboardFailed: return only(state == kOnboarding, kInitialized);
    case kPrefill: return only(waits || runs || state == kOnboardStaged || state == kOnboarding, kPrefilling);
    case kDecode: return only(waits || runs || state == kOnboardStaged || state == kOnboarding, kDecoding);
    case kSkip:
      if (state == kPrefilling) return kSkippedPrefill;
      if (state == kDecoding) return kSkippedDecode;
      return only(state != kNone && state != kFinished, state);
    case kPreempt: return only(runs || state == kOnboarding, kPreempted);
    case kFinish: return only(state != kNone && state < kFinishing, kFinishing);
    case kEnd: return only(state != kNone && state != kFinished, kFinished);
  }
  return std::nullopt;
}

}  // namespace torpor
