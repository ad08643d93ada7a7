// SPDX-License-Identifier: Apache-2.0
// OffloadScheduler: the scheduler's part of offloading: which blocks go where and when, for all ranks at once. It knows
// keys, slots and pins and touches no bytes (S4); OffloadWorkers do what its plans say.
//
// Its methods follow the hooks of an engine's scheduler, in their order: match() when a request may be admitted,
// allocated() when it has its blocks, offer() for blocks that became full, plan_step() once a step, apply() for each
// rank's report, finished() at a request's end, reset() when the cache is to be empty, take_events().
//
//   A request: initialized -> (match) onboard staged -> (allocated) onboarding -> running -> finished
//   A block down: offered -> queued (weak: number and version) -> held, its slot reserved -> proven on all ranks ->
//   visible
//
// Eager: a block is held from the plan to the last rank's report. Lazy: nothing is held, and the version decides at the
// end: another one means that the block was written anew meanwhile, and its copy is worth nothing (S1).
//
// A slot is visible only after every rank proved its part; the failure of one makes it invisible on all (S2). Both
// sides of an unfinished job are pinned, after an unproven copy for ever (S3). Every block ends with one counted
// outcome (S12).
//
// Threads: one, the engine scheduler's. No locks, no I/O, no waiting; what it keeps is used again, so that a step
// takes no memory for each block. `device`, `clock` and `placement` outlive it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "kvcache/block_index.h"
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
  int64_t counted_keys = 0;  // for a placement that asks for uses; 0: none are counted
  size_t events = 0;         // most that wait for take_events(); 0: none are made
  Status validate() const;   // kInvalidArgument names the option
};

enum class RequestStage : uint8_t { kInitialized, kOnboardStaged, kOnboarding, kRunning, kFinishing };

// What was stored, or is not found any more.
struct BlockEvent {
  bool stored = true;
  StoreId store = StoreId::kHost;
  BlockKey key;
  std::array<uint8_t, 32> parent{};  // hash of the block before it; stored only
  int32_t tokens = 0;
};
struct BlockEvents {
  std::vector<BlockEvent> events;
  uint64_t lost = 0;     // since the last call: more than were waited for
  bool cleared = false;  // before all of them: nothing is found any more
};

// A request's load that is over on all ranks: its first so many blocks are good.
struct EndedLoad {
  uint32_t request = 0;
  int32_t good_blocks = 0;
  bool unproven = false;  // a copy may still be writing: none of its blocks may be used again
};

struct CancelledCandidate {
  uint64_t blocks = 0;
  bool committed = false;  // too late
};
struct DroppedKeys {
  uint64_t dropped = 0;
  uint64_t pinned = 0;  // a load or a copy needs them: they stay
  uint64_t absent = 0;
};
struct MovedKeys {
  uint64_t candidate = 0;
  uint64_t blocks = 0;
};

struct OffloadOffer {
  std::span<const BlockKey> keys;  // of space()
  std::span<const int32_t> blocks;
  bool consecutive = true;           // of one request, in their order; else nobody knows what is before them
  std::array<uint8_t, 32> parent{};  // hash of the block before the first
  uint64_t after_step = 0;           // whose forward pass writes them; 0: they are written
  int32_t priority = 0;
};

// How long things took, in seconds, each since it was last asked for. At most kMost of each: more are counted nowhere.
struct OffloadTimes {
  static constexpr size_t kMost = 4096;
  // Of each way: from when a batch was planned until all ranks had told how it ended.
  std::array<std::vector<double>, kWays> batches;
  // Of requests: from when one had device blocks for what is loaded until all of it had ended.
  std::vector<double> loads;
};

class OffloadScheduler {
 public:
  // kInvalidArgument, kResourceExhausted.
  static Result<std::unique_ptr<OffloadScheduler>> create(const OffloadSchedulerOptions& options, DeviceBlocks& device,
                                                          const Placement& placement, const Clock& clock,
                                                          EventPort port = {});
  ~OffloadScheduler();

  // Blocks that every rank recovered, under slots from now on; all ranks adopt() the result. Before the first plan.
  std::vector<AdoptedBlock> adopt(std::span<const std::vector<RecoveredBlock>> ranks);

