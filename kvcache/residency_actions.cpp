// SPDX-License-Identifier: Apache-2.0
// Residency: its calls, and how their actions go on from step to step.
#include <algorithm>
#include <iterator>

#include <fmt/core.h>

#include "kvcache/residency.h"

namespace torpor {
namespace {

// A block needs three copies at most (up, down, on); each may fail once for a reason of the moment.
constexpr int kMostRounds = 6;
constexpr size_t kMostActionBytes = 128;

bool is_in(const BlockLocations& places, StoreId store) {
  return (store == StoreId::kHost ? places.host : store == StoreId::kDisk ? places.disk : places.remote) >= 0;
}

Residence residence_of(StoreId store) { return static_cast<Residence>(static_cast<uint8_t>(store) + 1); }

bool is_hold(SessionVerb verb) { return verb == SessionVerb::kRetain || verb == SessionVerb::kPin; }

SessionAnswer refusal(SessionOutcome outcome, std::string reason, const SessionCall& call) {
  return {.outcome = outcome, .reason = std::move(reason), .action = call.action};
}

}  // namespace

Status Residency::check_call(const SessionCall& call) const {
  const auto wrong = [](std::string what, std::string next) {
    return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next)};
  };
  if (call.name.id.empty() || call.name.id.size() > kMostSessionNameBytes)
    return wrong(fmt::format("a session id of {} bytes", call.name.id.size()),
                 fmt::format("use 1 to {}", kMostSessionNameBytes));
  if (call.action.size() > kMostActionBytes)
    return wrong(fmt::format("an action id of {} bytes", call.action.size()),
                 fmt::format("use at most {}", kMostActionBytes));
  if (is_hold(call.verb) && call.seconds.count() <= 0)
    return wrong("the ttl is not more than 0 seconds", "give how long");
  if (call.device && call.verb != SessionVerb::kPrefetch)
    return wrong("a call to the device that is no prefetch", "use host, disk or remote");
  if (call.verb == SessionVerb::kPrefetch && call.seconds.count() < 0)
    return wrong("the deadline is less than 0 seconds", "give how long, or leave it out");
  return ok();
}

Result<SessionAnswer> Residency::call(const SessionCall& call, uint64_t after_step) {
  return try_catch([&]() -> Result<SessionAnswer> {
    TORPOR_RETURN_IF_ERROR(check_call(call));
    expire();
    if (!call.action.empty()) {
      if (const auto known = actions_.find({call.name.tenant, call.action}); known != actions_.end()) {
        if (known->second->call != call) {
          return Error{.code = Code::kInvalidArgument,
                       .what = fmt::format("the action id {} was given to another call", call.action),
                       .next_step = "give each call an id of its own"};
        }
        SessionAnswer answer = known->second->answer;
        answer.repeated = true;
        return answer;
      }
    }
    Session* const session = index_.find(call.name);
    if (session == nullptr)
      return refusal(SessionOutcome::kMissing, fmt::format("there is no session {}", call.name.id), call);
    if (running_.contains(call.name) && (call.verb == SessionVerb::kDemote || call.verb == SessionVerb::kEvict))
      return refusal(SessionOutcome::kDeferred, "a request of the session is running", call);
    if (call.verb == SessionVerb::kEvict && is_copied(*session))
      return refusal(SessionOutcome::kDeferred, "blocks of the session are being copied", call);
    const bool into_host = call.verb != SessionVerb::kDemote && call.verb != SessionVerb::kEvict;
    const StoreId to = into_host ? StoreId::kHost : call.to;
    if (call.device && !options_.no_device.empty())
      return refusal(SessionOutcome::kRejected, fmt::format("nothing is loaded to the device: {}", options_.no_device),
                     call);
    if (call.verb != SessionVerb::kEvict && !call.device && !has(to))
      return refusal(SessionOutcome::kRejected, fmt::format("this engine has no tier {}", torpor::name(to)), call);
    if (call.verb != SessionVerb::kEvict && is_full())
      return refusal(SessionOutcome::kDeferred, "too many calls of sessions are under way", call);
    index_.touch(*session);
    if (!running_.contains(call.name)) set_demotion(*session, true);
    if (call.verb == SessionVerb::kEvict) {
      auto made = std::make_unique<Action>();
      made->call = call;
      made->answer = evict(*session);
      made->answer.action = call.action;
      return call.action.empty() ? made->answer : remember(std::move(made)).answer;
    }
    return begin_action(call, *session, after_step);
  });
}

