// SPDX-License-Identifier: Apache-2.0
// OffloadScheduler: decides for all ranks which KV blocks are moved where and when. It knows keys, slots and pins and
// touches no bytes (S4); OffloadWorkers run its plans.
//
// Its methods follow the hooks of an engine's scheduler, in order: match() when a request may be admitted, allocated()
// when it has its blocks, offer() for blocks that became full, plan_step() once a step, apply() for each rank's report,
// finished() at a request's end, reset() to empty the cache, take_events().
//
//   A request: initialized -> (match) onboard staged -> (allocated) onboarding -> running -> finished
//   An offloaded block: offered -> queued (weak: number and version) -> held, its slot reserved -> proven on all ranks
//   -> visible
//
// Eager mode: a block is held from the plan to the last rank's report. Lazy mode: no block is held; if its version is
// another one at the end, the block was rewritten meanwhile, and the copy is discarded (S1).
//
// A slot is visible only after every rank proved its part; a failure on one rank makes it invisible on all (S2). Both
// sides of an unfinished job are pinned; after an unproven copy for ever (S3). Every block ends with one counted
// outcome (S12).
//
// Threads: one, the engine scheduler's. No locks, no I/O, no waiting. Memory is reused, so a step does not allocate for
// each block. `device`, `clock` and `placement` outlive this object.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "kvcache/block_index.h"
#include "kvcache/block_policy.h"
#include "kvcache/device_blocks.h"
#include "kvcache/offload_queue.h"
#include "kvcache/placement.h"
#include "kvcache/transfer_plan.h"

namespace torpor {

enum class OffloadMode : uint8_t { kEager, kLazy };

struct OffloadSchedulerOptions {
  BlockIndexOptions index;
  OffloadQueueOptions queue;
  int32_t ranks = 1;
  int32_t block_tokens = 16;
  OffloadMode mode = OffloadMode::kEager;
  int64_t counted_keys = 0;  // cells of UseCounts, for a placement that needs uses; 0: none
  size_t events = 0;         // most that wait for take_events(); 0: no events
  Status validate() const;   // kInvalidArgument names the option
};

enum class RequestStage : uint8_t { kInitialized, kOnboardStaged, kOnboarding, kRunning, kFinishing };

// A block was stored, or can no longer be found.
struct BlockEvent {
  bool stored = true;
  StoreId store = StoreId::kHost;
  BlockKey key;
  std::array<uint8_t, 32> parent{};  // hash of the block before it; stored only
  int32_t tokens = 0;
};
struct BlockEvents {
  std::vector<BlockEvent> events;
  uint64_t lost = 0;     // events beyond OffloadSchedulerOptions::events
  bool cleared = false;  // before all events: nothing can be found any more
};

// A load that has ended on all ranks, also of a request that is finished: its first `good_blocks` blocks are valid.
struct EndedLoad {
  uint32_t request = 0;
  int32_t good_blocks = 0;
  bool unproven = false;   // a copy may still write: none of its blocks may be reused
  bool cancelled = false;  // by cancel()
};

struct CancelledCandidate {
  uint64_t blocks = 0;
  bool committed = false;  // it was committed before, and is not cancelled
};
struct DroppedKeys {
  uint64_t dropped = 0;
  uint64_t pinned = 0;  // stay, because a load or a copy needs them
  uint64_t absent = 0;
};
struct MovedKeys {
  uint64_t candidate = 0;
  uint64_t blocks = 0;
};

// Tokens of a request that its prefill did not compute, by where their KV was.
struct CachedTokens {
  int64_t device = 0;  // the engine's own prefix cache
  std::array<int64_t, kStores> stores{};
  int64_t other = 0;  // what else loads KV into the engine
  friend bool operator==(const CachedTokens&, const CachedTokens&) = default;
};

struct OffloadOffer {
  std::span<const BlockKey> keys;  // in namespace space()
  std::span<const int32_t> blocks;
  // The blocks are consecutive blocks of one request; else the block before each is unknown.
  bool consecutive = true;
  std::array<uint8_t, 32> parent{};  // hash of the block before the first
  uint64_t after_step = 0;           // the step whose forward pass writes them; 0: they are written
  int32_t priority = 0;
  std::string_view request;  // its id, for a BlockPolicy; empty: the blocks belong to no one request
};

// Durations in seconds since the last call. At most kMost of each are kept; further ones are dropped.
struct OffloadTimes {
  static constexpr size_t kMost = 4096;
  // For each way: from the plan of a batch to the last rank's report.
  std::array<std::vector<double>, kWays> batches;
  // For each load: from allocated() to the end of the load.
  std::vector<double> loads;
};

class OffloadScheduler {
 public:
  // kInvalidArgument: invalid options. kResourceExhausted: no memory.
  static Result<std::unique_ptr<OffloadScheduler>> create(const OffloadSchedulerOptions& options, DeviceBlocks& device,
                                                          const Placement& placement, const Clock& clock,
                                                          EventPort port = {});
  ~OffloadScheduler();