  // Requests have numbers here; one is used again when its request is over.
  uint32_t begin_request(std::string id, int32_t priority = 0);
  RequestStage stage(uint32_t request) const { return at(request).stage; }
  // Asks the remote store, by way of the ranks, for those of `keys` that are nowhere else: for how many. 0: there is
  // nothing to ask for, or it does not answer.
  size_t ask(uint32_t request, std::span<const BlockKey> keys);
  // It was asked for this request, and has not answered.
  bool asking(uint32_t request) const { return at(request).asked != 0; }
  // How many of the blocks behind the first `have` of `chain` can be loaded; they are pinned. It may be asked again:
  // what it pinned before is let go of.
  int32_t match(uint32_t request, std::span<const BlockKey> chain, size_t have);
  // The device blocks for the first of them; the rest is let go of. They must stay the request's until its load ends.
  TransferHandle allocated(uint32_t request, std::span<const int32_t> blocks);
  // Blocks that became full. Those without a version are left out (S8).
  TransferHandle offer(const OffloadOffer& offer);
  // The step's forward pass is over; or it failed, and what it wrote is worth nothing.
  void acknowledge(uint64_t step) { queue_.acknowledge(step, clock_.now()); }
  void fail_step(uint64_t step) { queue_.fail_step(step); }
  // What all ranks do next; valid until the next call. Empty: nothing, and it need not be sent. `flush`: do not wait
  // for batches to fill. What there is no memory to plan stays queued.
  const TransferPlan& plan_step(bool flush = false);
  // Ends what was cancelled, and commits nothing.
  void sweep() { queue_.sweep(); }
  // One that comes again counts once. kInvalidArgument: of a rank that there is not, or of other jobs than were
  // planned.
  Status apply(const TransferReport& report);
  // Since the last call. The request is running then; what was not loaded is computed.
  std::vector<EndedLoad> take_loads();
  // The engine has registered these blocks, the first of those that were loaded: their slots have the same bytes. Ends
  // the pins.
  void loaded(uint32_t request, std::span<const int32_t> blocks);
  // False: a load is still writing into its blocks, they stay until take_loads() names it; the number ends with that.
  bool finished(uint32_t request);
  // Another namespace from now on: nothing of before is found, what is queued ends as kCancelled. At once; jobs under
  // way end in their own time. The ranks open the space, too.
  Status reset();
  uint32_t space() const { return space_; }
  BlockEvents take_events();
  // Of each of these device blocks, the slot in host memory that has the bytes of its present content on every rank;
  // -1: none has. With `keep`, for a sleep, they stay as they are until release_backing().
  std::vector<Slot> backing(std::span<const int32_t> blocks, bool keep);
  void release_backing();

  // For who operates the engine (offload_calls.cpp). Stores: host memory and disk; what the remote one has is shared.
  // A candidate that is not committed does not go. kNotFound; kFailedPrecondition: a request waits for it.
  Result<CancelledCandidate> cancel(uint64_t candidate);
  // None of these is found there any more.
  DroppedKeys drop(std::span<const BlockKey> keys, StoreId store);
  // Those that are in host memory go to disk, too. Its candidate; 0: none goes. kFailedPrecondition: there is no disk.
  Result<MovedKeys> move_on(std::span<const BlockKey> keys);

  // Something is queued or under way: steps are needed, if only empty ones.
  bool busy() const { return queue_.anything_queued() || queue_.jobs_under_way() > 0 || !asks_.empty(); }
  bool under_way() const { return queue_.jobs_under_way() > 0; }
  BlockIndex& index() { return *index_; }
  const BlockIndex& index() const { return *index_; }
  const OffloadQueue& queue() const { return queue_; }
  int64_t quarantined() const { return quarantined_; }  // device blocks that are never used again
  // Blocks that were used, in segments that were next to go: written again, into later ones.
  int64_t appended_again() const { return appended_again_; }
  int64_t loaded_from_remote() const { return loaded_from_remote_; }  // blocks
  OffloadTimes take_times() { return std::exchange(times_, {}); }
  const std::vector<StoreReport>& stores(int32_t rank) const { return stores_[static_cast<size_t>(rank)]; }
  Status check() const;