Result<SessionAnswer> Residency::answer(const std::string& tenant, const std::string& action) const {
  const auto known = actions_.find({tenant, action});
  if (known != actions_.end()) return known->second->answer;
  return Error{.code = Code::kNotFound,
               .what = fmt::format("there is no action {}", action),
               .next_step = "make the call again"};
}

SessionAnswer Residency::begin_action(const SessionCall& call, Session& session, uint64_t after_step) {
  auto made = std::make_unique<Action>();
  Action& action = *made;
  action.call = call;
  // A caller may have given the same id to another call, which is perhaps under way.
  for (bool named = !call.action.empty(); !named;) {
    action.call.action = fmt::format("#{}", ++named_);
    named = !actions_.contains({call.name.tenant, action.call.action});
  }
  action.answer = {.done = false, .epoch = session.epoch, .action = action.call.action};
  action.keys = keys_of(session);
  if (call.device) action.chains.assign(session.prefixes.rbegin(), session.prefixes.rend());
  if (call.verb == SessionVerb::kPrefetch && call.seconds.count() > 0) action.deadline = clock_.now() + call.seconds;
  if (is_hold(call.verb)) begin_hold(action, session);
  if (call.verb == SessionVerb::kDemote) {  // the newer call counts
    stop_actions(call.name, "the session was demoted meanwhile");
    if (call.to != StoreId::kHost) release(session);
  }
  (void)remember(std::move(made));
  if (!advance(action, after_step)) pending_.push_back(&action);
  return action.answer;
}

// Keep the action, so that its answer can be asked for; forget the oldest ones before it that are done.
Residency::Action& Residency::remember(std::unique_ptr<Action> action) {
  const ActionName name(action->call.name.tenant, action->call.action);
  Action& kept = *(actions_[name] = std::move(action));
  order_.push_back(name);
  for (auto at = order_.begin(); order_.size() > kMostActions && at != std::prev(order_.end());) {
    const auto old = actions_.find(*at);
    if (old != actions_.end() && !old->second->answer.done) {
      ++at;
      continue;
    }
    if (old != actions_.end()) actions_.erase(old);
    at = order_.erase(at);
  }
  return kept;
}

void Residency::begin_hold(Action& action, Session& session) {
  const bool hard = action.call.verb == SessionVerb::kPin;
  const bool long_ttl = action.call.seconds > options_.most_ttl;
  const Time ttl = long_ttl ? Time(options_.most_ttl) : action.call.seconds;
  const auto wanted = static_cast<int64_t>(action.keys.size());
  const auto allowed = static_cast<size_t>(allowed_blocks(session, hard, wanted));
  if (allowed < action.keys.size()) {
    action.clipped = true;
    action.problem = fmt::format("the budget of what sessions hold has room for {} of {} blocks", allowed, wanted);
    action.keys.resize(allowed);
  } else if (long_ttl) {
    action.clipped = true;
    action.problem = fmt::format("the ttl is {} s at most", options_.most_ttl.count());
  }
  const std::set<Slot> before = std::exchange(session.hold.slots, {});
  session.hold.hard = hard;
  session.hold.granted = action.keys.size();
  session.hold.priority = action.call.priority;
  session.hold.until = clock_.now() + ttl;
  session.held = true;
  next_expiry_ = std::min(next_expiry_, session.hold.until);
  place_hold(action);
  for (const Slot slot : before) scheduler_.index().unpin(StoreId::kHost, slot);
  held_ -= static_cast<int64_t>(before.size());
}

