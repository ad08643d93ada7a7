// SPDX-License-Identifier: Apache-2.0
#include "console/breakpoints.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <fmt/core.h>

#include "kvcache/offload_queue.h"

namespace torpor::console {
namespace {

constexpr uint32_t kProbes = 16;
constexpr uint32_t kBreakpointBits = 0xffff;

int64_t ns(std::chrono::nanoseconds time) { return time.count(); }

Error no_stop(uint32_t id) {
  return {.code = Code::kNotFound,
          .what = fmt::format("there is no stop or breakpoint {}", id),
          .next_step = "look at `stops` and `breakpoint.list`: a lease may have ended"};
}

Status check_lease(std::chrono::nanoseconds lease) {
  if (lease > std::chrono::nanoseconds(0) && lease <= kMostLease) return ok();
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("a lease of {} s", static_cast<double>(lease.count()) * 1e-9),
               .next_step = fmt::format("give more than 0 and at most {} s, and renew it", kMostLease.count())};
}

// Return whether `transfer` of events of this type includes a way.
bool has_way(EventType type) {
  return type == EventType::kCandidate || type == EventType::kEnded || type == EventType::kPlanned;
}

}  // namespace

std::string_view name(StopCause cause) {
  constexpr std::array<std::string_view, kStopCauses> kNames = {"", "pause", "breakpoint", "hold"};
  return kNames[static_cast<size_t>(cause)];
}

std::string_view name(StopEdge edge) {
  constexpr std::array<std::string_view, kStopEdges> kNames = {"",        "begun",        "resumed",
                                                               "expired", "console gone", "operation"};
  return kNames[static_cast<size_t>(edge)];
}

bool may_stop_at(EventType type) {
  switch (type) {
    case EventType::kStep:
    case EventType::kRequest:
    case EventType::kSlot:
    case EventType::kHit:
    case EventType::kCached:
    case EventType::kCandidate:
    case EventType::kPlanned:
    case EventType::kEnded:
    case EventType::kRegistered:
    case EventType::kDropped:
    case EventType::kBlock:
    case EventType::kCopy:
    case EventType::kTier: return true;
    default: return false;
  }
}

bool may_hold(const Breakpoint& breakpoint) {
  if (breakpoint.type == EventType::kRequest) return true;
  return breakpoint.type == EventType::kCandidate &&
         breakpoint.to.value_or(static_cast<uint8_t>(CandidateState::kPromoted)) ==
             static_cast<uint8_t>(CandidateState::kPromoted) &&
         breakpoint.from.value_or(static_cast<uint8_t>(CandidateState::kQueued)) ==
             static_cast<uint8_t>(CandidateState::kQueued);
}

bool matches_glob(std::string_view pattern, std::string_view text) noexcept {
  size_t at = 0;
  size_t in = 0;
  size_t star = std::string_view::npos;  // index of the last star; `from`: where in the text it matches nothing yet
  size_t from = 0;
  while (in < text.size()) {
    if (at < pattern.size() && (pattern[at] == '?' || (pattern[at] == text[in] && pattern[at] != '*'))) {
      ++at;
      ++in;
    } else if (at < pattern.size() && pattern[at] == '*') {
      star = at++;
      from = in;
    } else if (star != std::string_view::npos) {
      at = star + 1;
      in = ++from;
    } else {
      return false;
    }
  }
  while (at < pattern.size() && pattern[at] == '*') ++at;
  return at == pattern.size();
}

// ---- calls that add and remove

std::optional<uint32_t> Breakpoints::find(uint32_t id) const {
  for (uint32_t at = 0; at < kPlaces; ++at) {
    if (known_[at].used && known_[at].id == id) return at;
  }
  return std::nullopt;
}

std::optional<uint32_t> Breakpoints::room(bool pause) {
  for (uint32_t at = pause ? kMost : 0; at < (pause ? kPlaces : kMost); ++at) {
    // Reuse an entry whose breakpoint or pause has ended by itself.
    const bool over = pause || (known_[at].what.once && (armed_.load(std::memory_order_acquire) & 1u << at) == 0);
    if (known_[at].used && over && (standing_.load(std::memory_order_acquire) & 1u << at) == 0) known_[at] = {};
    if (!known_[at].used) return at;
  }
  return std::nullopt;
}

