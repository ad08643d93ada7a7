// SPDX-License-Identifier: Apache-2.0
// The states of a request as it is served, and every transition between them.
//
//   Initialized -> Onboard staged -> Onboarding -> Prefilling -> Decoding -> Finishing -> Finished
//
// Skipped: not scheduled in this step though it was before. Preempted: its device blocks went, its tokens stay.
// Onboarding ends where its request is scheduled, is Initialized again when its load failed, and Finishing waits for
// copies that can still read or write its blocks. Source of the states: the KVBM connector of NVIDIA Dynamo.
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
  kStage,          // blocks of tiers below were found and are kept
  kGiveBack,       // and are not any more
  kOnboard,        // they are on their way up
  kOnboardFailed,  // what did not arrive is computed
  kPrefill,        // scheduled: more than the newest token is computed
  kDecode,         // scheduled: the newest token is computed
  kSkip,
  kPreempt,
  kFinish,  // copies that were committed are still under way
  kEnd,     // none is, or none is any more
};
inline constexpr int kSlotTriggers = 11;

std::string_view name(SlotState state);      // "initialized", "onboard staged", …
std::string_view name(SlotTrigger trigger);  // "create", "stage", …

// The state that follows, or no value where the trigger is not allowed. Skipping what does not run changes nothing.
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
