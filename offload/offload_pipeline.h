// OffloadPipeline: blocks on their way from one tier into the next, while the engine serves.
//
//   enqueue -> policies -> precondition -> in-queue (weak, by priority) -> sweep, upgrade -> on deck (strong) ->
//   transfer
//
// Its rules, by the numbers of the offload design (NVIDIA Dynamo, offload module):
//   P1 a container (the blocks of one enqueue) is the unit of cancellation; it is never split before it is committed
//   P2 its one cancellation token travels with it through all stages
//   P3 upgrading (weak to strong) commits: before it a container can be cancelled, after it not
//   P4 cancelled containers are swept out immediately before the upgrade
//   P5 after the upgrade all blocks of a batch are one flat list
//   P6 a container that waits for its precondition can be cancelled while it waits
//
// Threads: all methods from any. One thread decides; max_concurrent_transfers threads transfer. Nothing polls: the
// deciding thread sleeps until something is enqueued, met or finished, or a partial batch or a sweep is due. With
// own_threads off nothing happens but in step() and drain(), on the thread that calls them: for simulations that must
// replay exactly. Failure: each block ends with one counted outcome (I6); a queue that is full refuses at once and says
// so (I9). A route or policy that throws fails the blocks it was at work on. Where deciding itself fails (no memory),
// what was committed is transferred, all else ends as kFailed, at once also what is enqueued later: usable() says why.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/event_sink.h"
#include "base/mutex.h"
#include "base/status.h"
#include "offload/block_route.h"
#include "offload/offload_policy.h"
#include "offload/precondition.h"

namespace torpor {

struct OffloadOptions {
  int32_t max_batch_size = 64;  // blocks; a container with more is a batch of its own
  int32_t min_batch_size = 8;   // a smaller batch waits for more, but no longer than flush_interval
  std::chrono::milliseconds flush_interval{10};
  std::chrono::milliseconds policy_timeout{100};
  std::chrono::milliseconds sweep_interval{
      10};  // a cancelled container leaves its queue within this; others in the same sweep
  int32_t max_concurrent_transfers = 1;
  int32_t on_deck_batches = 4;     // committed, waiting for a transfer thread; refilled when it is half empty
  int64_t queue_blocks = 1 << 16;  // most blocks before commitment; beyond: kQueueFull
  bool own_threads = true;

  Status validate() const;  // kInvalidArgument names the option
};

enum class OffloadStatus : uint8_t { kQueued, kCommitted, kDone };

namespace detail {
struct OffloadTicket;

// What handles and preconditions reach the pipeline by, also after its end.
struct OffloadSignals {
  Mutex mutex;                                             // guards the pipeline and all tickets
  CondVar decide;                                          // something for the deciding thread
  CondVar deck;                                            // a batch for a transfer thread, or the end
  CondVar idle;                                            // for drain()
  std::vector<uint64_t> settled TORPOR_GUARDED_BY(mutex);  // containers whose precondition was
  bool any_settled TORPOR_GUARDED_BY(mutex) = false;       // and perhaps others: there was no memory to say which
  std::optional<std::chrono::nanoseconds> sweep_at TORPOR_GUARDED_BY(mutex);
  std::chrono::nanoseconds sweep_interval{};
  const Clock* clock = nullptr;
};
}  // namespace detail

// What the caller holds of one enqueue. Copies are the same. Letting go of it changes nothing.
class OffloadHandle {
 public:
  OffloadStatus status() const;
  OutcomeCounts counts() const;  // of blocks that ended so far
  uint64_t count(BlockOutcome outcome) const { return counts()[static_cast<size_t>(outcome)]; }
  // True when all blocks ended; false after `timeout`. No value: waits as long as it takes.
  bool wait(std::optional<std::chrono::milliseconds> timeout = {}) const;
  // Not committed yet: none of its blocks goes. Committed: changes nothing.
  void request_cancel();
  // The same, and returns when all blocks ended.
  void cancel();

 private:
  friend class OffloadPipeline;
  explicit OffloadHandle(std::shared_ptr<detail::OffloadTicket> ticket) : ticket_(std::move(ticket)) {}
  std::shared_ptr<detail::OffloadTicket> ticket_;
};

class OffloadPipeline {
 public:
  // `route`, `clock` and `sink` (may be null) outlive the pipeline. The sink is told of blocks by stage ("enqueued",
  // "waiting", "ready", "committed", or the name of their outcome) and of each transfer.
  static Result<std::unique_ptr<OffloadPipeline>> create(BlockRoute& route, const Clock& clock, OffloadOptions options,
                                                         std::vector<std::unique_ptr<OffloadPolicy>> policies = {},
                                                         EventSink* sink = nullptr);
  // Committed batches are finished; all others end as kShutDown.
  ~OffloadPipeline();

  // Blocks of the source tier, held weakly. Higher priorities go first, equal ones in order; a lower one waits for as
  // long as higher ones keep coming. Never blocks.
  OffloadHandle enqueue(std::vector<BlockName> blocks, std::shared_ptr<Precondition> precondition = nullptr,
                        int32_t priority = 0);
  // Until nothing is queued or under way; partial batches go at once. Containers whose precondition is pending keep it
  // waiting.
  void drain();
  // Without own_threads: one round of deciding and at most one transfer. Returns whether anything is left that could go
  // now.
  bool step();

  OutcomeCounts counts() const;  // of all blocks that ever ended
  Status usable() const;         // the failure that ended all deciding
  int64_t queued_blocks() const;