// What has not come by now is not held. Another hold of the session may be under way.
void Residency::end_hold(const Action& action, Session& session) const {
  const bool last = std::none_of(pending_.begin(), pending_.end(), [&](const Action* other) {
    return other != &action && other->call.name == session.name && is_hold(other->call.verb);
  });
  if (last) session.hold.granted = session.hold.slots.size();
}

void Residency::advance(uint64_t after_step) {
  expire();
  demote_idle(after_step);
  for (auto at = pending_.begin(); at != pending_.end();) at = advance(**at, after_step) ? pending_.erase(at) : ++at;
}

// Take the action one copy further. Return whether it is done.
bool Residency::advance(Action& action, uint64_t after_step) {
  if (action.deadline.count() > 0 && clock_.now() >= action.deadline && !action.late) {
    action.late = true;
    for (TransferHandle& handle : action.handles) handle.cancel();
  }
  if (action.call.device) return advance_to_device(action);
  if (is_hold(action.call.verb)) place_hold(action);
  for (const TransferHandle& handle : action.handles) {
    if (handle.status() != TransferStatus::kDone) return false;
  }
  for (const TransferHandle& handle : action.handles) {
    for (int i = 0; i < kBlockOutcomes; ++i) {
      const auto outcome = static_cast<BlockOutcome>(i);
      if (handle.count(outcome) == 0 || outcome == BlockOutcome::kTransferred || outcome == BlockOutcome::kPresent ||
          outcome == BlockOutcome::kCancelled)
        continue;
      if (!action.stopped)
        action.problem = handle.cause() ? std::string(torpor::name(outcome)) : handle.cause().error().what;
    }
  }
  action.handles.clear();
  if (!action.late && !action.stopped) {
    const Hop hop = next_hop(action);
    if (!hop.none() && action.rounds < kMostRounds) {
      ++action.rounds;
      start(action, hop, after_step);
      return false;
    }
    if (hop.none() && hop.coming) return false;
  }
  finish(action);
  return true;
}

// Return whether the block is where the action wants it. A demotion brings no block nearer: one that lies only farther
// from the engine stays there.
bool Residency::is_there(const Action& action, const BlockKey& key, const BlockLocations& places) const {
  if (action.call.device) return is_on_device(key);
  if (action.call.verb == SessionVerb::kPrefetch) return places.host >= 0 || is_on_device(key);
  if (action.call.verb != SessionVerb::kDemote) return places.host >= 0;
  return is_in(places, action.call.to) || is_farther(action, key, places);
}

// Return whether a demotion finds the block only farther from the engine than its tier.
bool Residency::is_farther(const Action& action, const BlockKey& key, const BlockLocations& places) const {
  const StoreId to = action.call.to;
  if (to == StoreId::kRemote || is_in(places, to) || is_on_device(key)) return false;
  return to == StoreId::kHost ? places.anywhere() : places.host < 0 && places.remote >= 0;
}

// Return the next copy of each block that is not there. A block that is nowhere needs none.
Residency::Hop Residency::next_hop(const Action& action) const {
  const std::vector<BlockLocations> places = find_each(action.keys);
  const StoreId to = action.call.verb == SessionVerb::kDemote ? action.call.to : StoreId::kHost;
  Hop hop;
  for (size_t i = 0; i < action.keys.size(); ++i) {
    const BlockKey& key = action.keys[i];
    const BlockLocations& at = places[i];
    if (is_there(action, key, at)) continue;
    const StoreId below = has(StoreId::kHost) ? StoreId::kHost : StoreId::kDisk;  // of the device
    if (to != StoreId::kHost && at.host >= 0) {
      if (scheduler_.index().is_coming(to, key)) {
        hop.coming = true;
      } else {
        hop.into[static_cast<size_t>(to)].push_back(key);
      }
      continue;
    }
    if (scheduler_.index().is_coming(below, key)) {
      hop.coming = true;
      continue;
    }
    const int32_t block = device_.find(key);
    if (block >= 0) {
      hop.down.push_back(key);
      hop.blocks.push_back(block);
    } else if (at.anywhere() && has(StoreId::kHost)) {
      hop.into[static_cast<size_t>(StoreId::kHost)].push_back(key);
    }
  }
  return hop;
}

