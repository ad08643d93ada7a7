// SPDX-License-Identifier: Apache-2.0
// Residency: where the blocks of finished sessions lie, by call: demote, prefetch, retain, pin and evict.
//
// A call answers at once. What it copies goes through OffloadScheduler's queue: advance(), called in each step before
// plan_step(), takes the action on until it is done.
//
//   demote    copies the blocks to the tier, and frees those nearer to the engine after every rank has proved its copy
//   prefetch  copies blocks of disk and of the remote store to host memory; or those of all tiers to the device, into
//             free blocks of the engine, which a lookup finds then and which make room for others as all free ones do
//   retain    keeps blocks in host memory for a time; if others need the room, the lowest priority makes it first
//   pin       the same, and makes no room; within the budget of all holds
//   evict     drops the blocks from all tiers of this engine, and forgets the session
//
// All of them are hints about copies: a block that is lost is computed again, with the same tokens. A block that
// another session wants in a tier nearer to the engine stays there. With ResidencyOptions::idle a session whose
// requests have all ended is demoted by itself after that time, unless it was used meanwhile.
//
// Owner and threads: the engine scheduler's thread, as OffloadScheduler. Failure: a call that is wrong returns
// kInvalidArgument; what cannot be done now has an outcome with its reason.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/offload_scheduler.h"
#include "kvcache/session_index.h"

namespace torpor {

// The engine's prefix cache on the device.
class DeviceCache {
 public:
  virtual ~DeviceCache() = default;
  // Return a block that a lookup of this key finds; -1: none.
  virtual int32_t find(const BlockKey& key) const = 0;
  struct Evicted {
    uint64_t blocks = 0;
    uint64_t in_use = 0;  // a request has them: they stay
  };
  // Have no lookup find the blocks of this key, but for those that a request uses.
  virtual Evicted evict(const BlockKey& key) = 0;

  // Blocks that no request has, cached ones among them.
  virtual size_t free_blocks() const = 0;
  // Take free blocks, the least recently used first. No lookup finds them any more. Empty: there are not so many.
  virtual std::vector<int32_t> take(size_t blocks) = 0;
  // Have nobody take these blocks before they are released.
  virtual void use(std::span<const int32_t> blocks) = 0;
  // Have lookups find a taken block by the last key of `prefix`, which has the keys from the first block on. Return
  // whether they do.
  virtual bool enter(std::span<const BlockKey> prefix, int32_t block) = 0;
  // End take() and use(). The first of the blocks is taken first again.
  virtual void release(std::span<const int32_t> blocks) = 0;
};

struct ResidencyOptions {
  SessionIndexOptions index;
  uint32_t groups = 1;     // KV cache groups of the engine
  double pin_share = 0.5;  // of the host slots: most that all sessions hold; one tenant: index.tenant_share of that
  std::chrono::seconds most_ttl{86400};
  double prefetch_share = 0.5;      // of the device's free blocks: most that prefetches load into at a time
  std::string no_device{};          // why nothing is prefetched to the device; empty: it is
  std::chrono::nanoseconds idle{};  // after which a session is demoted by itself; 0: never
  StoreId idle_to = StoreId::kHost;
  Status validate() const;  // kInvalidArgument names the option
};

enum class SessionVerb : uint8_t { kDemote, kPrefetch, kRetain, kPin, kEvict };
inline constexpr size_t kSessionVerbs = 5;
std::string_view name(SessionVerb verb);  // "demote", …

// kClipped: a part was done. kDeferred: call again later. kRejected: it cannot be done. kMissing: no such session.
enum class SessionOutcome : uint8_t { kAccepted, kClipped, kDeferred, kRejected, kMissing };
std::string_view name(SessionOutcome outcome);  // "accepted", …

struct SessionCall {
  SessionVerb verb = SessionVerb::kDemote;
  SessionName name;
  StoreId to = StoreId::kHost;         // kDemote
  bool device = false;                 // kPrefetch: to the device
  std::chrono::nanoseconds seconds{};  // kRetain, kPin: how long; kPrefetch: the deadline, 0: none
  int32_t priority = 0;                // kRetain
  std::string action;                  // an id of this call; empty: it is not repeated
  friend bool operator==(const SessionCall&, const SessionCall&) = default;
};

struct SessionAnswer {
  SessionOutcome outcome = SessionOutcome::kAccepted;
  std::string reason;     // unless it is accepted as a whole
  bool done = true;       // false: ask answer() again
  bool repeated = false;  // the answer of an earlier call of the same action
  uint64_t blocks = 0;    // in the tier; kEvict: dropped
  uint64_t freed = 0;     // freed from the device
  uint64_t kept = 0;      // not freed: requests or other sessions want them
  uint64_t epoch = 0;     // of the session
  std::string action;
};

struct SessionView {
  SessionName name;
  uint64_t epoch = 0;
  uint64_t used = 0;  // the later it was used, the larger
  Residence residence = Residence::kDevice;
  uint64_t prefixes = 0;
  uint64_t blocks = 0;  // different ones, of all groups
  uint64_t device = 0;  // of these, in each tier
  uint64_t host = 0;
  uint64_t disk = 0;
  uint64_t remote = 0;
  uint64_t running = 0;  // requests
  bool held = false;
  bool pinned = false;  // held hard
  int32_t priority = 0;
  double seconds_left = 0;  // of the hold
  uint64_t held_blocks = 0;
};

// Where a list of sessions goes on. An empty name: at its beginning.
struct SessionCursor {
  SessionName name;
  bool listed = false;                             // the list goes on behind this session; else within it:
  uint64_t epoch = 0;                              // of the session, when it was begun
  uint64_t begun = 0;                              // how often, because it changed meanwhile
  uint64_t looked_at = 0;                          // blocks of its prefixes
  std::array<uint64_t, 1 + kResidences> counts{};  // different ones; then those in each tier
};

struct SessionPage {
  std::vector<SessionView> views;     // by name
  std::optional<SessionCursor> next;  // none: the list is complete
};

struct ResidencyCounts {
  // By verb and residence: blocks that were in the tier when an action was done.
  std::array<std::array<uint64_t, kResidences>, kSessionVerbs> blocks{};
  uint64_t freed = 0;
  uint64_t idle = 0;  // demotions of sessions by themselves
  uint64_t forgotten = 0;
  uint64_t sessions = 0;
  uint64_t held = 0;  // host slots
  uint64_t index_bytes = 0;
};

class Residency {
 public:
  static constexpr size_t kMostActions = 4096;  // whose answers are remembered
  // Of actions that are not done, and of their keys. Beyond them a call is deferred, and a hold is not extended.
  static constexpr size_t kMostPending = 2048;
  static constexpr size_t kMostPendingKeys = size_t{1} << 20;
  // Of a page of list(): blocks whose places are looked up, and sessions.
  static constexpr size_t kPageBlocks = 4096;
  // A session that changes so often while it is counted is listed with what was counted until then.
  static constexpr uint64_t kMostBegun = 4;