void Breakpoints::arm(uint32_t at, const Breakpoint& what) {
  Place& place = places_[at];
  const auto relaxed = std::memory_order_relaxed;
  place.type_from_to.store(
      static_cast<uint32_t>(what.type) << 16 | (what.from ? *what.from : kAny) << 8 | (what.to ? *what.to : kAny),
      relaxed);
  place.way.store(what.way ? *what.way : kAny, relaxed);
  place.at_least.store(what.at_least, relaxed);
  place.after.store(what.after, relaxed);
  place.every.store(std::max<uint64_t>(what.every, 1), relaxed);
  place.once.store(what.once, relaxed);
  place.lease.store(ns(what.lease), relaxed);
  place.matched.store(0, relaxed);
  for (std::atomic<uint64_t>& each : place.held) each.store(0, relaxed);
  place.holding.store(0, relaxed);
  place.held_before.store(0, relaxed);
  if (what.alone) {
    alone_.fetch_or(1u << at, std::memory_order_acq_rel);
  } else {
    alone_.fetch_and(~(1u << at), std::memory_order_acq_rel);
  }
  std::array<char, 64> glob{};
  what.request.copy(glob.data(), kMostGlob);
  for (size_t i = 0; i < place.glob.size(); ++i) {
    uint64_t word = 0;
    std::memcpy(&word, glob.data() + 8 * i, 8);
    place.glob[i].store(word, relaxed);
  }
  place.globbed.store(!what.request.empty(), relaxed);
  // Its glob was not tried on any name yet.
  const uint64_t tried = uint64_t{1} << (16 + at) | uint64_t{1} << at;
  for (std::atomic<uint64_t>& entry : names_) entry.fetch_and(~tried, std::memory_order_acq_rel);
  place.id.store(known_[at].id, std::memory_order_release);
  armed_.fetch_or(1u << at, std::memory_order_acq_rel);
}

Result<uint32_t> Breakpoints::add(const Breakpoint& breakpoint, uint64_t owner,
                                  const std::map<uint32_t, std::string>& names) {
  TORPOR_RETURN_IF_ERROR(check_lease(breakpoint.lease));
  const auto wrong = [](std::string what, std::string next) {
    return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next)};
  };
  if (!may_stop_at(breakpoint.type)) return wrong("an engine is not stopped there", "use an event of a serving engine");
  if (breakpoint.request.size() > kMostGlob)
    return wrong(fmt::format("\"{}\" is longer than {} bytes", breakpoint.request, kMostGlob), "use * in it");
  if (breakpoint.way && !has_way(breakpoint.type)) return wrong("this event has no way", "leave it out");
  if (breakpoint.every == 0) return wrong("every 0th match", "give 1 or more");
  if (breakpoint.alone && !may_hold(breakpoint))
    return wrong("this cannot be held alone", "use type=request, or type=candidate to=promoted");
  if (breakpoint.alone && (breakpoint.after > 0 || breakpoint.every != 1))
    return wrong("after and every count events, and what is held has none yet", "leave them out");
  const MutexLock lock(mutex_);
  const std::optional<uint32_t> at = room(false);
  if (!at) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("there are {} breakpoints", kMost),
                 .next_step = "remove one"};
  }
  known_[*at] = {.used = true, .pause = false, .id = ++last_id_, .owner = owner, .what = breakpoint};
  arm(*at, breakpoint);
  for (const auto& [number, words] : names) name_one(number, words, 1u << *at, true);
  return last_id_;
}

void Breakpoints::retire(uint32_t at, StopEdge edge) noexcept {
  armed_.fetch_and(~(1u << at), std::memory_order_acq_rel);
  (void)end(at, edge);
  places_[at].id.store(0, std::memory_order_release);
  (void)end(at, edge);  // for a thread that was recording an event meanwhile
  known_[at] = {};
}

