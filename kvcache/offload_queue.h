// SPDX-License-Identifier: Apache-2.0
// OffloadQueue: the blocks on each way (kOffload from the device, kDemote from host memory to disk, kPublish to the
// remote store, kPrefetch from both to host memory, kOnboard to the device), from their offer to the end of their job.
// Lookups in the remote store are only counted here. The queue is a pipeline without threads:
// OffloadScheduler::plan_step() drives it.
//
//   enqueue -> precondition -> in-queue (weak, by priority) -> sweep, commit -> under way -> ended
//
// Its rules, with the numbers of the offload design (NVIDIA Dynamo, offload module):
//   P1 a container (the blocks of one enqueue) is the unit of cancellation; it is never split before it is committed
//   P2 its one cancellation token travels with it through all stages
//   P3 commitment (weak to strong) is the boundary: before it a container can be cancelled, after it not
//   P4 cancelled containers are swept out immediately before a batch is committed
//   P5 after that all blocks of a batch are one flat list
//   P6 a container that waits for its precondition can be cancelled while it waits, and ends at once
//
// The precondition is a step of the engine whose forward pass writes the blocks: they are read once that step is
// acknowledged, and skipped if it failed. Each block ends with one counted outcome (S12, I6). A full queue refuses at
// once with kQueueFull (I9). The handle has the first error.
//
// Threads: the scheduler's. Handles may outlive the queue; other threads may wait() on them. The scheduler's thread
// takes a lock only where somebody waits.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "base/event.h"
#include "base/mutex.h"
#include "base/status.h"
#include "kvcache/block_locations.h"
#include "offload/outcome.h"

namespace torpor {

struct OffloadQueueOptions {
  int32_t max_batch_size = 64;  // blocks; a larger container is a batch of its own
  int32_t min_batch_size = 8;   // blocks; a smaller batch waits for more, at most flush_interval
  std::chrono::milliseconds flush_interval{10};
  std::chrono::milliseconds policy_timeout{100};  // most time for the policy of one offer
  // A cancelled container leaves its queue within this time, if there are steps, and before any commit.
  std::chrono::milliseconds sweep_interval{10};
  // Per way except kOnboard, at most max_concurrent_transfers + on_deck_batches batches are with the ranks: as many as
  // they work at, and as many as wait there.
  int32_t max_concurrent_transfers = 1;
  int32_t on_deck_batches = 4;
  int32_t loading_batches = 64;  // most kOnboard batches, and most lookups, with the ranks
  // Most blocks before commitment: of kDemote, of kPublish, of kPrefetch, and of all others together. More end as
  // kQueueFull.
  int64_t queue_blocks = 1 << 16;
  Status validate() const;  // kInvalidArgument names the option
};

// The route of blocks: to the device, from the device, from host memory to disk, to the remote store, or a lookup
// there; from disk or the remote store to host memory.
enum class Way : uint8_t { kOnboard, kOffload, kDemote, kPublish, kLookup, kPrefetch };
inline constexpr int kWays = 6;
std::string_view name(Way way);  // "onboard", "offload", "demote", "publish", "lookup", "prefetch"

// The state of a candidate: events call the blocks of one enqueue() so. It waits for its step or is queued, and can be
// cancelled; promoted means committed, and ends as completed; a candidate that ends before that is skipped.
enum class CandidateState : uint8_t { kNone, kWaiting, kQueued, kPromoted, kCompleted, kSkipped };
inline constexpr int kCandidateStates = 6;
std::string_view name(CandidateState state);  // "waiting", "queued", …

// In events, requests with a number of an OffloadScheduler have this bit, so that they differ from all others.
inline constexpr uint32_t kOffloadRequest = uint32_t{1} << 31;
constexpr uint32_t event_request(uint32_t number) { return number == UINT32_MAX ? 0 : kOffloadRequest | (number + 1); }

enum class TransferStatus : uint8_t { kQueued, kCommitted, kDone };

struct QueuedBlock {
  BlockKey key;
  std::array<uint8_t, 32> parent{};  // hash of the block before it
  ContentVersion version = ContentVersion::kNone;
  int32_t block = -1;              // device block
  int32_t priority = 0;            // of its later kDemote and kPublish
  Slot slot = -1;                  // kOnboard: source
  StoreId store = StoreId::kHost;  // kOnboard: source; else target
  bool to_disk = false;            // kOffload: kDemote it to disk afterwards
  bool to_remote = false;          // kOffload: kPublish it to the remote store afterwards
};

// Reserve capacity for `size` elements; at least double the capacity each time memory is allocated.
template <class T>
void grow(std::vector<T>& list, size_t size) {
  if (list.capacity() < size) list.reserve(std::max(size, 2 * list.capacity()));
}

class OffloadQueue;

namespace detail {
// The threads that wait for handles of one queue.
struct TransferWaiters {
  Mutex mutex;
  CondVar changed;
  std::atomic<int32_t> waiting = 0;
  std::atomic<bool> closed = false;  // the queue has ended: nothing more becomes of its tickets
  void wake() {
    if (waiting.load() == 0) return;
    { const MutexLock lock(mutex); }  // a thread that has looked is waiting by now
    changed.notify_all();
  }
};
struct TransferTicket {
  OffloadQueue* queue = nullptr;  // null: the ticket or the queue has ended
  std::shared_ptr<TransferWaiters> waiters;
  std::atomic<bool> done = false;  // set last: then any thread may read the counts and the cause
  uint64_t blocks = 0;
  uint64_t ended = 0;
  OutcomeCounts counts{};
  Status cause;  // error of the first block that failed
  int32_t container = -1;
  bool cancelled = false;
  bool committed = false;
  uint32_t owner = UINT32_MAX;
  uint64_t number = 0;  // the candidate's number in events
  CandidateState state = CandidateState::kNone;
};
}  // namespace detail

// What became of the blocks of one enqueue().
struct TransferResult {
  uint64_t blocks = 0;
  OutcomeCounts counts{};
  Status cause;  // error of the first block that failed
  uint64_t count(BlockOutcome outcome) const { return counts[static_cast<size_t>(outcome)]; }
};

// The caller's handle of one enqueue(). Copies refer to the same blocks. Destroying it changes nothing.
class TransferHandle {
 public:
  TransferHandle() = default;
  bool any() const { return ticket_ != nullptr; }
  uint64_t number() const { return ticket_->number; }  // the candidate's number in events
  TransferStatus status() const;
  OutcomeCounts counts() const { return ticket_->counts; }  // of the blocks that ended so far
  uint64_t count(BlockOutcome outcome) const { return ticket_->counts[static_cast<size_t>(outcome)]; }
  // Return the error of the first block that failed.
  const Status& cause() const { return ticket_->cause; }
  // Cancel all blocks if they are not committed yet; else change nothing.
  void cancel();
  // Wait until each block has ended, for at most `timeout`. Any thread but the scheduler's, whose steps end them.
  // kTimeout: some have not ended; they go on. kUnavailable: the queue has ended before them.
  Result<TransferResult> wait(std::chrono::nanoseconds timeout) const;