  // Assign slots to the blocks that every rank recovered. All ranks adopt() the result. Call before the first plan.
  // `ranks`: one list for each rank.
  std::vector<AdoptedBlock> adopt(std::span<const std::vector<RecoveredBlock>> ranks);

  // Return a number for a request. It is reused after the request's end. An empty id: it is none of the engine's, so
  // the ranks do not report the end of its load to the engine.
  uint32_t begin_request(std::string id, int32_t priority = 0);
  RequestStage stage(uint32_t request) const { return at(request).stage; }
  // Look up in the remote store, through the ranks, the keys that no store is known to have. Return how many are looked
  // up; 0: each key is in a store, the remote store does not answer, or too many lookups wait.
  size_t begin_lookup(uint32_t request, std::span<const BlockKey> keys);
  // Return whether a lookup for this request has not ended.
  bool lookup_pending(uint32_t request) const { return at(request).lookup != 0; }
  // Pin the blocks behind the first `have` of `chain` that can be loaded, and return their number. Another call unpins
  // them first.
  int32_t match(uint32_t request, std::span<const BlockKey> chain, size_t have);
  // Return whether one more load, of blocks that one store has, can be in the next plan for sure: the ranks have room
  // for it, and no console holds transfers.
  bool can_load_within_step() const;
  // Start the load into `blocks`, the device blocks for the first pinned slots; unpin the others. The device blocks
  // must stay the request's until its load ends. `within_step`: the load is in the next plan, for a request that
  // computes in the same step. Precondition: can_load_within_step().
  TransferHandle allocated(uint32_t request, std::span<const int32_t> blocks, bool within_step = false);
  // Return whether the request's load was planned. After plan_step() a load within the step was not only if there was
  // no memory.
  bool load_is_planned(uint32_t request) const { return at(request).planned; }
  // Offer blocks that became full. Leaves out blocks without a version (S8).
  TransferHandle offer(const OffloadOffer& offer);
  // Ask `policy` in each offer(); null: none. It outlives this object, or is unset before.
  void use_policy(BlockPolicy* policy) { policy_ = policy; }
  bool has_policy() const { return policy_ != nullptr; }
  // acknowledge(): the step's forward pass is done. fail_step(): it failed, and the blocks that it wrote are skipped.
  void acknowledge(uint64_t step) { queue_.acknowledge(step, clock_.now()); }
  void fail_step(uint64_t step) { queue_.fail_step(step); }
  // Return what all ranks do next; valid until the next call. An empty plan need not be sent. `flush`: do not wait for
  // batches to fill. If memory runs out, the rest stays queued.
  const TransferPlan& plan_step(bool flush = false);
  // The same for copies from and to the device alone: the others stay queued.
  const TransferPlan& plan_device();
  // End what was cancelled; commit nothing.
  void sweep() { queue_.sweep(); }
  // Apply a rank's report. A report that arrives twice counts once. kInvalidArgument: an unknown rank, or jobs that
  // were planned differently.
  Status apply(const TransferReport& report);
  // Return the loads that ended since the last call. Their requests are running; the engine computes what was not
  // loaded.
  std::vector<EndedLoad> take_loads();
  // Note that the engine has registered `blocks`, the first loaded ones, so their slots have the same bytes; -1 for one
  // that has got more content since. Unpins the request's slots.
  void loaded(uint32_t request, std::span<const int32_t> blocks);
  // Add a request's cached tokens to the totals, and record them as an event. Call it once, before finished().
  void count_cached(uint32_t request, const CachedTokens& tokens);
  // Return the totals of count_cached().
  const CachedTokens& cached() const { return cached_; }
  // End a request. Return false if its load still writes into its blocks: they stay, and the number is valid, until
  // take_loads() names it.
  bool finished(uint32_t request);
  // Open the next namespace: nothing stored before is found, and queued blocks end as kCancelled; those of loads in the
  // next step. Takes effect at once; jobs under way end on their own. The ranks must open the namespace too.
  // kResourceExhausted: no memory; nothing changed.
  Status reset();
  uint32_t space() const { return space_; }
  BlockEvents take_events();
  // Return, for each device block, the host slot that holds its current content on every rank; -1 if none does. With
  // `keep` (a sleep), the slots are pinned until release_backing().
  std::vector<Slot> backing(std::span<const int32_t> blocks, bool keep);
  void release_backing();

