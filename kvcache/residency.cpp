// SPDX-License-Identifier: Apache-2.0
// Residency: its sessions, and what they hold in host memory.
#include "kvcache/residency.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor {
namespace {

Error wrong(std::string what, std::string next) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next)};
}

}  // namespace

std::string_view name(SessionVerb verb) {
  switch (verb) {
    case SessionVerb::kDemote: return "demote";
    case SessionVerb::kPrefetch: return "prefetch";
    case SessionVerb::kRetain: return "retain";
    case SessionVerb::kPin: return "pin";
    case SessionVerb::kEvict: return "evict";
  }
  return "?";
}

std::string_view name(SessionOutcome outcome) {
  switch (outcome) {
    case SessionOutcome::kAccepted: return "accepted";
    case SessionOutcome::kClipped: return "clipped";
    case SessionOutcome::kDeferred: return "deferred";
    case SessionOutcome::kRejected: return "rejected";
    case SessionOutcome::kMissing: return "missing";
  }
  return "?";
}

Status ResidencyOptions::validate() const {
  TORPOR_RETURN_IF_ERROR(index.validate());
  if (groups < 1 || groups > kMostGroups) return wrong(fmt::format("groups is {}", groups), "use 1 to 256");
  if (!(pin_share >= 0 && pin_share <= 1)) return wrong(fmt::format("pin_share is {}", pin_share), "use 0 to 1");
  constexpr int64_t kMostSeconds = 1'000'000'000;  // in nanoseconds they fit into 64 bits, also after now
  if (most_ttl.count() < 1 || most_ttl.count() > kMostSeconds)
    return wrong(fmt::format("most_ttl is {} s", most_ttl.count()), fmt::format("use 1 to {}", kMostSeconds));
  if (!(prefetch_share >= 0 && prefetch_share <= 1))
    return wrong(fmt::format("prefetch_share is {}", prefetch_share), "use 0 to 1");
  if (idle.count() < 0 || idle > std::chrono::seconds(kMostSeconds))
    return wrong(fmt::format("idle is {} ns", idle.count()), fmt::format("use 0 to {} s", kMostSeconds));
  return ok();
}

Result<std::unique_ptr<Residency>> Residency::create(const ResidencyOptions& options, OffloadScheduler& scheduler,
                                                     DeviceCache& device, const Clock& clock) {
  return try_catch([&]() -> Result<std::unique_ptr<Residency>> {
    TORPOR_RETURN_IF_ERROR(options.validate());
    std::unique_ptr<Residency> made(new Residency(options, scheduler, device, clock));
    if (options.idle.count() > 0 && !made->has(options.idle_to))
      return wrong(fmt::format("idle sessions are to be demoted to {}, which this engine does not have",
                               torpor::name(options.idle_to)),
                   "give it that tier, or name another one");
    scheduler.on_no_room([of = made.get()] { return of->release_softest(nullptr, nullptr); });
    return made;
  });
}

Residency::~Residency() { scheduler_.on_no_room(nullptr); }

bool Residency::has(StoreId store) const {
  const BlockIndexOptions& index = scheduler_.options().index;
  if (store == StoreId::kHost) return index.host_slots > 0;
  return store == StoreId::kDisk ? index.disk_segments > 0 : index.remote_slots > 0;
}

// Return whether as many actions are under way as may be.
bool Residency::is_full() const {
  size_t keys = 0;
  for (const Action* action : pending_) keys += action->keys.size();
  return pending_.size() >= kMostPending || keys >= kMostPendingKeys;
}

// Return the keys of the session's blocks, each once: those of its newest prefix first, from its beginning.
std::vector<BlockKey> Residency::keys_of(const Session& session) const {
  std::vector<BlockKey> keys;
  (void)session.for_each_block(0, SIZE_MAX, [&](const BlockHash& hash) {
    for (uint32_t group = 0; group < options_.groups; ++group)
      keys.push_back({.hash = hash, .group = group, .space = scheduler_.space()});
  });
  return keys;
}

std::vector<BlockLocations> Residency::find_each(std::span<const BlockKey> keys) const {
  std::vector<BlockLocations> places(keys.size());
  scheduler_.index().find_each(keys, places);
  return places;
}

// ---- requests

void Residency::begin(const SessionName& name) {
  ++running_[name];
  if (Session* const session = index_.find(name); session != nullptr) set_demotion(*session, false);
  for (Action* action : pending_) action->begun = action->begun || action->call.name == name;
}

