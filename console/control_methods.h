// SPDX-License-Identifier: Apache-2.0
// The calls of a process's socket, in one table. The server (by HTTP, too), `torpor live --help`, the table in
// docs/console.md and the names in events all use it. Events contain the numbers of methods: only add methods, at the
// end.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace torpor::console {

enum class ParameterKind : uint8_t { kNumber, kWords, kFlag };

struct ControlParameter {
  std::string_view name;
  ParameterKind kind;
  std::string_view help;
};

enum class ControlCall : uint8_t {
  kHello,
  kSnapshot,
  kSlots,
  kEvents,
  kSubscribe,
  kStops,
  kPause,
  kResume,
  kStep,
  kRenew,
  kAddBreakpoint,
  kRemoveBreakpoint,
  kListBreakpoints,
  kCancelTransfer,
  kDropBlocks,
  kDemoteBlocks,
  kPlan,
  kSleep,
  kWake,
  kCheckpoint,
  kStartRecord,
  kStopRecord,
  kRequest,
  kWaitTransfer,
};

// The process that can carry out the call: any process with a socket, or only the one with the engine's front end (a
// server).
enum class ControlPlace : uint8_t { kAny, kFront };

struct ControlMethod {
  ControlCall call;
  std::string_view name;
  bool operates;  // it changes what the engine does: allowed only if the engine was started with `console=control`
  std::vector<ControlParameter> parameters;
  std::string_view help;
  ControlPlace place = ControlPlace::kAny;
};

std::span<const ControlMethod> control_methods();
const ControlMethod* find_control_method(std::string_view name);  // null: there is none
std::span<const std::string_view> control_method_names();
// Fields of a slot by which `slots` can sort.
std::span<const std::string_view> slot_orders();
std::span<const std::string_view> outcome_names();  // "ok", then the names of codes
uint8_t outcome_of(const Error* error);             // null: ok
// Return the table for docs/console.md.
std::string control_methods_table();

}  // namespace torpor::console
