#include "offload/offload_pipeline.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include <fmt/format.h>

namespace torpor {

namespace detail {
// What handles and preconditions reach the pipeline by, also after its end.
struct OffloadSignals {
  std::mutex mutex;                // guards the pipeline and all tickets
  std::condition_variable decide;  // something for the deciding thread
  std::condition_variable deck;    // a batch for a transfer thread, or the end
  std::condition_variable idle;    // for drain()
  std::vector<uint64_t> settled;   // containers whose precondition was
  std::optional<std::chrono::nanoseconds> sweep_at;
  std::chrono::nanoseconds sweep_interval{};
  const Clock* clock = nullptr;
};

// One enqueue: its token, its counts, and how the caller waits for it. Guarded by the pipeline's mutex.
struct OffloadTicket {
  std::shared_ptr<OffloadSignals> signals;
  std::condition_variable done;
  bool cancelled = false;
  bool committed = false;
  uint64_t blocks = 0;
  uint64_t ended = 0;
  OutcomeCounts counts{};
};
}  // namespace detail

std::string_view name(BlockOutcome outcome) {
  switch (outcome) {
    case BlockOutcome::kTransferred: return "transferred";
    case BlockOutcome::kPresent: return "present";
    case BlockOutcome::kFiltered: return "filtered";
    case BlockOutcome::kPolicyTimeout: return "policy timeout";
    case BlockOutcome::kCancelled: return "cancelled";
    case BlockOutcome::kPreconditionFailed: return "precondition failed";
    case BlockOutcome::kEvicted: return "evicted";
    case BlockOutcome::kNoRoom: return "no room";
    case BlockOutcome::kQueueFull: return "queue full";
    case BlockOutcome::kDegraded: return "degraded";
    case BlockOutcome::kFailed: return "failed";
    case BlockOutcome::kUnproven: return "unproven";
    case BlockOutcome::kShutDown: return "shut down";
  }
  return "failed";
}

Status OffloadOptions::validate() const {
  const auto check = [](std::string_view option, int64_t value, int64_t least) -> Status {
    if (value >= least) return ok();
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} is {}", option, value),
                 .next_step = fmt::format("use {} or more", least)};
  };
  TORPOR_TRY(check("max_batch_size", max_batch_size, 1));
  TORPOR_TRY(check("min_batch_size", min_batch_size, 1));
  TORPOR_TRY(check("flush_interval", flush_interval.count(), 0));
  TORPOR_TRY(check("policy_timeout", policy_timeout.count(), 1));
  TORPOR_TRY(check("sweep_interval", sweep_interval.count(), 1));
  TORPOR_TRY(check("max_concurrent_transfers", max_concurrent_transfers, 1));
  TORPOR_TRY(check("on_deck_batches", on_deck_batches, 1));
  TORPOR_TRY(check("queue_blocks", queue_blocks, 1));
  if (min_batch_size > max_batch_size) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("min_batch_size is {}, max_batch_size is {}", min_batch_size, max_batch_size),
                 .next_step = "use a min_batch_size that is not larger"};
  }
  return ok();
}

// --- the handle
// ----------------------------------------------------------------------------------------------------------

OffloadStatus OffloadHandle::status() const {
  const std::lock_guard lock(ticket_->signals->mutex);
  if (ticket_->ended == ticket_->blocks) return OffloadStatus::kDone;
  return ticket_->committed ? OffloadStatus::kCommitted : OffloadStatus::kQueued;
}

OutcomeCounts OffloadHandle::counts() const {
  const std::lock_guard lock(ticket_->signals->mutex);
  return ticket_->counts;
}

bool OffloadHandle::wait(std::optional<std::chrono::milliseconds> timeout) const {
  std::unique_lock lock(ticket_->signals->mutex);
  const auto ended = [this] { return ticket_->ended == ticket_->blocks; };
  if (timeout) return ticket_->done.wait_for(lock, *timeout, ended);
  ticket_->done.wait(lock, ended);
  return true;
}