  // All outlive the result. kInvalidArgument: invalid options.
  static Result<std::unique_ptr<Residency>> create(const ResidencyOptions& options, OffloadScheduler& scheduler,
                                                   DeviceCache& device, const Clock& clock);
  ~Residency();

  // A request of the session begins, and ends. `chain`: the hashes of its full blocks that were computed; empty: none.
  // Here and below, `after_step` is the last step that the engine began: blocks are read once it is acknowledged.
  void begin(const SessionName& name);
  void finished(const SessionName& name, std::span<const BlockHash> chain, uint64_t after_step);
  Result<SessionAnswer> call(const SessionCall& call, uint64_t after_step);
  // Return the present answer of an action. kNotFound: there is none of this tenant.
  Result<SessionAnswer> answer(const std::string& tenant, const std::string& action) const;
  void advance(uint64_t after_step);
  // Return whether an action is not done: the engine must go on stepping.
  bool busy() const { return !pending_.empty() || is_due(); }
  // Return whether a session is to be demoted by itself now.
  bool is_due() const { return !due_.empty() && due_.begin()->first <= clock_.now(); }
  // Return whether blocks of this session, or of any, are on their way to the device.
  bool is_loading(const SessionName& name) const;
  bool is_loading_any() const { return !loads_.empty(); }
  // Take the end of a load. Return false if it is none of a prefetch.
  bool loaded(const EndedLoad& ended);
  // Return whether a session holds blocks, or is to be demoted by itself, so that advance() has ends to look for.
  bool holds() const { return next_expiry_ != Time::max() || !due_.empty(); }
  // The blocks are not found any more. Forgets all sessions.
  void reset();