 private:
  friend class OffloadQueue;
  explicit TransferHandle(std::shared_ptr<detail::TransferTicket> ticket) : ticket_(std::move(ticket)) {}
  std::shared_ptr<detail::TransferTicket> ticket_;
};

class OffloadQueue {
 public:
  using Ticket = std::shared_ptr<detail::TransferTicket>;
  using Time = std::chrono::nanoseconds;
  struct Enqueue {
    Way way = Way::kOffload;
    uint64_t after_step = 0;  // the precondition: a step; 0: none
    int32_t priority = 0;     // higher first; equal ones in order of enqueue()
    uint32_t owner = UINT32_MAX;
    // The next step needs it: no breakpoint holds it, and the queue is never too full for it.
    bool within_step = false;
  };
  // The ticket of the next `count` blocks of a batch.
  struct Owner {
    Ticket ticket;
    uint32_t count = 0;
  };
  struct Batch {  // one flat list (P5)
    std::vector<QueuedBlock> blocks;
    std::vector<Owner> owners;
    void clear() { blocks.clear(), owners.clear(); }
  };

  // Precondition: options.validate() is ok.
  explicit OffloadQueue(const OffloadQueueOptions& options, EventPort port = {}) : options_(options), port_(port) {}
  ~OffloadQueue();
  OffloadQueue(const OffloadQueue&) = delete;
  OffloadQueue& operator=(const OffloadQueue&) = delete;

