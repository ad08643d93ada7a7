// SPDX-License-Identifier: Apache-2.0
#include "console/control_methods.h"

#include <algorithm>
#include <array>

#include <fmt/core.h>

namespace torpor::console {
namespace {

using enum ParameterKind;

constexpr ControlParameter kLeaseParameter = {"lease", kNumber, "seconds, at most 300; default 30"};
constexpr ControlParameter kStay = {"stay", kFlag, "for its lease, even when this connection ends"};
constexpr ControlParameter kMatch = {"match", kWords, "only where a request's name or a state has this in it"};
constexpr ControlParameter kTypes = {"types", kWords, "of events, with commas between them"};
constexpr ControlParameter kAfter = {"after", kNumber, "sequence; only what was published after it"};
constexpr ControlParameter kKeys = {"keys", kWords, "of blocks, in hex, with commas between them"};
constexpr ControlParameter kRequest = {"request", kWords, "or of all blocks of this request, that is not over yet"};
constexpr ControlParameter kLevel = {"level", kNumber, "0, 1 or 2; default 1"};
constexpr ControlParameter kTo = {"to", kWords, "host (the default) or disk"};
constexpr ControlParameter kPreserve = {"preserve_state", kFlag, "requests are kept, not aborted; default true"};
constexpr ControlParameter kTags = {"tags", kWords, "with commas between them; default: all"};
constexpr ControlParameter kUntil = {"until", kNumber, "sequence; nothing that was published after it"};
constexpr ControlParameter kLimit = {"limit", kNumber, "at most so many, up to 10,000"};

}  // namespace

std::span<const ControlMethod> control_methods() {
  static const std::vector<ControlMethod> all = {
      {ControlCall::kHello, "hello", false, {}, "who answers, its role, and these methods"},
      {ControlCall::kSnapshot,
       "snapshot",
       false,
       {},
       "all that `torpor console --json` says of one process; `at`: sequence"},
      {ControlCall::kSlots,
       "slots",
       false,
       {kMatch,
        {"sort", kWords, "seconds_in_state, state, computed_tokens, device_blocks or request; default: as they came"},
        {"invert", kFlag, "the last one first"},
        kLimit},
       "requests with their states"},
      {ControlCall::kEvents,
       "events",
       false,
       {kAfter, kUntil, kTypes, kMatch, kLimit, {"pid", kNumber, "of a worker; default: of this process"}},
       "events that are still there; `next`: for `after`; `workers`: other processes of the engine that publish some"},
      {ControlCall::kSubscribe,
       "subscribe",
       false,
       {kAfter, kTypes, kMatch},
       "events as they are published, a line each, until the connection ends"},
      {ControlCall::kStops, "stops", false, {}, "what holds the engine, since when, and for how long"},
      {ControlCall::kPause, "pause", true, {kLeaseParameter, kStay}, "no further step is taken; `stop`: its number"},
      {ControlCall::kResume, "resume", true, {{"stop", kNumber, "default: all"}}, "it goes on"},
      {ControlCall::kStep,
       "step",
       true,
       {{"steps", kNumber, "default 1"}},
       "a stopped engine takes so many steps and stands again"},
      {ControlCall::kRenew,
       "stop.renew",
       true,
       {{"stop", kNumber, "its number"}, kLeaseParameter},
       "the lease begins anew"},
      {ControlCall::kAddBreakpoint,
       "breakpoint.add",
       true,
       {{"type", kWords, "of event"},
        {"from", kWords, "as `torpor events` prints it"},
        {"to", kWords, "likewise"},
        {"request", kWords, "name with * and ?"},
        {"way", kWords, "onboard, offload, demote, publish, lookup or prefetch"},
        {"at_least", kNumber, "of the event's first number: blocks"},
        {"after", kNumber, "matches that are let by first"},
        {"every", kNumber, "of those behind them"},
        {"once", kFlag, "it stops one time"},
        {"alone", kFlag, "only the request that matches is not admitted, the candidate not promoted; all else goes on"},
        kLeaseParameter,
        kStay},
       "after an event like this no further step is taken; `breakpoint`: its number"},
      {ControlCall::kRemoveBreakpoint,
       "breakpoint.remove",
       true,
       {{"breakpoint", kNumber, "its number"}},
       "with its stop"},
      {ControlCall::kListBreakpoints, "breakpoint.list", false, {}, "breakpoints, and how often each matched"},
      {ControlCall::kCancelTransfer,
       "transfer.cancel",
       true,
       {{"candidate", kNumber, "as events have it"}},
       "`blocks` that do not go; `committed`: too late. The request of a load (`onboard`) computes its tokens instead"},
      {ControlCall::kDropBlocks,
       "block.drop",
       true,
       {kKeys, kRequest, {"tier", kWords, "host or disk"}},
       "none of these is found in the tier any more: `dropped`, `absent`; `pinned` ones stay"},
      {ControlCall::kDemoteBlocks,
       "block.demote",
       true,
       {kKeys, kRequest},
       "those in host memory are copied on to disk: `candidate`, `blocks`"},
      {ControlCall::kPlan,
       "plan",
       false,
       {kLevel, kTo, kPreserve},
       "what a sleep would move and free, and why it would fail",
       ControlPlace::kFront},
      {ControlCall::kSleep,
       "sleep",
       true,
       {kLevel,
        kTo,
        kPreserve,
        {"mode", kWords, "instead of preserving them: abort, wait or keep"},
        {"weights", kWords, "store or reload; default: reload at level 2 without preserve_state, else store"},
        kTags},
       "the engine sleeps: its report",
       ControlPlace::kFront},
      {ControlCall::kWake,
       "wake",
       true,
       {kTags, {"kv", kWords, "after new weights: recompute, keep or abort"}},
       "it wakes: its report",
       ControlPlace::kFront},
      {ControlCall::kCheckpoint,
       "checkpoint",
       true,
       {},
       "a checkpoint while it serves: its report",
       ControlPlace::kFront},
      {ControlCall::kStartRecord,
       "record.start",
       true,
       {{"directory", kWords, "a name; it is made below the option recordings_dir"},
        {"seconds", kNumber, "and no longer"},
        {"bytes", kNumber, "and no more; default 1 GiB"}},
       "from now on all processes of this directory of events are recorded, what they remember first"},
      {ControlCall::kStopRecord, "record.stop", true, {}, "`processes`, `events`, `lost`, `bytes`, and `error`"},
      {ControlCall::kRequest,
       "request",
       false,
       {{"request", kWords, "its name, the whole of it"}, kLimit},
       "all that is known of one request: its `slot`, `states`, `hits`, `transfers`, `stops` and last `events`"},
      {ControlCall::kWaitTransfer,
       "transfer.wait",
       false,
       {{"candidate", kNumber, "as events have it"}, {"timeout", kNumber, "seconds, at most 300; default 30"}},
       "until the candidate has ended, or the time is over: `done`, `state`, `blocks`, and `ended_blocks` by outcome"},
  };
  return all;
}

const ControlMethod* find_control_method(std::string_view name) {
  const auto all = control_methods();
  const auto found = std::find_if(all.begin(), all.end(), [&](const ControlMethod& one) { return one.name == name; });
  return found == all.end() ? nullptr : &*found;
}

std::span<const std::string_view> control_method_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> made;
    for (const ControlMethod& method : control_methods()) made.push_back(method.name);
    return made;
  }();
  return names;
}