void Residency::finished(const SessionName& name, std::span<const BlockHash> chain, uint64_t after_step) {
  if (const auto running = running_.find(name); running != running_.end() && --running->second == 0)
    running_.erase(running);
  Session* const session = index_.record(name, chain);
  end_forgotten();
  if (Session* const known = index_.find(name); known != nullptr && !running_.contains(name))
    set_demotion(*known, true);
  if (session == nullptr || !session->held || is_full()) return;
  // The hold has the new blocks, too, until its end.
  const SessionHold& hold = session->hold;
  if (hold.until <= clock_.now()) return;
  (void)begin_action({.verb = hold.hard ? SessionVerb::kPin : SessionVerb::kRetain,
                      .name = name,
                      .seconds = hold.until - clock_.now(),
                      .priority = hold.priority},
                     *session, after_step);
}

void Residency::end_forgotten() {
  for (const auto& session : index_.take_forgotten()) {
    set_demotion(*session, false);
    release(*session);
  }
}

void Residency::reset() {
  for (Action* action : pending_) {
    action->answer.outcome = SessionOutcome::kRejected;
    action->answer.reason = "the weights have changed: nothing that was computed before is found";
    action->answer.done = true;
    action->handles.clear();
    action->keys = {};
    action->chains = {};
  }
  pending_.clear();
  due_.clear();
  for (const auto& session : index_.clear()) release(*session);
  next_expiry_ = Time::max();
}

// ---- holds

void Residency::release(Session& session) {
  for (const Slot slot : session.hold.slots) scheduler_.index().unpin(StoreId::kHost, slot);
  held_ -= static_cast<int64_t>(session.hold.slots.size());
  session.hold.slots.clear();
  session.held = false;
}

// Release the retained session of the lowest priority, of this tenant or, if it is null, of all; of these the one that
// ends first. Return false if there is none.
bool Residency::release_softest(const Session* except, const std::string* tenant) {
  Session* softest = nullptr;
  for (Session* each : index_.sessions(tenant)) {
    if (!each->held || each->hold.hard || each == except) continue;
    if (softest == nullptr ||
        std::pair(each->hold.priority, each->hold.until) < std::pair(softest->hold.priority, softest->hold.until))
      softest = each;
  }
  if (softest == nullptr) return false;
  release(*softest);
  return true;
}

void Residency::expire() {
  const Time now = clock_.now();
  if (now < next_expiry_) return;
  next_expiry_ = Time::max();
  for (Session* each : index_.sessions(nullptr)) {
    if (!each->held) continue;
    if (each->hold.until <= now) {
      release(*each);
    } else {
      next_expiry_ = std::min(next_expiry_, each->hold.until);
    }
  }
}

// Return how many of `wanted` blocks the session may hold. A pin has retained sessions of others make room. Where the
// tenant's share is the limit, only sessions of that tenant do: others would make room for nothing.
int64_t Residency::allowed_blocks(const Session& session, bool hard, int64_t wanted) {
  const auto budget =
      static_cast<int64_t>(static_cast<double>(scheduler_.options().index.host_slots) * options_.pin_share);
  const auto of_tenant = static_cast<int64_t>(static_cast<double>(budget) * options_.index.tenant_share);
  while (true) {
    int64_t others = 0;
    int64_t of_same_tenant = 0;
    for (const Session* each : index_.sessions(nullptr)) {
      if (!each->held || each == &session) continue;
      const auto slots = static_cast<int64_t>(std::max(each->hold.slots.size(), each->hold.granted));
      others += slots;
      of_same_tenant += each->name.tenant == session.name.tenant ? slots : 0;
    }
    const int64_t left = budget - others;
    const int64_t left_of_tenant = of_tenant - of_same_tenant;
    const int64_t allowed = std::max<int64_t>(0, std::min(left, left_of_tenant));
    const std::string* const who = left < left_of_tenant ? nullptr : &session.name.tenant;
    if (allowed >= wanted || !hard || !release_softest(&session, who)) return std::min(allowed, wanted);
  }
}

// Pin those of the action's blocks that are in host memory, within what was granted: an earlier action of the session
// may be under way, too.
void Residency::place_hold(const Action& action) {
  Session* const session = index_.find(action.call.name);
  if (session == nullptr || !session->held) return;
  for (const BlockLocations& places : find_each(action.keys)) {
    if (session->hold.slots.size() >= session->hold.granted) return;
    if (places.host < 0 || !session->hold.slots.insert(places.host).second) continue;
    scheduler_.index().pin(StoreId::kHost, places.host);
    ++held_;
  }
}