 private:
  struct Pinned {
    StoreId store = StoreId::kHost;
    Slot slot = -1;
    BlockKey key;
    bool good = false;  // it was loaded
    bool kept = false;  // for ever: its copy was not proven over
  };
  struct Request {
    std::string id;
    int32_t priority = 0;
    RequestStage stage = RequestStage::kInitialized;
    bool used = false;     // the number
    bool counted = false;  // its keys
    uint64_t asked = 0;    // which question of all is its, while it waits for the answer; 0: none
    std::chrono::nanoseconds load_began{};
    std::vector<Pinned> pinned;
  };
  struct JobBlock {
    QueuedBlock queued;
    Slot from = -1;   // kDemote: the slot that it comes from
    int32_t at = -1;  // kOnboard: which of the request's
    BlockOutcome outcome = BlockOutcome::kTransferred;
  };
  struct PlannedBatch {
    uint64_t id = 0;  // 0: the place is free
    Way way = Way::kOffload;
    StoreId store = StoreId::kHost;  // target; up: source
    StoreId from = StoreId::kHost;   // on: source
    uint32_t request = 0;            // up, ask
    uint64_t question = 0;           // ask
    uint64_t reported = 0;           // ranks, a bit each
    std::chrono::nanoseconds planned_at{};
    std::vector<JobBlock> blocks;
    std::vector<OffloadQueue::Owner> owners;
    Status cause;
  };

  struct HostBlock {  // what it was stored with
    std::array<uint8_t, 32> parent{};
    int32_t priority = 0;
  };

  struct Question {
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
  void enqueue_by_priority(Way way);  // queued_
  bool is_committed(uint64_t candidate) const;
  bool accepting(StoreId store) const { return refusing_[static_cast<size_t>(store)] == 0; }

  // offload_commit.cpp
  void make_room(size_t blocks, size_t owners);
  PlannedBatch& new_batch(Way way, StoreId store);
  void commit_loads(bool flush);
  void commit_down(bool flush);
  void commit_on(Way way, StoreId store, bool flush);
  void commit_asks();
  void commit_into(StoreId store);
  void reinsert_used();
  void commit_again();
  BlockOutcome reserve(const QueuedBlock& block, StoreId store, Slot& slot);
  void plan(PlannedBatch& batch, PlanKind kind);
  PlannedBatch* planned(uint64_t id);
  void count(PlannedBatch& batch, const JobReport& job, const TransferReport& report);
  void end(PlannedBatch& batch);
  void end_down(PlannedBatch& batch);
  void end_on(PlannedBatch& batch);
  void end_up(PlannedBatch& batch);
  void end_ask(PlannedBatch& batch);
  void end_owners(PlannedBatch& batch);
  void send_on(const PlannedBatch& batch, StoreId store);  // what arrived in host memory
  void note_stored(const QueuedBlock& block, StoreId store);
  void note_removed();
  void tell_stores();
  void note_time(std::vector<double>& times, std::chrono::nanoseconds from) noexcept;
  void tell(const BlockEvent& event) noexcept;

  const OffloadSchedulerOptions options_;
  DeviceBlocks& device_;
  const Placement& placement_;
  const Clock& clock_;
  const EventPort port_;
  std::unique_ptr<BlockIndex> index_;
  OffloadQueue queue_;
  UseCounts uses_;
  std::vector<Request> requests_;
  std::vector<uint32_t> free_requests_;
  std::vector<PlannedBatch> batches_;  // by the lower bits of their id
  std::vector<uint32_t> free_batches_;
  uint64_t planned_ = 0;  // batches ever
  TransferPlan plan_;
  uint64_t plans_ = 0;
  uint32_t space_ = 1;
  uint64_t all_ranks_ = 1;
  std::array<uint64_t, kStores> refusing_{};  // ranks whose store takes nothing, a bit each
  std::vector<std::vector<StoreReport>> stores_;
  std::vector<EndedLoad> loads_;
  std::vector<Question> asks_;  // not planned yet
  uint64_t questions_ = 0;      // ever
  int64_t quarantined_ = 0;
  int64_t appended_again_ = 0;
  int64_t loaded_from_remote_ = 0;
  int64_t disk_room_ = 0;        // when it was last looked at
  std::vector<JobBlock> again_;  // of this step, or left by one without memory
  std::vector<Slot> kept_;       // in host memory, by backing()
  std::vector<HostBlock> host_;  // by slot, if they may go on to disk
  BlockEvents events_;
  OffloadTimes times_;
  std::array<std::pair<uint64_t, uint64_t>, 2> told_{};  // host memory and disk, in an event
  // Of one call; they keep their memory.
  std::vector<BlockLocations> places_;
  std::vector<QueuedBlock> queued_;
  OffloadQueue::Batch batch_;
  std::vector<int32_t> blocks_;
  std::vector<ContentVersion> versions_;
  std::vector<uint8_t> held_;
  std::array<std::string, kStores> names_;
};

}  // namespace torpor
