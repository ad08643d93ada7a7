// SPDX-License-Identifier: Apache-2.0
// SessionIndex: maps a session, (tenant, id), to the hashes of the blocks of its finished prefixes.
//
// A session has several prefixes if its requests branched. A prefix that begins with an earlier one of the session
// replaces it: the request was its continuation. The index knows for each hash how many sessions want it, and in which
// tier, so that a block that another session wants is not freed with this one.
//
// Its entries and bytes are bounded, all together and for each tenant. When a bound is exceeded it forgets the least
// recently used sessions: of the tenant that exceeds its share, else of the tenant with the most bytes. Sessions that
// hold blocks are forgotten last.
//
// Owner and threads: Residency, on the engine scheduler's thread. Failure: a call that finds no memory throws
// std::bad_alloc before it has changed anything that check() would find.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <compare>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "offload/block_key.h"

namespace torpor {

using BlockHash = std::array<uint8_t, 32>;

struct SessionName {
  std::string tenant;
  std::string id;
  friend auto operator<=>(const SessionName&, const SessionName&) = default;
};
inline constexpr size_t kMostSessionNameBytes = 256;  // of a tenant, or an id

// The nearest tier in which a session wants its blocks.
enum class Residence : uint8_t { kDevice, kHost, kDisk, kRemote };
inline constexpr size_t kResidences = 4;
std::string_view name(Residence residence);  // "device", "host", "disk", "remote"

struct SessionIndexOptions {
  int64_t sessions = 4096;
  int64_t bytes = int64_t{64} << 20;
  double tenant_share = 0.5;  // of both, for one tenant
  Status validate() const;    // kInvalidArgument names the option
};

// Host slots that stay for a session.
struct SessionHold {
  bool hard = false;  // it does not make room for others before its end
  int32_t priority = 0;
  std::chrono::nanoseconds until{};
  std::set<Slot> slots;  // pinned in the BlockIndex
  size_t granted = 0;    // so many at most, as they come
};

struct Session {
  SessionName name;
  std::list<std::vector<BlockHash>> prefixes;  // the newest first; none is empty
  Residence residence = Residence::kDevice;
  uint64_t epoch = 0;  // changes with its prefixes and its residence
  uint64_t used = 0;   // the later it was used, the larger
  bool held = false;   // `hold` counts
  SessionHold hold;
  std::chrono::nanoseconds demote_at{};  // when it is demoted by itself; 0: never
  int64_t cost = 0;                      // bytes of it in the index
  std::list<Session*>::iterator place;   // in the order of use of its tenant
  size_t blocks() const;
  // Call `each(hash)` for the blocks of all prefixes from number `from` on, each once: those of the newest prefix
  // first, from its beginning. Look at `most` blocks at most. Return the number of the first block that it did not look
  // at.
  template <class Each>
  size_t for_each_block(size_t from, size_t most, Each each) const;
};

// A hash covers all tokens before its block. So prefixes have a block in common at the same position only.
template <class Each>
size_t Session::for_each_block(size_t from, size_t most, Each each) const {
  size_t first = 0;  // number of the prefix's first block
  size_t at = from;
  for (auto prefix = prefixes.begin(); prefix != prefixes.end(); first += prefix++->size()) {
    for (; at >= first && at < first + prefix->size(); ++at) {
      if (at - from == most) return at;
      const size_t place = at - first;
      const bool repeated = std::any_of(prefixes.begin(), prefix, [&](const std::vector<BlockHash>& newer) {
        return newer.size() > place && newer[place] == (*prefix)[place];
      });
      if (!repeated) each((*prefix)[place]);
    }
  }
  return at;
}

class SessionIndex {
 public:
  static constexpr size_t kMostPrefixes = 8;  // of a session; the oldest goes
  // Bytes of a session without prefixes and names, of a prefix without blocks, and of a block: upper bounds.
  static constexpr int64_t kSessionBytes = 512;
  static constexpr int64_t kPrefixBytes = 64;
  static constexpr int64_t kBlockBytes = 128;

  // Precondition: options.validate() is ok.
  explicit SessionIndex(const SessionIndexOptions& options) : options_(options) {}

  // Record that a request of the session has ended with these blocks computed; the session's residence is the device
  // then. A chain that is larger than the tenant's share is recorded up to there. Return null if the name is too long,
  // or the chain empty. The result is valid until the next record() or forget().
  Session* record(const SessionName& name, std::span<const BlockHash> chain);
  // Return the session, or null.
  Session* find(const SessionName& name);
  // Note that the session was used.
  void touch(Session& session);
  void move_to(Session& session, Residence residence);
  void forget(Session& session);
  // Return the sessions that were forgotten to make room since the last call; the caller ends their holds.
  std::vector<std::unique_ptr<Session>> take_forgotten() { return std::exchange(forgotten_, {}); }
  std::vector<std::unique_ptr<Session>> clear();

  // Return whether a session wants this block in `residence`, or nearer to the engine.
  bool wanted(const BlockHash& hash, Residence residence) const;
  // Return the sessions of a tenant, the most recently used first; of all tenants if it is null.
  std::vector<Session*> sessions(const std::string* tenant) const;
  // Return the first session of a tenant, of all tenants if it is null, whose name is not before `from`, or, with
  // `behind`, is behind it; null: there is none. The order is that of the names, which no use changes.
  Session* next(const std::string* tenant, const SessionName& from, bool behind) const;
  // Return the tenants that have a session of this id.
  std::vector<std::string> tenants_of(const std::string& id) const;
  size_t size() const { return sessions_.size(); }
  int64_t bytes() const { return bytes_; }
  uint64_t forgotten() const { return times_forgotten_; }  // to make room, since the beginning
  // Check all sums. kInternal names the first contradiction. Takes time proportional to all blocks.
  Status check() const;

 private:
  struct Tenant {
    std::list<Session*> order;  // the least recently used first
    int64_t bytes = 0;
  };
  struct Hashed {
    size_t operator()(const BlockHash& hash) const;
  };
  using Wants = std::array<uint32_t, kResidences>;

  static int64_t cost_of(const Session& session);
  int64_t most_bytes_of_a_tenant() const;
  void count(const Session& session, std::span<const BlockHash> chain, int by);
  void add_prefix(Session& session, std::span<const BlockHash> chain);
  void recost(Session& session);
  void make_room(const Session& keep);
  Session* next_to_go(Tenant& tenant, const Session& keep) const;
  std::unique_ptr<Session> take_out(Session& session);

  const SessionIndexOptions options_;
  std::map<SessionName, std::unique_ptr<Session>> sessions_;
  std::map<std::string, Tenant> tenants_;
  std::unordered_map<BlockHash, Wants, Hashed> wants_;
  std::vector<std::unique_ptr<Session>> forgotten_;
  int64_t bytes_ = 0;
  uint64_t uses_ = 0;
  uint64_t times_forgotten_ = 0;
};

}  // namespace torpor