// ---- what there is

// Count the session's next blocks, `most` at most.
void Residency::count(const Session& session, SessionCursor& at, size_t most) const {
  std::vector<BlockKey> keys;
  at.looked_at = session.for_each_block(at.looked_at, most, [&](const BlockHash& hash) {
    for (uint32_t group = 0; group < options_.groups; ++group)
      keys.push_back({.hash = hash, .group = group, .space = scheduler_.space()});
  });
  const std::vector<BlockLocations> places = find_each(keys);
  at.counts[0] += keys.size();
  for (size_t i = 0; i < keys.size(); ++i) {
    at.counts[1] += is_on_device(keys[i]) ? 1 : 0;
    at.counts[2] += places[i].host >= 0 ? 1 : 0;
    at.counts[3] += places[i].disk >= 0 ? 1 : 0;
    at.counts[4] += places[i].remote >= 0 ? 1 : 0;
  }
}

SessionView Residency::view_of(const Session& session, const SessionCursor& counted) const {
  SessionView view{.name = session.name,
                   .epoch = session.epoch,
                   .used = session.used,
                   .residence = session.residence,
                   .prefixes = session.prefixes.size(),
                   .blocks = counted.counts[0],
                   .device = counted.counts[1],
                   .host = counted.counts[2],
                   .disk = counted.counts[3],
                   .remote = counted.counts[4],
                   .held = session.held,
                   .pinned = session.held && session.hold.hard,
                   .priority = session.held ? session.hold.priority : 0,
                   .held_blocks = session.hold.slots.size()};
  if (const auto running = running_.find(session.name); running != running_.end()) view.running = running->second;
  if (session.held) view.seconds_left = seconds_between(clock_.now(), session.hold.until);
  return view;
}

SessionPage Residency::list(const std::string* tenant, const SessionCursor& from, size_t most) {
  expire();  // an engine without requests takes no steps
  SessionPage page;
  SessionCursor at = from;
  size_t left = std::max<size_t>(most, 1);
  while (const Session* const session = index_.next(tenant, at.name, at.listed)) {
    if (left == 0) {
      page.next = at;
      return page;
    }
    if (at.listed || at.name != session->name) at = {.name = session->name, .epoch = session->epoch};
    if (at.epoch != session->epoch && ++at.begun < kMostBegun)
      at = {.name = session->name, .epoch = session->epoch, .begun = at.begun};
    const uint64_t before = at.looked_at;
    if (at.begun < kMostBegun) count(*session, at, left);
    left -= std::clamp<size_t>(at.looked_at - before, 1, left);
    if (at.begun < kMostBegun && at.looked_at < session->blocks()) {
      page.next = at;
      return page;
    }
    page.views.push_back(view_of(*session, at));
    at = {.name = session->name, .listed = true};
  }
  return page;
}

ResidencyCounts Residency::counts() const {
  ResidencyCounts counts = counts_;
  counts.forgotten = index_.forgotten();
  counts.sessions = index_.size();
  counts.held = static_cast<uint64_t>(held_);
  counts.index_bytes = static_cast<uint64_t>(index_.bytes());
  return counts;
}

Status Residency::check() const {
  TORPOR_RETURN_IF_ERROR(index_.check());
  int64_t held = 0;
  for (const Session* each : index_.sessions(nullptr)) {
    held += static_cast<int64_t>(each->hold.slots.size());
    if (!each->held && !each->hold.slots.empty())
      return Error{.code = Code::kInternal, .what = fmt::format("session {} pins without a hold", each->name.id)};
  }
  size_t due = 0;
  for (const Session* each : index_.sessions(nullptr)) {
    due += each->demote_at.count() > 0 ? 1 : 0;
    if (each->demote_at.count() > 0 && !due_.contains({each->demote_at, each->name}))
      return Error{.code = Code::kInternal, .what = fmt::format("session {} is never demoted", each->name.id)};
  }
  if (due != due_.size())
    return Error{.code = Code::kInternal, .what = fmt::format("{} sessions are due, not {}", due, due_.size())};
  if (held != held_)
    return Error{.code = Code::kInternal, .what = fmt::format("sessions hold {} slots, not {}", held, held_)};
  return ok();
}

}  // namespace torpor