  // Return the next sessions of a tenant, or of all if it is null; from the beginning without a cursor. Looks at `most`
  // blocks and sessions at most. Each session that there is all the time is listed once.
  SessionPage list(const std::string* tenant, const SessionCursor& from = {}, size_t most = kPageBlocks);
  // Return the tenants that have a session of this id.
  std::vector<std::string> tenants_of(const std::string& id) const { return index_.tenants_of(id); }
  ResidencyCounts counts() const;
  Status check() const;

 private:
  using Time = std::chrono::nanoseconds;
  struct Action {
    SessionCall call;
    SessionAnswer answer;
    std::vector<BlockKey> keys;
    std::vector<TransferHandle> handles;
    Time deadline{};  // 0: none
    int rounds = 0;
    bool late = false;     // its deadline has passed
    bool stopped = false;  // what it is for is no more wanted
    bool begun = false;    // a request of the session has begun since
    bool clipped = false;  // keys are fewer than the session has
    std::string problem;   // why blocks were not copied
    // kPrefetch to the device: its prefixes that are not looked at yet, the newest last.
    std::vector<std::vector<BlockHash>> chains;
  };
  // A load into the device, from its request in the OffloadScheduler to loaded().
  struct DeviceLoad {
    uint32_t request = 0;
    SessionName session;
    std::vector<BlockKey> keys;  // of the prefix
    std::vector<int32_t> used;   // blocks of the first of them, which were there
    std::vector<int32_t> taken;  // of the next ones
  };
  using ActionName = std::pair<std::string, std::string>;  // tenant, action
  struct Hop {
    std::vector<BlockKey> down;   // from the device
    std::vector<int32_t> blocks;  // of `down`
    std::array<std::vector<BlockKey>, kStores> into;
    bool coming = false;  // another copy is on its way
    bool none() const { return down.empty() && into[0].empty() && into[1].empty() && into[2].empty(); }
  };

  Residency(const ResidencyOptions& options, OffloadScheduler& scheduler, DeviceCache& device, const Clock& clock)
      : options_(options), scheduler_(scheduler), device_(device), clock_(clock), index_(options.index) {}
  Status check_call(const SessionCall& call) const;
  bool has(StoreId store) const;
  bool is_full() const;
  std::vector<BlockKey> keys_of(const Session& session) const;
  std::vector<BlockLocations> find_each(std::span<const BlockKey> keys) const;
  void count(const Session& session, SessionCursor& at, size_t most) const;
  SessionView view_of(const Session& session, const SessionCursor& counted) const;
  bool is_on_device(const BlockKey& key) const { return device_.find(key) >= 0; }

  // residency_actions.cpp
  Action& remember(std::unique_ptr<Action> action);
  SessionAnswer begin_action(const SessionCall& call, Session& session, uint64_t after_step);
  bool advance(Action& action, uint64_t after_step);
  Hop next_hop(const Action& action) const;
  bool is_there(const Action& action, const BlockKey& key, const BlockLocations& places) const;
  bool is_farther(const Action& action, const BlockKey& key, const BlockLocations& places) const;
  void start(Action& action, const Hop& hop, uint64_t after_step);
  void finish(Action& action);
  void finish_demotion(Action& action, Session* session);
  SessionAnswer evict(Session& session);
  bool is_copied(const Session& session) const;
  void stop_actions(const SessionName& name, std::string_view why);
  bool advance_to_device(Action& action);
  bool start_load(Action& action, std::span<const BlockHash> chain);
  void set_demotion(Session& session, bool wanted, Time earliest = {});
  void demote_idle(uint64_t after_step);

  void begin_hold(Action& action, Session& session);
  void end_hold(const Action& action, Session& session) const;
  int64_t allowed_blocks(const Session& session, bool hard, int64_t wanted);
  void place_hold(const Action& action);
  void release(Session& session);
  bool release_softest(const Session* except, const std::string* tenant);
  void end_forgotten();
  void expire();

  const ResidencyOptions options_;
  OffloadScheduler& scheduler_;
  DeviceCache& device_;
  const Clock& clock_;
  SessionIndex index_;
  std::map<SessionName, uint64_t> running_;  // requests
  std::map<ActionName, std::unique_ptr<Action>> actions_;
  std::list<ActionName> order_;  // of actions_, the oldest first
  std::list<Action*> pending_;
  std::list<DeviceLoad> loads_;
  std::set<std::pair<Time, SessionName>> due_;  // by Session::demote_at
  uint64_t named_ = 0;                          // actions that were given an id here
  Time next_expiry_ = Time::max();
  int64_t held_ = 0;  // host slots, over all sessions
  ResidencyCounts counts_;
};

}  // namespace torpor