Status Breakpoints::remove(uint32_t id) {
  const MutexLock lock(mutex_);
  const std::optional<uint32_t> at = find(id);
  if (!at || *at >= kMost) return no_stop(id);
  retire(*at, StopEdge::kResumed);
  return ok();
}

std::vector<BreakpointRow> Breakpoints::list() const {
  const MutexLock lock(mutex_);
  std::vector<BreakpointRow> rows;
  for (uint32_t at = 0; at < kMost; ++at) {
    if (known_[at].used) rows.push_back({known_[at].id, known_[at].what, known_[at].owner, places_[at].matched.load()});
  }
  return rows;
}

Result<uint32_t> Breakpoints::pause(std::chrono::nanoseconds lease, uint64_t owner) {
  TORPOR_RETURN_IF_ERROR(check_lease(lease));
  const MutexLock lock(mutex_);
  if (operations_.load(std::memory_order_acquire) > 0) {
    return Error{.code = Code::kUnavailable,
                 .what = "a sleep, wake or checkpoint is under way: nothing stops it",
                 .next_step = "pause the engine when it has ended"};
  }
  const std::optional<uint32_t> at = room(true);
  if (!at) {
    return Error{
        .code = Code::kResourceExhausted, .what = fmt::format("there are {} pauses", kMost), .next_step = "resume one"};
  }
  known_[*at] = {.used = true, .pause = true, .id = ++last_id_, .owner = owner, .what = {}};
  places_[*at].lease.store(ns(lease), std::memory_order_relaxed);
  places_[*at].id.store(last_id_, std::memory_order_release);
  stand(*at, 0, 0, ns(clock_.now()));
  return last_id_;
}

Status Breakpoints::resume(uint32_t id) {
  const MutexLock lock(mutex_);
  const std::optional<uint32_t> at = find(id);
  if (!at || !end(*at, StopEdge::kResumed)) return no_stop(id);
  return ok();
}

size_t Breakpoints::resume_all() {
  const MutexLock lock(mutex_);
  size_t ended = 0;
  for (uint32_t at = 0; at < kPlaces; ++at) ended += end(at, StopEdge::kResumed) ? 1 : 0;
  return ended;
}

Status Breakpoints::renew(uint32_t id, std::chrono::nanoseconds lease) {
  TORPOR_RETURN_IF_ERROR(check_lease(lease));
  expire();
  const MutexLock lock(mutex_);
  const std::optional<uint32_t> at = find(id);
  if (!at || (standing_.load(std::memory_order_acquire) & 1u << *at) == 0) return no_stop(id);
  places_[*at].deadline.store(ns(clock_.now() + lease), std::memory_order_release);
  return ok();
}

Status Breakpoints::step(uint64_t steps) {
  if (steps == 0 || steps > 1'000'000) {
    return Error{
        .code = Code::kInvalidArgument, .what = fmt::format("{} steps", steps), .next_step = "give 1 to 1,000,000"};
  }
  expire();
  if (!stands()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the engine is not stopped",
                 .next_step = "pause it, or let it come to a breakpoint"};
  }
  steps_.store(steps, std::memory_order_release);
  return ok();
}

std::vector<StopRow> Breakpoints::stops() const {
  const MutexLock lock(mutex_);
  std::vector<StopRow> rows;
  const uint32_t standing = standing_.load(std::memory_order_acquire);
  const int64_t now = ns(clock_.now());
  for (uint32_t at = 0; at < kPlaces; ++at) {
    if ((standing & 1u << at) == 0) continue;
    const Place& place = places_[at];
    rows.push_back({.id = known_[at].id,
                    .cause = cause_of(at),
                    .owner = known_[at].owner,
                    .event = place.event.load(),
                    .request = place.request.load(),
                    .held = std::min(place.holding.load() - place.held_before.load(), kMostHeld),
                    .stood = std::chrono::nanoseconds(now - place.began.load()),
                    .left = std::chrono::nanoseconds(std::max<int64_t>(place.deadline.load() - now, 0))});
  }
  return rows;
}

bool Breakpoints::waits() const noexcept { return armed_.load() != 0 || standing_.load() != 0; }