void OffloadHandle::request_cancel() {
  {
    detail::OffloadSignals& signals = *ticket_->signals;
    const std::lock_guard lock(signals.mutex);
    if (ticket_->ended == ticket_->blocks) return;  // the pipeline and its clock may be gone
    ticket_->cancelled = true;
    if (!signals.sweep_at) signals.sweep_at = signals.clock->now() + signals.sweep_interval;
  }
  ticket_->signals->decide.notify_one();
}

void OffloadHandle::cancel() {
  request_cancel();
  wait();
}

// --- the pipeline
// --------------------------------------------------------------------------------------------------------

OffloadPipeline::OffloadPipeline(BlockRoute& route, const Clock& clock, OffloadOptions options,
                                 std::vector<std::unique_ptr<OffloadPolicy>> policies, EventSink* sink)
    : route_(route),
      clock_(clock),
      options_(options),
      policies_(std::move(policies)),
      sink_(sink),
      signals_(std::make_shared<detail::OffloadSignals>()) {
  signals_->sweep_interval = options_.sweep_interval;
  signals_->clock = &clock_;
  if (!options_.own_threads) return;
  threads_.emplace_back([this] { decide(); });
  for (int32_t i = 0; i < options_.max_concurrent_transfers; ++i) threads_.emplace_back([this] { transfer(); });
}

Result<std::unique_ptr<OffloadPipeline>> OffloadPipeline::create(BlockRoute& route, const Clock& clock,
                                                                 OffloadOptions options,
                                                                 std::vector<std::unique_ptr<OffloadPolicy>> policies,
                                                                 EventSink* sink) {
  TORPOR_TRY(options.validate());
  return std::unique_ptr<OffloadPipeline>(new OffloadPipeline(route, clock, options, std::move(policies), sink));
}

OffloadPipeline::~OffloadPipeline() {
  {
    const std::lock_guard lock(signals_->mutex);
    ending_ = true;
  }
  signals_->decide.notify_one();
  signals_->deck.notify_all();
  for (std::thread& thread : threads_) thread.join();
  if (options_.own_threads) return;
  Lock lock(signals_->mutex);
  shut_down();
  while (!on_deck_.empty()) transfer_one(lock);
}

OffloadHandle OffloadPipeline::enqueue(std::vector<BlockName> blocks, std::shared_ptr<Precondition> precondition,
                                       int32_t priority) {
  auto ticket = std::make_shared<detail::OffloadTicket>();
  ticket->signals = signals_;
  ticket->blocks = blocks.size();
  OffloadHandle handle(ticket);
  const auto count = static_cast<int64_t>(blocks.size());
  uint64_t sequence = 0;
  {
    const std::lock_guard lock(signals_->mutex);
    sequence = next_sequence_++;
    Container container{std::move(blocks), precondition, ticket, priority, sequence};
    queued_blocks_ += count;
    report("enqueued", container.blocks.size());
    if (queued_blocks_ > options_.queue_blocks) {
      end_container(container, BlockOutcome::kQueueFull);
      return handle;
    }
    new_.push_back(std::move(container));
  }
  if (precondition != nullptr) {
    precondition->on_settled([signals = signals_, sequence] {
      {
        const std::lock_guard lock(signals->mutex);
        signals->settled.push_back(sequence);
      }
      signals->decide.notify_one();
    });
  }
  signals_->decide.notify_one();
  return handle;
}

void OffloadPipeline::drain() {
  Lock lock(signals_->mutex);
  ++draining_;
  signals_->decide.notify_one();
  while (!options_.own_threads && !idle()) {
    decide_once(lock);
    if (!on_deck_.empty()) transfer_one(lock);
  }
  signals_->idle.wait(lock, [this] { return idle(); });
  --draining_;
}