 private:
  struct Container {
    std::vector<BlockName> blocks;
    std::shared_ptr<Precondition> precondition;
    std::shared_ptr<detail::OffloadTicket> ticket;  // the token (P2) and the counts
    int32_t priority = 0;
    uint64_t sequence = 0;
    std::chrono::nanoseconds ready_since{};  // when it came into the in-queue
  };
  using QueueKey = std::pair<int64_t, uint64_t>;  // priority turned round, sequence
  struct Batch {                                  // flat (P5)
    std::vector<BlockName> blocks;
    std::vector<std::pair<std::shared_ptr<detail::OffloadTicket>, size_t>> owners;  // whose the next so many blocks are
    std::vector<BlockOutcome> outcomes;
  };

  OffloadPipeline(BlockRoute& route, const Clock& clock, OffloadOptions options,
                  std::vector<std::unique_ptr<OffloadPolicy>> policies, EventSink* sink);
  Status start();
  void stop();
  void decide();
  void transfer();
  void decide_once() TORPOR_REQUIRES(signals_->mutex);  // fails the pipeline where it throws
  void decide_now() TORPOR_REQUIRES(signals_->mutex);
  void transfer_one() TORPOR_REQUIRES(signals_->mutex);  // throws nothing; gives the lock back while it copies
  void fail(const Status& failure) TORPOR_REQUIRES(signals_->mutex);
  void shut_down() TORPOR_REQUIRES(signals_->mutex);
  void take_new() TORPOR_REQUIRES(signals_->mutex);  // gives the lock back while policies are asked
  void take_settled() TORPOR_REQUIRES(signals_->mutex);
  void make_ready(Container container) TORPOR_REQUIRES(signals_->mutex);
  Container take_from_queue(std::map<QueueKey, Container>::iterator entry) TORPOR_REQUIRES(signals_->mutex);
  void sweep_if_due(std::chrono::nanoseconds now) TORPOR_REQUIRES(signals_->mutex);
  void sweep() TORPOR_REQUIRES(signals_->mutex);
  bool batch_is_due(std::chrono::nanoseconds now) TORPOR_REQUIRES(signals_->mutex);
  void commit_batch() TORPOR_REQUIRES(signals_->mutex);
  bool send_off(const Digest& key) TORPOR_REQUIRES(signals_->mutex);  // false: it is on its way already
  void arrived(const Digest& key) TORPOR_REQUIRES(signals_->mutex);
  std::optional<std::chrono::nanoseconds> next_deadline() TORPOR_REQUIRES(signals_->mutex);
  void end(const std::shared_ptr<detail::OffloadTicket>& ticket, BlockOutcome outcome, uint64_t blocks)
      TORPOR_REQUIRES(signals_->mutex);
  void end_container(const Container& container, BlockOutcome outcome) TORPOR_REQUIRES(signals_->mutex);
  bool idle() const TORPOR_REQUIRES(signals_->mutex);
  void report(std::string_view stage, uint64_t blocks) const;

  BlockRoute& route_;
  const Clock& clock_;
  const OffloadOptions options_;
  const std::vector<std::unique_ptr<OffloadPolicy>> policies_;
  EventSink* const sink_;

  const std::shared_ptr<detail::OffloadSignals> signals_;  // shared with handles; its mutex guards every ticket, too
  std::deque<Container> new_ TORPOR_GUARDED_BY(signals_->mutex);  // not evaluated yet
  // For their precondition, by sequence.
  std::unordered_map<uint64_t, Container> waiting_ TORPOR_GUARDED_BY(signals_->mutex);
  std::map<QueueKey, Container> in_queue_ TORPOR_GUARDED_BY(signals_->mutex);  // highest priority first, then in order
  // Of the in-queue, oldest first.
  std::set<std::pair<std::chrono::nanoseconds, QueueKey>> ages_ TORPOR_GUARDED_BY(signals_->mutex);
  std::deque<Batch> on_deck_ TORPOR_GUARDED_BY(signals_->mutex);
  std::list<std::shared_ptr<detail::OffloadTicket>> open_ TORPOR_GUARDED_BY(signals_->mutex);  // not ended
  std::unordered_set<Digest, DigestHash> on_the_way_ TORPOR_GUARDED_BY(signals_->mutex);  // keys of committed blocks
  // Of it: nothing is allocated for each block.
  std::vector<std::unordered_set<Digest, DigestHash>::node_type> spare_nodes_ TORPOR_GUARDED_BY(signals_->mutex);
  OutcomeCounts counts_ TORPOR_GUARDED_BY(signals_->mutex){};
  int64_t queued_blocks_ TORPOR_GUARDED_BY(signals_->mutex) = 0;
  int64_t in_queue_blocks_ TORPOR_GUARDED_BY(signals_->mutex) = 0;
  uint64_t next_sequence_ TORPOR_GUARDED_BY(signals_->mutex) = 0;
  int32_t transferring_ TORPOR_GUARDED_BY(signals_->mutex) = 0;
  int32_t draining_ TORPOR_GUARDED_BY(signals_->mutex) = 0;  // callers of drain()
  bool evaluating_ TORPOR_GUARDED_BY(signals_->mutex) = false;
  bool ending_ TORPOR_GUARDED_BY(signals_->mutex) = false;
  Status usable_ TORPOR_GUARDED_BY(signals_->mutex);

  std::vector<std::thread> threads_;  // last: they use all above
};

}  // namespace torpor
