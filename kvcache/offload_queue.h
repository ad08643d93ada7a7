// SPDX-License-Identifier: Apache-2.0
// OffloadQueue: blocks on their way, from the moment they are offered until their job ends: down from the device, on
// from host memory to disk, out to the remote store, and up again. What the remote store is asked for is counted as a
// way of its own, and does not wait here. A pipeline without threads: OffloadScheduler::plan_step() is its tick.
//
//   enqueue -> precondition -> in-queue (weak, by priority) -> sweep, commit -> under way -> ended
//
// Its rules, by the numbers of the offload design (NVIDIA Dynamo, offload module):
//   P1 a container (the blocks of one enqueue) is the unit of cancellation; it is never split before it is committed
//   P2 its one cancellation token travels with it through all stages
//   P3 commitment (weak to strong) is the boundary: before it a container can be cancelled, after it not
//   P4 cancelled containers are swept out immediately before a batch is committed
//   P5 after that all blocks of a batch are one flat list
//   P6 a container that waits for its precondition can be cancelled while it waits, and ends at once
//
// The precondition is a step of the engine: its forward pass wrote the blocks, so they are read when that step is
// acknowledged, and not at all where it failed. Each block ends with one counted outcome (S12, I6); a full queue
// refuses at once and says so (I9); what went wrong first reaches the handle.
//
// Threads: the scheduler's. Handles outlive the queue.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "base/event.h"
#include "base/status.h"
#include "kvcache/block_locations.h"
#include "offload/outcome.h"

namespace torpor {

struct OffloadQueueOptions {
  int32_t max_batch_size = 64;  // blocks; a container with more is a batch of its own
  int32_t min_batch_size = 8;   // a smaller batch waits for more, but no longer than flush_interval
  std::chrono::milliseconds flush_interval{10};
  std::chrono::milliseconds policy_timeout{100};  // of one enqueue
  std::chrono::milliseconds sweep_interval{10};   // a cancelled container leaves its queue within this, and before any
                                                  // commit; in the steps that there are
  int32_t max_concurrent_transfers = 1;           // jobs that ranks work at, and
  int32_t on_deck_batches = 4;                    // that wait there: together the most of a way, down or on
  int32_t loading_batches = 64;                   // the same, up
  int64_t queue_blocks = 1 << 16;  // most blocks before commitment, of those on and out each; beyond: kQueueFull
  Status validate() const;         // kInvalidArgument names the option
};

enum class Way : uint8_t { kOnboard, kOffload, kDemote, kPublish, kLookup };
inline constexpr int kWays = 5;
std::string_view name(Way way);  // "onboard", "offload", "demote", "publish", "lookup"

// Of a candidate, as events name what one enqueue() gave: waiting for its step or queued, it can be cancelled; promoted
// (committed) it ends as completed; what ends before is skipped. One way, once.
enum class CandidateState : uint8_t { kNone, kWaiting, kQueued, kPromoted, kCompleted, kSkipped };
inline constexpr int kCandidateStates = 6;
std::string_view name(CandidateState state);  // "waiting", "queued", …

// Of requests that events name by the numbers of an OffloadScheduler, so that no other's are the same.
inline constexpr uint32_t kOffloadRequest = uint32_t{1} << 31;
constexpr uint32_t event_request(uint32_t number) { return number == UINT32_MAX ? 0 : kOffloadRequest | (number + 1); }

enum class TransferStatus : uint8_t { kQueued, kCommitted, kDone };

struct QueuedBlock {
  BlockKey key;
  std::array<uint8_t, 32> parent{};  // hash of the block before it
  ContentVersion version = ContentVersion::kNone;
  int32_t block = -1;              // of the device
  int32_t priority = 0;            // what it goes on and out with
  Slot slot = -1;                  // up: where it comes from
  StoreId store = StoreId::kHost;  // up: of the slot; else where it goes
  bool on = false;                 // down: and from there on to disk
  bool out = false;                // down: and from there out to the remote store
};

// Room for so many elements, and for more each time that it takes memory.
template <class T>
void grow(std::vector<T>& list, size_t size) {
  if (list.capacity() < size) list.reserve(std::max(size, 2 * list.capacity()));
}

class OffloadQueue;

namespace detail {
struct TransferTicket {
  OffloadQueue* queue = nullptr;  // null: it has ended, or the queue has
  uint64_t blocks = 0;
  uint64_t ended = 0;
  OutcomeCounts counts{};
  Status cause;  // of the first block that failed
  int32_t container = -1;
  bool cancelled = false;
  bool committed = false;
  uint32_t owner = UINT32_MAX;
  uint64_t number = 0;  // in events
  CandidateState state = CandidateState::kNone;
};
}  // namespace detail

// What the caller holds of one enqueue. Copies are the same. Letting go of it changes nothing.
class TransferHandle {
 public:
  TransferHandle() = default;
  bool any() const { return ticket_ != nullptr; }
  uint64_t number() const { return ticket_->number; }  // in events
  TransferStatus status() const;
  OutcomeCounts counts() const { return ticket_->counts; }  // of blocks that ended so far
  uint64_t count(BlockOutcome outcome) const { return ticket_->counts[static_cast<size_t>(outcome)]; }
  // Why the first of its blocks failed.
  const Status& cause() const { return ticket_->cause; }
  // Not committed yet: none of its blocks goes. Committed: changes nothing.
  void cancel();

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
    uint64_t after_step = 0;  // the precondition; 0: none
    int32_t priority = 0;     // higher ones first, equal ones in order
    uint32_t owner = UINT32_MAX;
  };
  // Who commits a batch: whose the next so many of its blocks are.
  struct Owner {
    Ticket ticket;
    uint32_t count = 0;
  };
  struct Batch {  // flat (P5)
    std::vector<QueuedBlock> blocks;
    std::vector<Owner> owners;
    void clear() { blocks.clear(), owners.clear(); }
  };