void Residency::start(Action& action, const Hop& hop, uint64_t after_step) {
  const auto add = [&](std::vector<TransferHandle> handles) {
    action.handles.insert(action.handles.end(), handles.begin(), handles.end());
  };
  if (!hop.down.empty()) add(scheduler_.copy_down(hop.down, hop.blocks, after_step));
  for (const StoreId store : {StoreId::kHost, StoreId::kDisk, StoreId::kRemote}) {
    const std::vector<BlockKey>& keys = hop.into[static_cast<size_t>(store)];
    if (!keys.empty()) add(scheduler_.bring(keys, store));
  }
}

void Residency::finish(Action& action) {
  Session* const session = index_.find(action.call.name);
  SessionAnswer& answer = action.answer;
  if (action.call.verb == SessionVerb::kDemote && !action.stopped) {
    finish_demotion(action, session);
  } else {
    const std::vector<BlockLocations> places = find_each(action.keys);
    uint64_t missing = 0;
    for (size_t i = 0; i < places.size(); ++i) {
      if (is_there(action, action.keys[i], places[i])) {
        ++answer.blocks;
      } else {
        ++missing;
      }
    }
    if (missing > 0) {
      answer.outcome = SessionOutcome::kClipped;
      answer.reason = fmt::format("{} of {} blocks are not {}{}{}", missing, places.size(),
                                  action.call.device ? "on the device" : "in host memory",
                                  action.problem.empty() ? "" : ": ", action.problem);
    }
    const Residence nearest = action.call.device ? Residence::kDevice : Residence::kHost;
    const bool some = !action.call.device || answer.blocks > 0;
    if (session != nullptr && session->residence > nearest && some && !action.stopped)
      index_.move_to(*session, nearest);
    if (session != nullptr && action.call.device && !running_.contains(session->name)) set_demotion(*session, true);
  }
  if (action.clipped && answer.outcome == SessionOutcome::kAccepted) {
    answer.outcome = SessionOutcome::kClipped;
    answer.reason = action.problem;
  }
  if (action.late && answer.outcome == SessionOutcome::kClipped) answer.reason = "the deadline has passed";
  if (action.stopped) {
    answer.outcome = SessionOutcome::kClipped;
    answer.reason = action.problem;
  }
  if (session != nullptr) answer.epoch = session->epoch;
  answer.done = true;
  if (session != nullptr && is_hold(action.call.verb)) end_hold(action, *session);
  const bool demotes = action.call.verb == SessionVerb::kDemote;
  const Residence to = demotes              ? residence_of(action.call.to)
                       : action.call.device ? Residence::kDevice
                                            : Residence::kHost;
  counts_.blocks[static_cast<size_t>(action.call.verb)][static_cast<size_t>(to)] += answer.blocks;
  action.keys = {};
  action.chains = {};
}

