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
  return ok();
}

Result<std::unique_ptr<Residency>> Residency::create(const ResidencyOptions& options, OffloadScheduler& scheduler,
                                                     DeviceCache& device, const Clock& clock) {
  return try_catch([&]() -> Result<std::unique_ptr<Residency>> {
    TORPOR_RETURN_IF_ERROR(options.validate());
    std::unique_ptr<Residency> made(new Residency(options, scheduler, device, clock));
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
  std::set<BlockHash> known;
  for (const auto& prefix : session.prefixes) {
    for (const BlockHash& hash : prefix) {
      if (!known.insert(hash).second) continue;
      for (uint32_t group = 0; group < options_.groups; ++group)
        keys.push_back({.hash = hash, .group = group, .space = scheduler_.space()});
    }
  }
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
  for (Action* action : pending_) action->begun = action->begun || action->call.name == name;
}

void Residency::finished(const SessionName& name, std::span<const BlockHash> chain, uint64_t after_step) {
  if (const auto running = running_.find(name); running != running_.end() && --running->second == 0)
    running_.erase(running);
  Session* const session = index_.record(name, chain);
  end_forgotten();
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
  for (const auto& session : index_.take_forgotten()) release(*session);
}

void Residency::reset() {
  for (Action* action : pending_) {
    action->answer.outcome = SessionOutcome::kRejected;
    action->answer.reason = "the weights have changed: nothing that was computed before is found";
    action->answer.done = true;
    action->handles.clear();
    action->keys = {};
  }
  pending_.clear();
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
      const auto slots = static_cast<int64_t>(each->hold.slots.size());
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

// Pin those of the action's blocks that are in host memory.
void Residency::place_hold(const Action& action) {
  Session* const session = index_.find(action.call.name);
  if (session == nullptr || !session->held) return;
  for (const BlockLocations& places : find_each(action.keys)) {
    if (places.host < 0 || !session->hold.slots.insert(places.host).second) continue;
    scheduler_.index().pin(StoreId::kHost, places.host);
    ++held_;
  }
}

// ---- what there is

std::vector<SessionView> Residency::list(const std::string* tenant) {
  expire();  // an engine without requests takes no steps
  std::vector<SessionView> views;
  for (const Session* each : index_.sessions(tenant)) {
    SessionView view{.name = each->name,
                     .epoch = each->epoch,
                     .residence = each->residence,
                     .prefixes = each->prefixes.size(),
                     .held = each->held,
                     .pinned = each->held && each->hold.hard,
                     .priority = each->held ? each->hold.priority : 0,
                     .held_blocks = each->hold.slots.size()};
    const std::vector<BlockKey> keys = keys_of(*each);
    const std::vector<BlockLocations> places = find_each(keys);
    view.blocks = keys.size();
    for (size_t i = 0; i < keys.size(); ++i) {
      view.device += is_on_device(keys[i]) ? 1 : 0;
      view.host += places[i].host >= 0 ? 1 : 0;
      view.disk += places[i].disk >= 0 ? 1 : 0;
      view.remote += places[i].remote >= 0 ? 1 : 0;
    }
    if (const auto running = running_.find(each->name); running != running_.end()) view.running = running->second;
    if (each->held) view.seconds_left = seconds_between(clock_.now(), each->hold.until);
    views.push_back(std::move(view));
  }
  return views;
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
  if (held != held_)
    return Error{.code = Code::kInternal, .what = fmt::format("sessions hold {} slots, not {}", held, held_)};
  return ok();
}

}  // namespace torpor
