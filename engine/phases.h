// SPDX-License-Identifier: Apache-2.0
// Names and numbers of the SleepController's operations, their phases, and parts of a rank's memory. Events hold the
// numbers, as they hold no words.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace torpor {

// `from` of an operation's events. Only append.
inline constexpr std::array<std::string_view, 4> kOperationNames = {"other", "sleep", "wake", "checkpoint"};

// `from` of a phase's events. Only append. "attach" occurs in older recordings; a wake has no such phase now.
inline constexpr std::array<std::string_view, 11> kPhaseNames = {
    "other", "quiesce", "capture", "commit", "save", "verify", "detach", "attach", "restore", "reconnect", "open"};

// `from` and `to` of an engine's events. Only append.
inline constexpr std::array<std::string_view, 5> kEngineStates = {"awake", "falling asleep", "asleep", "waking",
                                                                  "unrecoverable"};

// `from` of an event of memory. Only append.
enum class MemoryPart : uint8_t { kNone, kDevice, kAnybody, kArena, kArenaHeld, kTag };
inline constexpr std::array<std::string_view, 6> kMemoryParts = {"", "device", "anybody", "arena", "arena held", "tag"};

// Return the number of a name; 0 if it has none.
template <size_t size>
constexpr uint8_t number_of(std::string_view name, const std::array<std::string_view, size>& names) {
  for (size_t i = 0; i < size; ++i) {
    if (names[i] == name) return static_cast<uint8_t>(i);
  }
  return 0;
}

}  // namespace torpor
