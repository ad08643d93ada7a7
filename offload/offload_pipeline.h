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
// so (I9).
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/event_sink.h"
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

using OutcomeCounts = std::array<uint64_t, kBlockOutcomes>;  // by BlockOutcome

enum class OffloadStatus : uint8_t { kQueued, kCommitted, kDone };

namespace detail {
struct OffloadSignals;
struct OffloadTicket;
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
  // `route`, `clock` and `sink` (may be null) outlive the pipeline.
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
  };

  using Lock = std::unique_lock<std::mutex>;
  OffloadPipeline(BlockRoute& route, const Clock& clock, OffloadOptions options,
                  std::vector<std::unique_ptr<OffloadPolicy>> policies, EventSink* sink);
  void decide();
  void transfer();
  // All below: the lock is held; those that take it give it back for the time of policies and copies.
  void decide_once(Lock& lock);
  void transfer_one(Lock& lock);
  void shut_down();
  void take_new(Lock& lock);
  void take_settled();
  void make_ready(Container container);
  Container take_from_queue(std::map<QueueKey, Container>::iterator entry);
  void sweep_if_due(std::chrono::nanoseconds now);
  void sweep();
  bool batch_is_due(std::chrono::nanoseconds now);
  void commit_batch();
  bool send_off(const Digest& key);  // false: it is on its way already
  void arrived(const Digest& key);
  std::optional<std::chrono::nanoseconds> next_deadline();
  void end(const std::shared_ptr<detail::OffloadTicket>& ticket, BlockOutcome outcome, uint64_t blocks);
  void end_container(const Container& container, BlockOutcome outcome);
  bool idle() const;
  void report(std::string_view stage, uint64_t blocks) const;

  BlockRoute& route_;
  const Clock& clock_;
  const OffloadOptions options_;
  const std::vector<std::unique_ptr<OffloadPolicy>> policies_;
  EventSink* const sink_;

  std::shared_ptr<detail::OffloadSignals> signals_;  // shared with handles; its mutex guards all below and every ticket
  std::deque<Container> new_;                        // not evaluated yet
  std::unordered_map<uint64_t, Container> waiting_;  // for their precondition, by sequence
  std::map<QueueKey, Container> in_queue_;           // highest priority first, then in order
  std::set<std::pair<std::chrono::nanoseconds, QueueKey>> ages_;  // of the in-queue, oldest first
  std::deque<Batch> on_deck_;
  std::unordered_set<Digest, DigestHash> on_the_way_;          // keys of committed blocks
  std::vector<decltype(on_the_way_)::node_type> spare_nodes_;  // of it: nothing is allocated for each block
  OutcomeCounts counts_{};
  int64_t queued_blocks_ = 0;
  int64_t in_queue_blocks_ = 0;
  uint64_t next_sequence_ = 0;
  int32_t transferring_ = 0;
  int32_t draining_ = 0;  // callers of drain()
  bool evaluating_ = false;
  bool ending_ = false;

  std::vector<std::thread> threads_;  // last: they use all above
};

}  // namespace torpor
