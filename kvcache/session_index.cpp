// SPDX-License-Identifier: Apache-2.0
#include "kvcache/session_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/core.h>

namespace torpor {
namespace {

bool begins_with(std::span<const BlockHash> chain, std::span<const BlockHash> with) {
  return with.size() <= chain.size() && std::equal(with.begin(), with.end(), chain.begin());
}

Error contradiction(std::string what) {
  return {.code = Code::kInternal, .what = std::move(what), .next_step = "report this"};
}

}  // namespace

std::string_view name(Residence residence) {
  switch (residence) {
    case Residence::kDevice: return "device";
    case Residence::kHost: return "host";
    case Residence::kDisk: return "disk";
    case Residence::kRemote: return "remote";
  }
  return "?";
}

Status SessionIndexOptions::validate() const {
  const auto wrong = [](std::string what, std::string next) {
    return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next)};
  };
  if (sessions < 1) return wrong(fmt::format("sessions is {}", sessions), "use 1 or more");
  if (bytes < 1 << 16) return wrong(fmt::format("the index of sessions has {} bytes", bytes), "use 65536 or more");
  if (!(tenant_share > 0 && tenant_share <= 1))
    return wrong(fmt::format("tenant_share is {}", tenant_share), "use more than 0, and at most 1");
  return ok();
}

size_t Session::blocks() const {
  size_t blocks = 0;
  for (const auto& prefix : prefixes) blocks += prefix.size();
  return blocks;
}

size_t SessionIndex::Hashed::operator()(const BlockHash& hash) const {
  size_t value = 0;  // the engine's hashes are random enough
  std::memcpy(&value, hash.data(), sizeof value);
  return value;
}

int64_t SessionIndex::cost_of(const Session& session) {
  return kSessionBytes + 2 * static_cast<int64_t>(session.name.tenant.size() + session.name.id.size()) +
         kPrefixBytes * static_cast<int64_t>(session.prefixes.size()) +
         kBlockBytes * static_cast<int64_t>(session.blocks());
}

int64_t SessionIndex::most_bytes_of_a_tenant() const {
  return static_cast<int64_t>(static_cast<double>(options_.bytes) * options_.tenant_share);
}

// Add `by` to the numbers of sessions that want these blocks where this session has its own.
void SessionIndex::count(const Session& session, std::span<const BlockHash> chain, int by) {
  for (const BlockHash& hash : chain) {
    Wants& wants = wants_[hash];
    wants[static_cast<size_t>(session.residence)] += static_cast<uint32_t>(by);
    if (by < 0 && wants == Wants{}) wants_.erase(hash);
  }
}

Session* SessionIndex::record(const SessionName& name, std::span<const BlockHash> chain) {
  if (name.tenant.size() > kMostSessionNameBytes || name.id.size() > kMostSessionNameBytes || name.id.empty() ||
      chain.empty()) {
    return nullptr;
  }
  const int64_t room = most_bytes_of_a_tenant() - kSessionBytes - kPrefixBytes -
                       2 * static_cast<int64_t>(name.tenant.size() + name.id.size());
  chain = chain.first(std::min(chain.size(), static_cast<size_t>(std::max<int64_t>(room / kBlockBytes, 1))));
  Session* session = find(name);
  if (session == nullptr) {
    auto made = std::make_unique<Session>();
    made->name = name;
    session = made.get();
    std::list<Session*>& order = tenants_[name.tenant].order;
    session->place = order.insert(order.end(), session);
    sessions_.emplace(name, std::move(made));
  }
  touch(*session);
  move_to(*session, Residence::kDevice);
  add_prefix(*session, chain);
  ++session->epoch;
  recost(*session);
  make_room(*session);
  return session;
}

// Replace the prefixes that `chain` continues. A chain that an earlier prefix contains adds nothing.
void SessionIndex::add_prefix(Session& session, std::span<const BlockHash> chain) {
  for (auto at = session.prefixes.begin(); at != session.prefixes.end();) {
    if (at->size() > chain.size() && begins_with(*at, chain)) {
      session.prefixes.splice(session.prefixes.begin(), session.prefixes, at);
      return;
    }
    if (begins_with(chain, *at)) {
      count(session, *at, -1);
      at = session.prefixes.erase(at);
    } else {
      ++at;
    }
  }
  session.prefixes.emplace_front(chain.begin(), chain.end());
  count(session, chain, 1);
  const auto drop_last = [&] {
    count(session, session.prefixes.back(), -1);
    session.prefixes.pop_back();
  };
  while (session.prefixes.size() > kMostPrefixes) drop_last();
  while (session.prefixes.size() > 1 && cost_of(session) > most_bytes_of_a_tenant()) drop_last();
}

Session* SessionIndex::find(const SessionName& name) {
  const auto found = sessions_.find(name);
  return found == sessions_.end() ? nullptr : found->second.get();
}

void SessionIndex::touch(Session& session) {
  std::list<Session*>& order = tenants_[session.name.tenant].order;
  order.splice(order.end(), order, session.place);
  session.used = ++uses_;
}

void SessionIndex::move_to(Session& session, Residence residence) {
  if (session.residence == residence) return;
  for (const auto& prefix : session.prefixes) count(session, prefix, -1);
  session.residence = residence;
  for (const auto& prefix : session.prefixes) count(session, prefix, 1);
  ++session.epoch;
}

