// SPDX-License-Identifier: Apache-2.0
// Breakpoints that hold one request or transfer while the engine runs.
#include <algorithm>
#include <bit>

#include "console/breakpoints.h"

namespace torpor::console {
namespace {

// Return the number of the held request or transfer. Bit 63 marks transfers, whose numbers are separate.
uint64_t subject_of(const Event& about) {
  return about.type == EventType::kCandidate ? about.transfer | uint64_t{1} << 63 : about.request;
}

}  // namespace

StopCause Breakpoints::cause_of(uint32_t at) const noexcept {
  if (at >= kMost) return StopCause::kPause;
  return (alone_.load(std::memory_order_acquire) & 1u << at) != 0 ? StopCause::kHold : StopCause::kBreakpoint;
}

bool Breakpoints::may_go(const Event& about) noexcept {
  if (!holds() || operations_.load(std::memory_order_acquire) > 0) return true;
  expire();
  const int64_t now = clock_.now().count();
  const auto acquire = std::memory_order_acquire;
  bool goes = true;
  for (uint32_t asked = (armed_.load(acquire) | standing_.load(acquire)) & alone_.load(acquire); asked != 0;
       asked &= asked - 1)
    goes = !holds_back(static_cast<uint32_t>(std::countr_zero(asked)), about, now) && goes;
  return goes;
}

bool Breakpoints::holds_back(uint32_t at, const Event& about, int64_t now) noexcept {
  Place& place = places_[at];
  const uint32_t id = place.id.load(std::memory_order_acquire);
  if (id == 0 || !matches(at, about) || place.id.load(std::memory_order_acquire) != id) return false;
  const auto stands_now = [&] { return (standing_.load(std::memory_order_acquire) & 1u << at) != 0; };
  const uint64_t subject = subject_of(about);
  for (const std::atomic<uint64_t>& each : place.held) {
    if (each.load(std::memory_order_relaxed) == subject) return stands_now();  // held before: no new stop for it
  }
  const bool stood = stands_now();
  // `once`, and its stop has ended
  if (!stood && (armed_.load(std::memory_order_acquire) & 1u << at) == 0) return false;
  if (!stood) place.held_before.store(place.holding.load(std::memory_order_relaxed), std::memory_order_relaxed);
  place.held[place.holding.fetch_add(1, std::memory_order_relaxed) % kMostHeld].store(subject,
                                                                                      std::memory_order_relaxed);
  place.matched.fetch_add(1, std::memory_order_acq_rel);
  if (!stood) {
    if (place.once.load(std::memory_order_relaxed)) armed_.fetch_and(~(1u << at), std::memory_order_acq_rel);
    stand(at, 0, about.request, now);
    if (place.id.load(std::memory_order_acquire) != id) (void)end(at, StopEdge::kResumed);  // removed meanwhile
  }
  return stands_now();
}

void Breakpoints::forget_held(uint32_t request) noexcept {
  for (uint32_t at = 0; at < kMost; ++at) {
    if ((alone_.load(std::memory_order_acquire) & 1u << at) == 0) continue;
    for (std::atomic<uint64_t>& each : places_[at].held) {
      if (each.load(std::memory_order_relaxed) == request) each.store(0, std::memory_order_relaxed);
    }
  }
}

}  // namespace torpor::console