std::span<const std::string_view> slot_orders() {
  static constexpr std::array<std::string_view, 5> kOrders = {"seconds_in_state", "state", "computed_tokens",
                                                              "device_blocks", "request"};
  return kOrders;
}

std::span<const std::string_view> outcome_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> made = {"ok"};
    for (int code = 0; code <= static_cast<int>(kLastCode); ++code) made.push_back(name(static_cast<Code>(code)));
    return made;
  }();
  return names;
}

uint8_t outcome_of(const Error* error) {
  return error == nullptr ? uint8_t{0} : static_cast<uint8_t>(1 + static_cast<int>(error->code));
}

std::string control_methods_table() {
  std::string table = "| method | parameters | |\n|---|---|---|\n";
  for (const ControlMethod& method : control_methods()) {
    std::string parameters;
    for (const ControlParameter& each : method.parameters)
      parameters += fmt::format("{}`{}`", parameters.empty() ? "" : ", ", each.name);
    const std::string_view who = method.place == ControlPlace::kFront
                                     ? (method.operates ? " (control, server)" : " (server)")
                                     : (method.operates ? " (control)" : "");
    table += fmt::format("| `{}`{} | {} | {} |\n", method.name, who, parameters, method.help);
  }
  return table;
}

}  // namespace torpor::console