  // Calls for operators (offload_calls.cpp), for host memory and disk; the remote store is shared with other engines.
  // Cancel a candidate that is not committed. kNotFound: no such candidate. A load ends on the ranks in their next
  // step, without a byte; its request computes the tokens.
  Result<CancelledCandidate> cancel(uint64_t candidate);
  // Drop these keys from `store`; pinned blocks stay.
  DroppedKeys drop(std::span<const BlockKey> keys, StoreId store);
  // Copy those of the keys that are in host memory only to disk. Return the candidate's number and its blocks; 0 if
  // there is none. kFailedPrecondition: there is no disk.
  Result<MovedKeys> move_on(std::span<const BlockKey> keys);

  // Calls of Residency (offload_calls.cpp), which decides by itself what is worth a copy.
  // Copy those of the keys that `store` lacks into it: into host memory from disk or the remote store, into these from
  // host memory. Return a handle for each batch.
  std::vector<TransferHandle> bring(std::span<const BlockKey> keys, StoreId store);
  // Copy the device blocks into host memory; where there is none, to disk. `after_step`: as in OffloadOffer.
  std::vector<TransferHandle> copy_down(std::span<const BlockKey> keys, std::span<const int32_t> blocks,
                                        uint64_t after_step);
  // When host memory has no slot that can be evicted, call `unpin`. It returns whether it unpinned any.
  void on_no_room(std::function<bool()> unpin) { on_no_room_ = std::move(unpin); }

  // Return whether anything is queued or under way: the engine must go on stepping, with empty steps if need be.
  bool busy() const { return queue_.anything_queued() || queue_.jobs_under_way() > 0 || !lookups_.empty(); }
  bool under_way() const { return queue_.jobs_under_way() > 0; }
  // Return whether a copy from or to the device is queued or under way.
  bool moves_device() const { return queue_.is_open(Way::kOnboard) || queue_.is_open(Way::kOffload); }
  BlockIndex& index() { return *index_; }
  const BlockIndex& index() const { return *index_; }
  const OffloadQueue& queue() const { return queue_; }
  int64_t quarantined() const { return quarantined_; }  // device blocks that are never used again
  // Return how many used blocks were reinserted from segments about to be evicted.
  int64_t reinserted() const { return reinserted_; }
  int64_t loaded_from_remote() const { return loaded_from_remote_; }  // blocks
  OffloadTimes take_times() { return std::exchange(times_, {}); }
  const OffloadSchedulerOptions& options() const { return options_; }
  const std::vector<StoreReport>& stores(int32_t rank) const { return stores_[static_cast<size_t>(rank)]; }
  Status check() const;

 private:
  struct Pinned {
    StoreId store = StoreId::kHost;
    Slot slot = -1;
    BlockKey key;
    bool good = false;  // it was loaded
    bool kept = false;  // for ever: its copy is not proven finished
  };
  struct Request {
    std::string id;
    int32_t priority = 0;
    RequestStage stage = RequestStage::kInitialized;
    bool used = false;     // the number is in use
    bool counted = false;  // its keys were added to uses_
    bool planned = false;  // its load was
    uint64_t lookup = 0;   // number of its pending lookup; 0: none
    bool load_cancelled = false;
    std::chrono::nanoseconds load_began{};
    std::vector<Pinned> pinned;
  };
  struct JobBlock {
    QueuedBlock queued;
    Slot from = -1;   // kDemote, kPublish: source slot
    int32_t at = -1;  // kOnboard: index in Request::pinned
    BlockOutcome outcome = BlockOutcome::kTransferred;
  };
  struct PlannedBatch {
    uint64_t id = 0;  // 0: unused
    Way way = Way::kOffload;
    StoreId store = StoreId::kHost;  // target; kOnboard: source
    StoreId from = StoreId::kHost;   // source of a move
    uint32_t request = 0;            // kOnboard, kLookup
    uint64_t lookup = 0;             // kLookup
    uint64_t reported = 0;           // a bit for each rank
    std::chrono::nanoseconds planned_at{};
    std::vector<JobBlock> blocks;
    std::vector<OffloadQueue::Owner> owners;
    Status cause;
  };

  struct HostBlock {  // what the block was stored with
    std::array<uint8_t, 32> parent{};
    int32_t priority = 0;
  };

  struct Lookup {
    uint64_t number = 0;
    uint32_t request = 0;
    std::vector<BlockKey> keys;
  };