// Every copy is proven: free what lies nearer to the engine, unless somebody wants it there.
void Residency::finish_demotion(Action& action, Session* session) {
  SessionAnswer& answer = action.answer;
  const StoreId to = action.call.to;
  if (session != nullptr && !action.begun && session->residence < residence_of(to))
    index_.move_to(*session, residence_of(to));
  const std::vector<BlockLocations> places = find_each(action.keys);
  std::array<std::vector<BlockKey>, kStores> dropped;
  uint64_t missing = 0;
  uint64_t somewhere = 0;
  for (size_t i = 0; i < action.keys.size(); ++i) {
    const BlockKey& key = action.keys[i];
    // On disk a block outlives host memory, so it is freed also where host memory has no room for it.
    const bool there = is_in(places[i], to) || (to == StoreId::kHost && is_in(places[i], StoreId::kDisk));
    const bool lost = !places[i].anywhere() && !is_on_device(key);
    somewhere += lost ? 0 : 1;
    answer.blocks += is_in(places[i], to) ? 1 : 0;
    missing += there || lost || is_farther(action, key, places[i]) ? 0 : 1;
    if (!there || action.begun) continue;
    if (index_.wanted(key.hash, Residence::kDevice)) {
      answer.kept += is_on_device(key) ? 1 : 0;
    } else {
      const DeviceCache::Evicted evicted = device_.evict(key);
      answer.freed += evicted.blocks;
      answer.kept += evicted.in_use;
    }
    for (const StoreId nearer : {StoreId::kHost, StoreId::kDisk}) {
      if (nearer < to && !index_.wanted(key.hash, residence_of(nearer)))
        dropped[static_cast<size_t>(nearer)].push_back(key);
    }
  }
  for (const StoreId nearer : {StoreId::kHost, StoreId::kDisk}) {
    const std::vector<BlockKey>& keys = dropped[static_cast<size_t>(nearer)];
    if (!keys.empty()) answer.kept += scheduler_.drop(keys, nearer).pinned;
  }
  counts_.freed += answer.freed;
  if (action.begun) {
    answer.outcome = SessionOutcome::kClipped;
    answer.reason = "a request of the session began meanwhile: nothing was freed";
  } else if (missing > 0) {
    answer.outcome = SessionOutcome::kClipped;
    answer.reason = fmt::format("{} of {} blocks were not copied, and stay{}{}", missing, action.keys.size(),
                                action.problem.empty() ? "" : ": ", action.problem);
  } else if (somewhere == 0) {
    answer.outcome = SessionOutcome::kMissing;
    answer.reason = "no tier has a block of the session any more";
  }
}

// Return whether blocks of the session are on their way to another tier or to the device. They would be there after an
// eviction.
bool Residency::is_copied(const Session& session) const {
  if (is_loading(session.name)) return true;
  const std::vector<BlockKey> keys = keys_of(session);
  return std::any_of(keys.begin(), keys.end(), [&](const BlockKey& key) {
    return scheduler_.index().is_coming(StoreId::kHost, key) || scheduler_.index().is_coming(StoreId::kDisk, key);
  });
}

SessionAnswer Residency::evict(Session& session) {
  stop_actions(session.name, "the session was evicted meanwhile");
  set_demotion(session, false);
  release(session);
  const std::vector<BlockKey> keys = keys_of(session);
  SessionAnswer answer{.epoch = session.epoch};
  index_.forget(session);  // so that only others count
  std::vector<BlockKey> dropped;
  for (const BlockKey& key : keys) {
    if (index_.wanted(key.hash, Residence::kRemote)) {
      ++answer.kept;
      continue;
    }
    const DeviceCache::Evicted evicted = device_.evict(key);
    answer.freed += evicted.blocks;
    answer.kept += evicted.in_use;
    dropped.push_back(key);
  }
  for (const StoreId store : {StoreId::kHost, StoreId::kDisk}) {
    const DroppedKeys done = scheduler_.drop(dropped, store);
    answer.blocks += done.dropped;
    answer.kept += done.pinned;
    counts_.blocks[static_cast<size_t>(SessionVerb::kEvict)][static_cast<size_t>(residence_of(store))] += done.dropped;
  }
  counts_.freed += answer.freed;
  counts_.blocks[static_cast<size_t>(SessionVerb::kEvict)][static_cast<size_t>(Residence::kDevice)] += answer.freed;
  return answer;
}

// End the session's actions as soon as what they have begun has ended.
void Residency::stop_actions(const SessionName& name, std::string_view why) {
  for (Action* action : pending_) {
    if (action->call.name != name) continue;
    action->stopped = true;
    action->problem = why;
    for (TransferHandle& handle : action->handles) handle.cancel();
  }
}

// ---- to the device

// Load one prefix after the other. Return whether the action is done.
bool Residency::advance_to_device(Action& action) {
  if (is_loading(action.call.name)) return false;
  while (!action.late && !action.stopped && !action.chains.empty()) {
    const std::vector<BlockHash> chain = std::move(action.chains.back());
    action.chains.pop_back();
    if (start_load(action, chain)) return false;
  }
  finish(action);
  return true;
}

