// SPDX-License-Identifier: Apache-2.0
// Kinds of inputs of a reference engine (console/reference_run.h), as recordings name them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace torpor::console {

// `from` of kInput. Append only.
enum class InputKind : uint8_t {
  kNone,
  kEngine,
  kRequest,
  kAbort,
  kStep,
  kOffloadStep,
  kCancel,
  kSleep,
  kWake,
  kLoadWeights,
  kOther,
  kContinueWake,
  kCheckpoint,
};
inline constexpr int kInputKinds = 13;

constexpr std::string_view name(InputKind kind) {
  constexpr std::array<std::string_view, kInputKinds> kNames = {
      "",      "engine", "request",      "abort", "step",          "offload step", "cancel",
      "sleep", "wake",   "load weights", "other", "continue wake", "checkpoint"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace torpor::console
