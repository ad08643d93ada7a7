// SPDX-License-Identifier: Apache-2.0
#include "console/waits.h"

#include <algorithm>

#include <fmt/core.h>

#include "console/breakpoints.h"
#include "console/schema.h"

namespace torpor::console {
namespace {

// Return whether the request waits to be scheduled, or for a load that must come first.
bool waits(SlotState state) {
  return state == SlotState::kInitialized || state == SlotState::kOnboardStaged || state == SlotState::kOnboarding ||
         state == SlotState::kPreempted;
}

std::string counted(uint64_t count, std::string_view of) {
  return fmt::format("{} {}{}", count, of, count == 1 ? "" : "s");
}

}  // namespace

Waits::Waits(const EngineView& view) : view_(view) {
  for (const auto& [transfer, row] : view.candidates()) {
    if (row.request == 0) continue;  // an offload belongs to no request
    Request& request = by_name_[view.name_of(row.request)];
    request.oldest = request.transfers == 0 ? row.since : std::min(request.oldest, row.since);
    ++request.transfers;
    request.blocks += row.blocks;
  }
  for (const auto& [number, row] : view.slots()) waiting_ += waits(row.state) ? 1 : 0;
  for (const auto& [number, stop] : view.stops()) {
    if (static_cast<StopCause>(stop.cause) == StopCause::kHold) {
      by_name_[view.name_of(stop.request)].held = true;
    } else {
      engine_ = fmt::format("the engine: stopped by a {}", name(static_cast<StopCause>(stop.cause)));
    }
  }
  if (const std::string_view engine = view.engine(); !engine.empty() && engine != "awake")
    engine_ = fmt::format("the engine: {}", engine);
}

std::string Waits::of(uint32_t request) const {
  const auto slot = view_.slots().find(request);
  if (slot == view_.slots().end()) return {};
  if (!engine_.empty()) return engine_;
  const auto known = by_name_.find(view_.name_of(request));
  const Request own = known == by_name_.end() ? Request{} : known->second;
  if (own.held) return "a breakpoint that holds it alone";
  const SlotState state = slot->second.state;
  if (state == SlotState::kFinishing) return "copies of its blocks that are under way";
  if (state == SlotState::kSkippedPrefill || state == SlotState::kSkippedDecode)
    return "a later step: the last one was full without it";
  if (!waits(state)) return {};
  if (own.transfers > 0)
    return fmt::format("{} to be loaded, in {}, {:.1f} s", counted(own.blocks, "block"),
                       counted(own.transfers, "transfer"),
                       static_cast<double>(within(view_.latest()) - within(own.oldest)) * 1e-9);
  const std::optional<TierRow>& device = view_.tier(0);
  return fmt::format("its turn: {} wait", waiting_) +
         (device ? fmt::format(", {} device blocks are free", device->cached + device->empty) : std::string());
}

}  // namespace torpor::console