void Breakpoints::drop_owner(uint64_t owner) noexcept {
  if (owner == 0) return;
  const MutexLock lock(mutex_);
  for (uint32_t at = 0; at < kPlaces; ++at) {
    if (!known_[at].used || known_[at].owner != owner) continue;
    retire(at, StopEdge::kGone);
  }
}

void Breakpoints::expire() noexcept {
  const uint32_t standing = standing_.load(std::memory_order_acquire);
  if (standing == 0) return;
  const int64_t now = ns(clock_.now());
  for (uint32_t at = 0; at < kPlaces; ++at) {
    if ((standing & 1u << at) != 0 && places_[at].deadline.load(std::memory_order_acquire) <= now)
      (void)end(at, StopEdge::kExpired);
  }
}

// ---- calls of threads that record events, and of the engine's steps

bool Breakpoints::glob_matches(const Place& place, std::string_view name) const noexcept {
  std::array<char, 64> glob{};
  for (size_t i = 0; i < place.glob.size(); ++i) {
    const uint64_t word = place.glob[i].load(std::memory_order_relaxed);
    std::memcpy(glob.data() + 8 * i, &word, 8);
  }
  return matches_glob({glob.data(), ::strnlen(glob.data(), kMostGlob)}, name);
}

void Breakpoints::name_one(uint32_t request, std::string_view name, uint32_t evaluated, bool only_new) noexcept {
  if (request == 0) return;
  uint64_t matching = 0;
  for (uint32_t at = 0; at < kMost; ++at) {
    if ((evaluated & 1u << at) != 0 && places_[at].globbed.load(std::memory_order_relaxed) &&
        glob_matches(places_[at], name))
      matching |= uint64_t{1} << at;
  }
  const uint64_t tried = uint64_t{evaluated} << 16;
  const uint32_t home = request * 2654435761u;
  for (uint32_t probe = 0; probe < kProbes; ++probe) {
    std::atomic<uint64_t>& entry = names_[(home + probe) % kNames];
    uint64_t before = entry.load(std::memory_order_acquire);
    // If no entry within the probes is free, the last one is replaced: the replaced request matches no glob until its
    // name is recorded again.
    if (before != 0 && before >> 32 != request && probe + 1 < kProbes) continue;
    while (true) {
      const bool same = before >> 32 == request;
      if (same && only_new && (before & tried) != 0) return;  // it was named meanwhile
      const uint64_t kept = same && only_new ? before & UINT32_MAX : 0;
      const uint64_t now = uint64_t{request} << 32 | kept | tried | matching;
      if (entry.compare_exchange_weak(before, now, std::memory_order_acq_rel)) return;
    }
  }
}

void Breakpoints::named(uint32_t request, std::string_view name) noexcept {
  // A breakpoint that holds is asked while its stop lasts, even if it matches nothing afterwards (`once`).
  const uint32_t asked =
      (armed_.load(std::memory_order_acquire) | standing_.load(std::memory_order_acquire)) & kBreakpointBits;
  if (asked != 0) name_one(request, name, asked, false);
}

uint32_t Breakpoints::matched_names(uint32_t request) const noexcept {
  const uint32_t home = request * 2654435761u;
  for (uint32_t probe = 0; probe < kProbes; ++probe) {
    const uint64_t entry = names_[(home + probe) % kNames].load(std::memory_order_acquire);
    if (entry >> 32 == request) return static_cast<uint32_t>(entry & kBreakpointBits);
    if (entry == 0) break;
  }
  return 0;
}

bool Breakpoints::matches(uint32_t at, const Event& event) const noexcept {
  const Place& place = places_[at];
  const auto relaxed = std::memory_order_relaxed;
  const uint32_t what = place.type_from_to.load(relaxed);
  const uint32_t from = what >> 8 & 0xff;
  const uint32_t to = what & 0xff;
  const uint32_t way = place.way.load(relaxed);
  if (what >> 16 != static_cast<uint32_t>(event.type) || (from != kAny && from != event.from) ||
      (to != kAny && to != event.to) || event.a < place.at_least.load(relaxed) ||
      (way != kAny && way != event.transfer >> 48))
    return false;
  return !place.globbed.load(relaxed) || (matched_names(event.request) & 1u << at) != 0;
}