  OffloadScheduler(const OffloadSchedulerOptions& options, DeviceBlocks& device, const Placement& placement,
                   const Clock& clock, EventPort port);
  Request& at(uint32_t request) { return requests_[request]; }
  const Request& at(uint32_t request) const { return requests_[request]; }
  void unpin(Request& request, size_t from);
  void end_request(uint32_t request);
  void ask_policy(std::string_view request);  // leaves out of queued_ what it does not want
  void enqueue_by_priority(Way way);          // enqueues queued_
  std::vector<TransferHandle> enqueue_in_batches(const OffloadQueue::Enqueue& how, std::span<const QueuedBlock> blocks);
  bool is_committed(uint64_t candidate) const;
  bool accepting(StoreId store) const { return refusing_[static_cast<size_t>(store)] == 0; }

  // offload_commit.cpp
  const TransferPlan& plan(bool flush, bool of_device);
  void make_room(size_t blocks, size_t owners);
  PlannedBatch& new_batch(Way way, StoreId store);
  void commit_onboards(bool flush);
  void commit_offloads(bool flush);
  template <class Locate>
  void commit_moves(Way way, StoreId from, StoreId to, const Locate& locate);
  void commit_moves_from_host(Way way, StoreId to, bool flush);
  void commit_prefetches(bool flush);
  void commit_lookups();
  void commit_offloads_to(StoreId store);
  void reinsert_used();
  void commit_reinsertions();
  BlockOutcome reserve(const QueuedBlock& block, StoreId store, Slot& slot);
  void plan(PlannedBatch& batch, PlanKind kind);
  PlannedBatch* planned(uint64_t id);
  void count(PlannedBatch& batch, const JobReport& job, const TransferReport& report);
  void end(PlannedBatch& batch);
  void end_offload(PlannedBatch& batch);
  void end_move(PlannedBatch& batch);
  void end_onboard(PlannedBatch& batch);
  void end_lookup(PlannedBatch& batch);
  void end_owners(PlannedBatch& batch);
  // Enqueue copies of the blocks that arrived in host memory and are wanted in `store` too.
  void enqueue_copies_to(StoreId store, const PlannedBatch& batch);
  void note_stored(const QueuedBlock& block, StoreId store);
  void note_removed();
  void publish_stores();
  void note_time(std::vector<double>& times, std::chrono::nanoseconds from) noexcept;
  void publish(const BlockEvent& event) noexcept;

  const OffloadSchedulerOptions options_;
  DeviceBlocks& device_;
  const Placement& placement_;
  BlockPolicy* policy_ = nullptr;
  const Clock& clock_;
  const EventPort port_;
  std::unique_ptr<BlockIndex> index_;
  OffloadQueue queue_;
  UseCounts uses_;
  std::vector<Request> requests_;
  std::vector<uint32_t> free_requests_;
  std::vector<PlannedBatch> batches_;  // indexed by the lower bits of their ids
  std::vector<uint32_t> free_batches_;
  uint64_t planned_ = 0;  // batches ever
  TransferPlan plan_;
  uint64_t plans_ = 0;
  uint32_t space_ = 1;
  uint64_t all_ranks_ = 1;
  std::array<uint64_t, kStores> refusing_{};  // a bit for each rank whose store accepts nothing
  std::vector<std::vector<StoreReport>> stores_;
  std::vector<EndedLoad> loads_;
  int64_t within_step_ = 0;      // loads that the next plan has
  std::vector<Lookup> lookups_;  // not planned yet
  uint64_t lookups_begun_ = 0;   // ever
  int64_t quarantined_ = 0;
  int64_t reinserted_ = 0;
  int64_t loaded_from_remote_ = 0;
  CachedTokens cached_;
  int64_t disk_room_ = 0;               // BlockIndex::disk_room() at the last look
  std::vector<JobBlock> reinsertions_;  // not planned yet; a step without memory leaves them
  std::vector<Slot> kept_;              // host slots pinned by backing()
  std::vector<HostBlock> host_;         // by host slot; empty without a disk
  std::function<bool()> on_no_room_;
  BlockEvents events_;
  OffloadTimes times_;
  std::array<std::pair<uint64_t, uint64_t>, 2> published_{};  // last event for host memory and disk
  // Scratch of one call; kept for their memory.
  std::vector<BlockLocations> places_;
  std::vector<BlockKey> keys_;
  std::vector<QueuedBlock> queued_;
  OffloadQueue::Batch batch_;
  std::vector<int32_t> blocks_;
  std::vector<ContentVersion> versions_;
  std::vector<uint8_t> held_;
  std::array<std::string, kStores> names_;
};

}  // namespace torpor