// Load those blocks of the prefix that the device lacks into free ones. Return false if there is nothing to load, or
// no room.
bool Residency::start_load(Action& action, std::span<const BlockHash> chain) {
  std::list<DeviceLoad> made(1);
  DeviceLoad& load = made.front();
  load.session = action.call.name;
  for (const BlockHash& hash : chain) load.keys.push_back({.hash = hash, .group = 0, .space = scheduler_.space()});
  for (const BlockKey& key : load.keys) {
    const int32_t block = device_.find(key);
    if (block < 0) break;
    load.used.push_back(block);
  }
  device_.use(load.used);  // the free blocks to be taken are others
  load.request = scheduler_.begin_request("");
  const auto found = static_cast<size_t>(scheduler_.match(load.request, load.keys, load.used.size()));
  size_t loading = 0;
  for (const DeviceLoad& each : loads_) loading += each.taken.size();
  const auto most = static_cast<size_t>(static_cast<double>(device_.free_blocks() + loading) * options_.prefetch_share);
  const size_t allowed = std::min(found, most - std::min(most, loading));
  if (allowed < found)
    action.problem = fmt::format("the budget of free blocks has room for {} of {} blocks", allowed, found);
  if (allowed > 0) load.taken = device_.take(allowed);
  if (!load.taken.empty()) {
    loads_.splice(loads_.end(), made);
    (void)scheduler_.allocated(load.request, load.taken);
    return true;
  }
  (void)scheduler_.finished(load.request);
  std::reverse(load.used.begin(), load.used.end());
  device_.release(load.used);
  return false;
}

bool Residency::is_loading(const SessionName& name) const {
  return std::any_of(loads_.begin(), loads_.end(), [&](const DeviceLoad& load) { return load.session == name; });
}

bool Residency::loaded(const EndedLoad& ended) {
  const auto load =
      std::find_if(loads_.begin(), loads_.end(), [&](const DeviceLoad& each) { return each.request == ended.request; });
  if (load == loads_.end()) return false;
  size_t good = 0;
  for (const size_t first = load->used.size(); good < static_cast<size_t>(ended.good_blocks); ++good) {
    if (!device_.enter(std::span(load->keys).first(first + good + 1), load->taken[good])) break;
  }
  scheduler_.loaded(load->request, std::span(load->taken).first(good));
  (void)scheduler_.finished(load->request);
  std::vector<int32_t> blocks = load->used;
  if (!ended.unproven) blocks.insert(blocks.end(), load->taken.begin(), load->taken.end());
  std::reverse(blocks.begin(), blocks.end());  // the end of a prefix is of no use without its beginning
  device_.release(blocks);
  loads_.erase(load);
  return true;
}

// ---- by itself

// Set the time of the session's demotion anew, but not before `earliest`, or let it have none.
void Residency::set_demotion(Session& session, bool wanted, Time earliest) {
  if (session.demote_at.count() > 0) due_.erase({session.demote_at, session.name});
  session.demote_at = {};
  if (!wanted || options_.idle.count() == 0) return;
  const Time at = std::max(clock_.now() + options_.idle, earliest);
  due_.insert({at, session.name});
  session.demote_at = at;
}

void Residency::demote_idle(uint64_t after_step) {
  const Time now = clock_.now();  // what is put off below is due later
  while (!due_.empty() && due_.begin()->first <= now && !is_full()) {
    Session& session = *index_.find(due_.begin()->second);
    set_demotion(session, false);
    const bool called = std::any_of(pending_.begin(), pending_.end(),
                                    [&](const Action* action) { return action->call.name == session.name; });
    if (called) {  // its caller knows better
      set_demotion(session, true);
      continue;
    }
    // A hold lasts as long as was said; when it has ended, the blocks go the rest of the way.
    const StoreId to = session.held ? StoreId::kHost : options_.idle_to;
    if (to != options_.idle_to) set_demotion(session, true, session.hold.until);
    if (session.residence >= residence_of(to)) continue;
    ++counts_.idle;
    (void)begin_action({.name = session.name, .to = to}, session, after_step);
  }
}

}  // namespace torpor