  // `options` are valid.
  explicit OffloadQueue(const OffloadQueueOptions& options, EventPort port = {}) : options_(options), port_(port) {}
  ~OffloadQueue();
  OffloadQueue(const OffloadQueue&) = delete;
  OffloadQueue& operator=(const OffloadQueue&) = delete;

  // `blocks` may be fewer than `offered`: the others have ended as `filtered` already. Never blocks.
  TransferHandle enqueue(const Enqueue& how, std::span<const QueuedBlock> blocks, uint64_t offered,
                         BlockOutcome filtered, Time now);
  // Steps up to this one are done; one that failed ends what waits for it.
  void acknowledge(uint64_t step, Time now);
  void fail_step(uint64_t step);
  // The tick's: of the next batch of this way that is due, swept, and for which there is room under way. `flush`:
  // partial ones too.
  struct Next {
    size_t blocks = 0;  // 0: none is due
    size_t containers = 0;
    uint32_t owner = UINT32_MAX;  // of the first container
  };
  Next next(Way way, Time now, bool flush);
  // Commits it. Takes memory for `batch` alone, and before anything is committed.
  void commit(Way way, const Next& next, Batch& batch);
  void sweep_if_due(Time now);
  // Of the candidate with this number so many blocks end as kCancelled, at once. 0: it is not in the queue.
  uint64_t cancel(uint64_t number);
  // The candidate with this number is not committed yet.
  bool has(uint64_t number) const;
  // The tick's first: what somebody holds (EventPort::may_go) waits aside, what is held no more is in the queue again.
  void set_held_aside(Time now);
  void sweep();
  // So many of the ticket's blocks are part of a job with this number.
  void tell_planned(const Ticket& ticket, uint64_t job, uint64_t blocks) const;
  // One of the jobs of a batch is on its way; it has ended.
  void job_began(Way way) { ++under_way_[static_cast<size_t>(way)]; }
  void job_ended(Way way) { --under_way_[static_cast<size_t>(way)]; }
  void end(const Ticket& ticket, Way way, BlockOutcome outcome, uint64_t blocks, const Status& cause = {});
  // Ends all that is not committed; kCancelled also for what a reset finds.
  void end_all(BlockOutcome outcome);
  // Tickets of which all blocks have ended, and which have an owner; since the last call.
  std::vector<uint32_t>& ended_owners() { return ended_owners_; }

  // Of what did not wait here.
  void count(Way way, BlockOutcome outcome, uint64_t blocks) {
    counts_[static_cast<size_t>(way)][static_cast<size_t>(outcome)] += blocks;
  }
  const OutcomeCounts& counts(Way way) const { return counts_[static_cast<size_t>(way)]; }
  int64_t queued_blocks() const { return queued_blocks_; }
  int64_t jobs_under_way() const { return std::accumulate(under_way_.begin(), under_way_.end(), int64_t{0}); }
  int64_t jobs_under_way(Way way) const { return under_way_[static_cast<size_t>(way)]; }
  const OffloadQueueOptions& options() const { return options_; }
  // Something could be committed now or after a while.
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
    bool held = false;     // and that is met, but somebody holds it
    int32_t next = kNone;  // in its list, or the free ones
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
  std::vector<Container> containers_;  // their memory is used again
  int32_t free_ = kNone;
  std::vector<int32_t> waiting_;  // for their precondition
  std::array<InQueue, kWays> in_queues_;
  std::array<OutcomeCounts, kWays> counts_{};
  std::array<int64_t, kWays> under_way_{};
  std::vector<uint32_t> ended_owners_;
  uint64_t acknowledged_ = 0;
  uint64_t tickets_ = 0;  // ever
  int64_t queued_blocks_ = 0;
  size_t owned_tickets_ = 0;  // that have an owner, and have not ended
  bool any_cancelled_ = false;
  bool any_held_ = false;
  Time swept_at_{};
};

}  // namespace torpor