  // Add one container. If `blocks` is fewer than `offered`, the others end as `filtered` at once. Never blocks.
  TransferHandle enqueue(const Enqueue& how, std::span<const QueuedBlock> blocks, uint64_t offered,
                         BlockOutcome filtered, Time now);
  // All steps up to `step` are done: their containers are ready. fail_step() ends the containers of a step that failed.
  void acknowledge(uint64_t step, Time now);
  void fail_step(uint64_t step);
  // The size of the next batch of a way.
  struct Next {
    size_t blocks = 0;  // 0: no batch is due
    size_t containers = 0;
    uint32_t owner = UINT32_MAX;  // of the first container
    bool skip = false;            // kOnboard: it was skipped
  };
  // Return the next batch of `way` if it is due; else zero blocks. Sweeps before. A batch is due if the ranks have
  // fewer batches of this way than the limit, and it has min_batch_size blocks, or waited for flush_interval, or
  // `flush` is set. A kOnboard batch is due at once, and has one container.
  Next next(Way way, Time now, bool flush);
  // Commit the batch that next() returned into `batch`. Allocates memory only for `batch`, before anything is
  // committed.
  void commit(Way way, const Next& next, Batch& batch);
  void sweep_if_due(Time now);
  // Cancel a candidate by number. Its blocks end as kCancelled at once; return how many. 0: it is not in the queue.
  uint64_t cancel(uint64_t number);
  // Release a kOnboard candidate from what holds it, and have its commitment move no byte: next() says so. Return its
  // blocks. 0: it is not in the queue, or was skipped before.
  uint64_t skip(uint64_t number);
  // Move candidates that a breakpoint holds (EventPort::may_go) out of the queue, and released ones back into it.
  // Called first in each step.
  void set_held_aside(Time now);
  void sweep();
  // Emit an event: `blocks` blocks of the ticket are part of this job.
  void publish_planned(const Ticket& ticket, uint64_t job, uint64_t blocks) const;
  // Count a batch that is given to the ranks; job_ended(): it has ended.
  void job_began(Way way) { ++under_way_[static_cast<size_t>(way)]; }
  void job_ended(Way way) { --under_way_[static_cast<size_t>(way)]; }
  void end(const Ticket& ticket, Way way, BlockOutcome outcome, uint64_t blocks, const Status& cause = {});
  // End all uncommitted containers: cancelled ones as kCancelled, the others as `outcome`. `skip_loads`: skip() those
  // of kOnboard instead, because the ranks have to say that they have ended.
  void end_all(BlockOutcome outcome, bool skip_loads = false);
  // Return the owners whose tickets have ended since the caller cleared this list.
  std::vector<uint32_t>& ended_owners() { return ended_owners_; }

  // Count blocks that did not wait in this queue.
  void count(Way way, BlockOutcome outcome, uint64_t blocks) {
    counts_[static_cast<size_t>(way)][static_cast<size_t>(outcome)] += blocks;
  }
  const OutcomeCounts& counts(Way way) const { return counts_[static_cast<size_t>(way)]; }
  int64_t queued_blocks() const { return queued_blocks_; }
  int64_t jobs_under_way() const { return std::accumulate(under_way_.begin(), under_way_.end(), int64_t{0}); }
  int64_t jobs_under_way(Way way) const { return under_way_[static_cast<size_t>(way)]; }
  const OffloadQueueOptions& options() const { return options_; }
  // Return whether anything of this way is queued or under way.
  bool is_open(Way way) const;
  // Return whether something could be committed, now or later.
  bool anything_queued() const { return queued_blocks_ > 0; }
  Status check() const;  // sums, lists and tickets agree; for tests

 private:
  friend class TransferHandle;
  static constexpr int32_t kNone = -1;
  struct Container {
    std::vector<QueuedBlock> blocks;
    Ticket ticket;
    Way way = Way::kOffload;
    int32_t priority = 0;
    uint64_t after_step = 0;
    Time ready_since{};
    bool waiting = false;  // for its precondition
    bool held = false;     // the precondition is met, but a breakpoint holds it
    bool skip = false;     // kOnboard: its commitment moves no byte
    bool within_step = false;
    int32_t next = kNone;  // in its list, or the free list
    bool is(uint64_t number) const {
      return ticket != nullptr && ticket->number == number && ticket->container != kNone;
    }
  };
  struct Level {  // containers of one priority, in order
    int32_t priority = 0;
    int32_t first = kNone;
    int32_t last = kNone;
  };
  struct InQueue {
    std::vector<Level> levels;  // the highest priority first
    int64_t blocks = 0;
  };
  InQueue& in_queue(Way way) { return in_queues_[static_cast<size_t>(way)]; }
  Container& at(int32_t container) { return containers_[static_cast<size_t>(container)]; }
  Container& spare_container();
  void make_ready(int32_t container, Time now);
  static void set_done(detail::TransferTicket& ticket);
  void end_container(int32_t container, BlockOutcome outcome);
  void free_container(int32_t container);
  void cancelled(int32_t container);
  template <class Gone>
  void take_out(Gone gone);
  bool may_go(const Container& container) const;
  bool is_due(const InQueue& queue, Way way, Time now) const;
  bool has_room(Way way) const;
  void move(detail::TransferTicket& ticket, CandidateState to, uint64_t blocks) const;

  const OffloadQueueOptions options_;
  const EventPort port_;
  const std::shared_ptr<detail::TransferWaiters> waiters_ = std::make_shared<detail::TransferWaiters>();
  std::vector<Container> containers_;  // reused
  int32_t free_ = kNone;
  std::vector<int32_t> waiting_;  // containers that wait for a step or are held
  std::array<InQueue, kWays> in_queues_;
  std::array<OutcomeCounts, kWays> counts_{};
  std::array<int64_t, kWays> under_way_{};
  std::vector<uint32_t> ended_owners_;
  uint64_t acknowledged_ = 0;
  uint64_t tickets_ = 0;  // ever
  int64_t queued_blocks_ = 0;
  size_t owned_tickets_ = 0;  // tickets with an owner that have not ended
  bool any_cancelled_ = false;
  bool any_held_ = false;
  Time swept_at_{};
};

}  // namespace torpor