void Breakpoints::saw(const Event& event) noexcept {
  if (event.type == EventType::kStep) {
    uint64_t left = steps_.load(std::memory_order_acquire);
    while (left > 0 && !steps_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) {}
  }
  uint32_t armed = armed_.load(std::memory_order_acquire);
  if (const uint32_t alone = alone_.load(std::memory_order_acquire); alone != 0) {
    armed &= ~alone;
    if (event.type == EventType::kRequest) forget_held(event.request);  // its number belongs to a new request
  }
  if (armed == 0 || operations_.load(std::memory_order_acquire) > 0) return;
  for (; armed != 0; armed &= armed - 1) {
    const auto at = static_cast<uint32_t>(std::countr_zero(armed));
    Place& place = places_[at];
    const uint32_t id = place.id.load(std::memory_order_acquire);
    if (id == 0 || !matches(at, event) || place.id.load(std::memory_order_acquire) != id) continue;
    const uint64_t count = place.matched.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t after = place.after.load(std::memory_order_relaxed);
    const uint64_t every = place.every.load(std::memory_order_relaxed);
    if (count < after || (count - after) % every != 0) continue;
    if (place.once.load(std::memory_order_relaxed)) armed_.fetch_and(~(1u << at), std::memory_order_acq_rel);
    stand(at, event.sequence, event.request, event.time);
    if (place.id.load(std::memory_order_acquire) != id) (void)end(at, StopEdge::kResumed);  // removed meanwhile
  }
}

void Breakpoints::stand(uint32_t at, uint64_t event, uint32_t request, int64_t now) noexcept {
  if ((standing_.load(std::memory_order_acquire) & 1u << at) != 0) return;  // an earlier event has stopped it already
  Place& place = places_[at];
  place.event.store(event, std::memory_order_relaxed);
  place.request.store(request, std::memory_order_relaxed);
  place.began.store(now, std::memory_order_relaxed);
  place.deadline.store(now + place.lease.load(std::memory_order_relaxed), std::memory_order_release);
  if ((standing_.fetch_or(1u << at, std::memory_order_acq_rel) & 1u << at) == 0) publish(at, StopEdge::kBegun, 0);
  // An operation that began meanwhile has not seen this stop.
  if (operations_.load(std::memory_order_acquire) > 0) (void)end(at, StopEdge::kOperation);
}

bool Breakpoints::end(uint32_t at, StopEdge edge) noexcept {
  if ((standing_.fetch_and(~(1u << at), std::memory_order_acq_rel) & 1u << at) == 0) return false;
  const int64_t stood = ns(clock_.now()) - places_[at].began.load(std::memory_order_relaxed);
  publish(at, edge, static_cast<uint64_t>(std::max<int64_t>(stood, 0)));
  if (!stands()) steps_.store(0, std::memory_order_release);
  return true;
}

void Breakpoints::publish(uint32_t at, StopEdge edge, uint64_t stood) noexcept {
  const Place& place = places_[at];
  (void)ring_.record({.type = EventType::kStop,
                      .from = static_cast<uint8_t>(cause_of(at)),
                      .to = static_cast<uint8_t>(edge),
                      .request = place.request.load(std::memory_order_relaxed),
                      .transfer = place.id.load(std::memory_order_relaxed),
                      .a = place.event.load(std::memory_order_relaxed),
                      .b = stood},
                     ns(clock_.now()));
}

bool Breakpoints::may_step() noexcept {
  if (!stands()) return true;
  expire();
  return !stands() || steps_.load(std::memory_order_acquire) > 0 || operations_.load(std::memory_order_acquire) > 0;
}

void Breakpoints::operation_begins() noexcept {
  operations_.fetch_add(1, std::memory_order_acq_rel);
  for (uint32_t at = 0; at < kPlaces; ++at) (void)end(at, StopEdge::kOperation);
}

}  // namespace torpor::console