bool OffloadPipeline::step() {
  Lock lock(signals_->mutex);
  decide_once(lock);
  if (!on_deck_.empty()) transfer_one(lock);
  return !new_.empty() || !signals_->settled.empty() || !on_deck_.empty() || batch_is_due(clock_.now());
}

OutcomeCounts OffloadPipeline::counts() const {
  const std::lock_guard lock(signals_->mutex);
  return counts_;
}

int64_t OffloadPipeline::queued_blocks() const {
  const std::lock_guard lock(signals_->mutex);
  return queued_blocks_;
}

bool OffloadPipeline::idle() const {
  return new_.empty() && waiting_.empty() && in_queue_.empty() && on_deck_.empty() && transferring_ == 0 &&
         !evaluating_;
}

void OffloadPipeline::report(std::string_view stage, uint64_t blocks) const {
  if (sink_ != nullptr && blocks > 0) sink_->on_offload({.route = route_.name(), .stage = stage, .blocks = blocks});
}

void OffloadPipeline::end(const std::shared_ptr<detail::OffloadTicket>& ticket, BlockOutcome outcome, uint64_t blocks) {
  counts_[static_cast<size_t>(outcome)] += blocks;
  ticket->counts[static_cast<size_t>(outcome)] += blocks;
  ticket->ended += blocks;
  report(name(outcome), blocks);
  if (ticket->ended == ticket->blocks) ticket->done.notify_all();
}

void OffloadPipeline::end_container(const Container& container, BlockOutcome outcome) {
  queued_blocks_ -= static_cast<int64_t>(container.blocks.size());
  end(container.ticket, outcome, container.blocks.size());
}

void OffloadPipeline::decide_once(Lock& lock) {
  take_new(lock);
  take_settled();
  sweep_if_due(clock_.now());
  while (!ending_ && on_deck_.size() < static_cast<size_t>(options_.on_deck_batches) && batch_is_due(clock_.now()))
    commit_batch();
  if (idle()) signals_->idle.notify_all();
}

// The deciding thread.
void OffloadPipeline::decide() {
  Lock lock(signals_->mutex);
  while (true) {
    decide_once(lock);
    if (ending_) break;
    if (!new_.empty() || !signals_->settled.empty()) continue;
    if (const std::optional<std::chrono::nanoseconds> deadline = next_deadline()) {
      signals_->decide.wait_for(lock, std::max(*deadline - clock_.now(), std::chrono::nanoseconds(1)));
    } else {
      signals_->decide.wait(lock);
    }
  }
  shut_down();
}

// Ends all that is not committed.
void OffloadPipeline::shut_down() {
  const auto end_here = [this](const Container& container) {
    end_container(container, container.ticket->cancelled ? BlockOutcome::kCancelled : BlockOutcome::kShutDown);
  };
  for (const Container& container : new_) end_here(container);
  for (const auto& [sequence, container] : waiting_) end_here(container);
  for (const auto& [key, container] : in_queue_) end_here(container);
  new_.clear();
  waiting_.clear();
  in_queue_.clear();
  ages_.clear();
  in_queue_blocks_ = 0;
  signals_->idle.notify_all();
}