void SessionIndex::recost(Session& session) {
  const int64_t more = cost_of(session) - session.cost;
  session.cost += more;
  bytes_ += more;
  tenants_[session.name.tenant].bytes += more;
}

// Return the tenant's least recently used session but for `keep`; if there is one, one that holds nothing.
Session* SessionIndex::next_to_go(Tenant& tenant, const Session& keep) const {
  Session* held = nullptr;
  for (Session* each : tenant.order) {
    if (each == &keep) continue;
    if (!each->held) return each;
    if (held == nullptr) held = each;
  }
  return held;
}

void SessionIndex::make_room(const Session& keep) {
  const auto most_sessions = static_cast<size_t>(
      std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(options_.sessions) * options_.tenant_share)));
  const auto forget_one_of = [&](Tenant& tenant) {
    Session* const session = next_to_go(tenant, keep);
    if (session == nullptr) return false;
    forgotten_.push_back(take_out(*session));
    ++times_forgotten_;
    return true;
  };
  Tenant& own = tenants_[keep.name.tenant];
  while ((own.order.size() > most_sessions || own.bytes > most_bytes_of_a_tenant()) && forget_one_of(own)) {}
  while (bytes_ > options_.bytes || static_cast<int64_t>(sessions_.size()) > options_.sessions) {
    Tenant* largest = nullptr;
    for (auto& [id, tenant] : tenants_) {
      if (next_to_go(tenant, keep) != nullptr && (largest == nullptr || tenant.bytes > largest->bytes))
        largest = &tenant;
    }
    if (largest == nullptr || !forget_one_of(*largest)) return;
  }
}

std::unique_ptr<Session> SessionIndex::take_out(Session& session) {
  for (const auto& prefix : session.prefixes) count(session, prefix, -1);
  const auto tenant = tenants_.find(session.name.tenant);
  tenant->second.order.erase(session.place);
  tenant->second.bytes -= session.cost;
  bytes_ -= session.cost;
  if (tenant->second.order.empty()) tenants_.erase(tenant);
  const auto found = sessions_.find(session.name);
  std::unique_ptr<Session> taken = std::move(found->second);
  sessions_.erase(found);
  return taken;
}

void SessionIndex::forget(Session& session) { (void)take_out(session); }

std::vector<std::unique_ptr<Session>> SessionIndex::clear() {
  std::vector<std::unique_ptr<Session>> taken = take_forgotten();
  taken.reserve(taken.size() + sessions_.size());
  for (auto& [name, session] : sessions_) taken.push_back(std::move(session));
  sessions_.clear();
  tenants_.clear();
  wants_.clear();
  bytes_ = 0;
  return taken;
}

bool SessionIndex::wanted(const BlockHash& hash, Residence residence) const {
  const auto found = wants_.find(hash);
  if (found == wants_.end()) return false;
  const Wants& wants = found->second;
  const auto end = wants.begin() + static_cast<std::ptrdiff_t>(residence) + 1;
  return std::any_of(wants.begin(), end, [](uint32_t count) { return count > 0; });
}

std::vector<Session*> SessionIndex::sessions(const std::string* tenant) const {
  std::vector<Session*> found;
  for (const auto& [id, each] : tenants_) {
    if (tenant == nullptr || id == *tenant) found.insert(found.end(), each.order.rbegin(), each.order.rend());
  }
  return found;
}

Session* SessionIndex::next(const std::string* tenant, const SessionName& from, bool behind) const {
  const SessionName first = tenant == nullptr || from.tenant >= *tenant ? from : SessionName{.tenant = *tenant};
  const auto at = behind && first == from ? sessions_.upper_bound(first) : sessions_.lower_bound(first);
  if (at == sessions_.end() || (tenant != nullptr && at->first.tenant != *tenant)) return nullptr;
  return at->second.get();
}

std::vector<std::string> SessionIndex::tenants_of(const std::string& id) const {
  std::vector<std::string> found;
  for (const auto& [tenant, of_tenant] : tenants_) {
    if (sessions_.contains({.tenant = tenant, .id = id})) found.push_back(tenant);
  }
  return found;
}

Status SessionIndex::check() const {
  int64_t bytes = 0;
  size_t ordered = 0;
  std::unordered_map<BlockHash, Wants, Hashed> wants;
  for (const auto& [name, session] : sessions_) {
    if (session->name != name) return contradiction("a session has another name than its entry");
    if (session->prefixes.empty() || session->prefixes.size() > kMostPrefixes)
      return contradiction(fmt::format("session {} has {} prefixes", name.id, session->prefixes.size()));
    for (const auto& prefix : session->prefixes) {
      for (const BlockHash& hash : prefix) ++wants[hash][static_cast<size_t>(session->residence)];
    }
    if (session->cost != cost_of(*session)) return contradiction(fmt::format("session {} has another cost", name.id));
    bytes += session->cost;
  }
  if (bytes != bytes_) return contradiction(fmt::format("the sessions have {} bytes, not {}", bytes, bytes_));
  if (wants != wants_) return contradiction("the counts of wanted blocks differ from the sessions' blocks");
  for (const auto& [id, tenant] : tenants_) {
    int64_t of_tenant = 0;
    for (const Session* each : tenant.order) of_tenant += each->cost;
    if (of_tenant != tenant.bytes || tenant.order.empty()) return contradiction("a tenant has another cost");
    ordered += tenant.order.size();
  }
  return ordered == sessions_.size() ? ok() : Status(contradiction("a session is in no tenant's order"));
}

}  // namespace torpor
