// SPDX-License-Identifier: Apache-2.0
// Kinds of inputs, as recordings name them: of a reference engine (console/reference_run.h), and of vLLM
// (torpor/vllm/recorded_inputs.py).
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
  kVllmEngine,  // this and the following: since 1.7
  kVllmRequest,
  kVllmTokens,
  kVllmAbort,
  kVllmAnswer,
};
inline constexpr int kInputKinds = 18;
constexpr bool is_of_vllm(InputKind kind) { return kind >= InputKind::kVllmEngine && kind <= InputKind::kVllmAnswer; }

constexpr std::string_view name(InputKind kind) {
  constexpr std::array<std::string_view, kInputKinds> kNames = {
      "",           "engine",      "request",      "abort",        "step",       "offload step",
      "cancel",     "sleep",       "wake",         "load weights", "other",      "continue wake",
      "checkpoint", "vllm engine", "vllm request", "vllm tokens",  "vllm abort", "vllm answer"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace torpor::console