// Policies, without the lock; what they leave of a container goes on as one container (P1).
void OffloadPipeline::take_new(Lock& lock) {
  std::deque<Container> arrived;
  arrived.swap(new_);
  if (arrived.empty()) return;
  evaluating_ = true;
  lock.unlock();
  std::vector<std::vector<uint8_t>> wanted(arrived.size());
  std::vector<bool> in_time(arrived.size(), true);
  for (size_t i = 0; i < arrived.size(); ++i) {
    wanted[i].assign(arrived[i].blocks.size(), 1);
    const std::chrono::nanoseconds deadline = clock_.now() + options_.policy_timeout;
    for (const auto& policy : policies_) {
      in_time[i] = in_time[i] && policy->evaluate(arrived[i].blocks, wanted[i], deadline) && clock_.now() <= deadline;
    }
  }
  lock.lock();
  evaluating_ = false;
  for (size_t i = 0; i < arrived.size(); ++i) {
    Container& container = arrived[i];
    if (container.ticket->cancelled) {  // a sweep does not look here
      end_container(container, BlockOutcome::kCancelled);
      continue;
    }
    if (!in_time[i]) {
      end_container(container, BlockOutcome::kPolicyTimeout);
      continue;
    }
    size_t kept = 0;
    for (size_t b = 0; b < container.blocks.size(); ++b) {
      if (wanted[i][b] != 0) container.blocks[kept++] = container.blocks[b];
    }
    const uint64_t filtered = container.blocks.size() - kept;
    container.blocks.resize(kept);
    queued_blocks_ -= static_cast<int64_t>(filtered);
    if (filtered > 0) end(container.ticket, BlockOutcome::kFiltered, filtered);
    if (kept == 0) continue;
    if (container.precondition == nullptr) {
      make_ready(std::move(container));
    } else {
      const uint64_t sequence = container.sequence;
      report("waiting", kept);
      signals_->settled.push_back(sequence);  // looked at once now: it may have been settled while the policies ran
      waiting_.emplace(sequence, std::move(container));
    }
  }
}

// Containers whose precondition is settled go on.
void OffloadPipeline::take_settled() {
  std::vector<uint64_t> settled;
  settled.swap(signals_->settled);
  for (const uint64_t sequence : settled) {
    const auto found = waiting_.find(sequence);
    if (found == waiting_.end()) continue;
    const Precondition::State state = found->second.precondition->state();
    if (state == Precondition::State::kPending) continue;
    Container container = std::move(found->second);
    waiting_.erase(found);
    if (state == Precondition::State::kMet) {
      make_ready(std::move(container));
    } else {
      end_container(container,
                    container.ticket->cancelled ? BlockOutcome::kCancelled : BlockOutcome::kPreconditionFailed);
    }
  }
}

void OffloadPipeline::make_ready(Container container) {
  const QueueKey key{-int64_t{container.priority}, container.sequence};
  in_queue_blocks_ += static_cast<int64_t>(container.blocks.size());
  container.ready_since = clock_.now();
  report("ready", container.blocks.size());
  ages_.emplace(container.ready_since, key);
  in_queue_.emplace(key, std::move(container));
}

OffloadPipeline::Container OffloadPipeline::take_from_queue(std::map<QueueKey, Container>::iterator entry) {
  Container container = std::move(entry->second);
  in_queue_blocks_ -= static_cast<int64_t>(container.blocks.size());
  ages_.erase({container.ready_since, entry->first});
  in_queue_.erase(entry);
  return container;
}

void OffloadPipeline::sweep_if_due(std::chrono::nanoseconds now) {
  if (signals_->sweep_at && *signals_->sweep_at <= now) sweep();
}

// Cancelled containers leave, also those that wait for their precondition (P6).
void OffloadPipeline::sweep() {
  signals_->sweep_at.reset();
  std::erase_if(waiting_, [this](const auto& entry) {
    if (!entry.second.ticket->cancelled) return false;
    end_container(entry.second, BlockOutcome::kCancelled);
    return true;
  });
  for (auto entry = in_queue_.begin(); entry != in_queue_.end();) {
    const auto next = std::next(entry);
    if (entry->second.ticket->cancelled) end_container(take_from_queue(entry), BlockOutcome::kCancelled);
    entry = next;
  }
}

bool OffloadPipeline::batch_is_due(std::chrono::nanoseconds now) {
  if (in_queue_.empty()) return false;
  if (in_queue_blocks_ >= options_.min_batch_size || draining_ > 0) return true;
  return ages_.begin()->first + options_.flush_interval <= now;
}

// The commitment (P3): sweep (P4), upgrade, one flat batch (P5). Whole containers only (P1).
void OffloadPipeline::commit_batch() {
  if (signals_->sweep_at) sweep();
  Batch batch;
  size_t blocks = 0;
  while (!in_queue_.empty()) {
    const size_t size = in_queue_.begin()->second.blocks.size();
    if (blocks > 0 && blocks + size > static_cast<size_t>(options_.max_batch_size)) break;
    const Container container = take_from_queue(in_queue_.begin());
    blocks += size;
    queued_blocks_ -= static_cast<int64_t>(size);
    container.ticket->committed = true;
    const size_t before = batch.blocks.size();
    for (const BlockName& block : container.blocks) {
      if (!send_off(block.key)) {
        end(container.ticket, BlockOutcome::kPresent, 1);
      } else if (!route_.upgrade(block)) {
        arrived(block.key);
        end(container.ticket, BlockOutcome::kEvicted, 1);
      } else {
        batch.blocks.push_back(block);
      }
    }
    if (batch.blocks.size() > before) batch.owners.emplace_back(container.ticket, batch.blocks.size() - before);
  }
  if (batch.blocks.empty()) return;
  report("committed", batch.blocks.size());
  on_deck_.push_back(std::move(batch));
  signals_->deck.notify_one();
}

bool OffloadPipeline::send_off(const Digest& key) {
  if (spare_nodes_.empty()) return on_the_way_.insert(key).second;
  auto node = std::move(spare_nodes_.back());
  spare_nodes_.pop_back();
  node.value() = key;
  auto inserted = on_the_way_.insert(std::move(node));
  if (!inserted.inserted) spare_nodes_.push_back(std::move(inserted.node));
  return inserted.inserted;
}

void OffloadPipeline::arrived(const Digest& key) { spare_nodes_.push_back(on_the_way_.extract(key)); }

std::optional<std::chrono::nanoseconds> OffloadPipeline::next_deadline() {
  std::optional<std::chrono::nanoseconds> next = signals_->sweep_at;
  if (on_deck_.size() >= static_cast<size_t>(options_.on_deck_batches)) return next;  // a transfer thread will wake us
  if (!ages_.empty()) {
    const std::chrono::nanoseconds due = ages_.begin()->first + options_.flush_interval;
    if (!next || due < *next) next = due;
  }
  return next;
}

// A transfer thread.
void OffloadPipeline::transfer() {
  Lock lock(signals_->mutex);
  while (true) {
    signals_->deck.wait(lock, [this] { return !on_deck_.empty() || ending_; });
    if (on_deck_.empty()) return;
    transfer_one(lock);
  }
}

void OffloadPipeline::transfer_one(Lock& lock) {
  const Batch batch = std::move(on_deck_.front());
  on_deck_.pop_front();
  ++transferring_;
  if (!in_queue_.empty() && on_deck_.size() <= static_cast<size_t>(options_.on_deck_batches) / 2)
    signals_->decide.notify_one();
  lock.unlock();
  std::vector<BlockOutcome> outcomes(batch.blocks.size(), BlockOutcome::kFailed);
  const std::chrono::nanoseconds began = clock_.now();
  route_.transfer(batch.blocks, outcomes);
  if (sink_ != nullptr) {
    sink_->on_transfer(
        {.route = route_.name(),
         .blocks = batch.blocks.size(),
         .transferred = static_cast<uint64_t>(std::count(outcomes.begin(), outcomes.end(), BlockOutcome::kTransferred)),
         .seconds = seconds_between(began, clock_.now())});
  }
  lock.lock();
  auto outcome = outcomes.begin();
  for (const auto& [ticket, count] : batch.owners) {
    for (size_t i = 0; i < count; ++i) end(ticket, *outcome++, 1);
  }
  for (const BlockName& block : batch.blocks) arrived(block.key);
  --transferring_;
  if (idle()) signals_->idle.notify_all();
}

}  // namespace torpor
