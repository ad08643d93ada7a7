#include "offload/offload_pipeline.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/log.h"

namespace torpor {

namespace detail {
// One enqueue: its token, its counts, and how the caller waits for it. Guarded by the pipeline's mutex.
struct OffloadTicket {
  std::shared_ptr<OffloadSignals> signals;
  CondVar done;
  bool cancelled = false;
  bool committed = false;
  uint64_t blocks = 0;
  uint64_t ended = 0;
  uint64_t under_way = 0;  // on deck, or being transferred
  OutcomeCounts counts{};
  std::list<std::shared_ptr<OffloadTicket>>::iterator in_open;  // its place, until it has ended
};
}  // namespace detail

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
  const MutexLock lock(ticket_->signals->mutex);
  if (ticket_->ended == ticket_->blocks) return OffloadStatus::kDone;
  return ticket_->committed ? OffloadStatus::kCommitted : OffloadStatus::kQueued;
}

OutcomeCounts OffloadHandle::counts() const {
  const MutexLock lock(ticket_->signals->mutex);
  return ticket_->counts;
}

bool OffloadHandle::wait(std::optional<std::chrono::milliseconds> timeout) const {
  const auto deadline = std::chrono::steady_clock::now() + timeout.value_or(std::chrono::milliseconds(0));
  detail::OffloadSignals& signals = *ticket_->signals;
  const MutexLock lock(signals.mutex);
  while (ticket_->ended != ticket_->blocks) {
    if (!timeout) {
      ticket_->done.wait(signals.mutex);
      continue;
    }
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) return false;
    ticket_->done.wait_for(signals.mutex, left);
  }
  return true;
}

void OffloadHandle::request_cancel() {
  {
    detail::OffloadSignals& signals = *ticket_->signals;
    const MutexLock lock(signals.mutex);
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
}

// One thread that decides and one that transfers are needed; of the others as many as there are to be had.
Status OffloadPipeline::start() {
  try {
    threads_.reserve(1 + static_cast<size_t>(options_.max_concurrent_transfers));
    threads_.emplace_back([this] { decide(); });
    for (int32_t i = 0; i < options_.max_concurrent_transfers; ++i) threads_.emplace_back([this] { transfer(); });
  } catch (const std::exception& error) {
    if (threads_.size() < 2) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("{} needs two threads: {}", route_.name(), error.what()),
                   .next_step = "raise the limit of threads, or end some",
                   .origin = Origin::kSystem};
    }
    log().warn("{} transfers with {} threads instead of {}: {}", route_.name(), threads_.size() - 1,
               options_.max_concurrent_transfers, error.what());
  }
  return ok();
}

Result<std::unique_ptr<OffloadPipeline>> OffloadPipeline::create(BlockRoute& route, const Clock& clock,
                                                                 OffloadOptions options,
                                                                 std::vector<std::unique_ptr<OffloadPolicy>> policies,
                                                                 EventSink* sink) {
  TORPOR_TRY(options.validate());
  std::unique_ptr<OffloadPipeline> pipeline(new OffloadPipeline(route, clock, options, std::move(policies), sink));
  if (options.own_threads) TORPOR_TRY(pipeline->start());
  return pipeline;
}

OffloadPipeline::~OffloadPipeline() { stop(); }

void OffloadPipeline::stop() {
  {
    const MutexLock lock(signals_->mutex);
    ending_ = true;
  }
  signals_->decide.notify_one();
  signals_->deck.notify_all();
  for (std::thread& thread : threads_) thread.join();
  const MutexLock lock(signals_->mutex);
  shut_down();
  while (!on_deck_.empty()) transfer_one();
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
    const MutexLock lock(signals_->mutex);
    sequence = next_sequence_++;
  }
  // Before it is queued: it is looked at once then, so nothing is missed.
  if (precondition != nullptr) {
    precondition->on_settled([signals = signals_, sequence] {
      {
        const MutexLock lock(signals->mutex);
        try {
          signals->settled.push_back(sequence);
        } catch (const std::bad_alloc&) {
          signals->any_settled = true;
        }
      }
      signals->decide.notify_one();
    });
  }
  {
    const MutexLock lock(signals_->mutex);
    Container container{std::move(blocks), std::move(precondition), ticket, priority, sequence};
    if (count > 0) ticket->in_open = open_.insert(open_.end(), ticket);
    report("enqueued", container.blocks.size());
    queued_blocks_ += count;
    if (!usable_) {
      end_container(container, BlockOutcome::kFailed);
      return handle;
    }
    if (queued_blocks_ > options_.queue_blocks) {
      end_container(container, BlockOutcome::kQueueFull);
      return handle;
    }
    try {
      new_.push_back(std::move(container));
    } catch (...) {
      queued_blocks_ -= count;
      if (count > 0) open_.erase(ticket->in_open);
      throw;
    }
  }
  signals_->decide.notify_one();
  return handle;
}

void OffloadPipeline::drain() {
  const MutexLock lock(signals_->mutex);
  ++draining_;
  signals_->decide.notify_one();
  while (!options_.own_threads && !idle()) {
    decide_once();
    if (!on_deck_.empty()) transfer_one();
  }
  while (!idle()) signals_->idle.wait(signals_->mutex);
  --draining_;
}

bool OffloadPipeline::step() {
  const MutexLock lock(signals_->mutex);
  decide_once();
  if (!on_deck_.empty()) transfer_one();
  return !new_.empty() || !signals_->settled.empty() || !on_deck_.empty() || batch_is_due(clock_.now());
}

OutcomeCounts OffloadPipeline::counts() const {
  const MutexLock lock(signals_->mutex);
  return counts_;
}

Status OffloadPipeline::usable() const {
  const MutexLock lock(signals_->mutex);
  return usable_;
}

int64_t OffloadPipeline::queued_blocks() const {
  const MutexLock lock(signals_->mutex);
  return queued_blocks_;
}

bool OffloadPipeline::idle() const {
  return new_.empty() && waiting_.empty() && in_queue_.empty() && on_deck_.empty() && transferring_ == 0 &&
         !evaluating_;
}

// Who listens and throws loses the event, nothing else.
void OffloadPipeline::report(std::string_view stage, uint64_t blocks) const {
  if (sink_ == nullptr || blocks == 0) return;
  try {
    sink_->on_stage({.route = route_.name(), .stage = stage, .items = blocks});
  } catch (...) {
    log().warn("{}: an event was lost, its receiver threw", route_.name());
  }
}

void OffloadPipeline::end(const std::shared_ptr<detail::OffloadTicket>& ticket, BlockOutcome outcome, uint64_t blocks) {
  counts_[static_cast<size_t>(outcome)] += blocks;
  ticket->counts[static_cast<size_t>(outcome)] += blocks;
  ticket->ended += blocks;
  report(name(outcome), blocks);
  if (ticket->ended != ticket->blocks || blocks == 0) return;
  ticket->done.notify_all();
  const std::shared_ptr<detail::OffloadTicket> kept = ticket;
  open_.erase(kept->in_open);
}

void OffloadPipeline::end_container(const Container& container, BlockOutcome outcome) {
  queued_blocks_ -= static_cast<int64_t>(container.blocks.size());
  end(container.ticket, outcome, container.blocks.size());
}

void OffloadPipeline::decide_once() {
  const Status decided = catching([this]() TORPOR_REQUIRES(signals_->mutex) {
    decide_now();
    return ok();
  });
  if (!decided) fail(decided);
  if (idle()) signals_->idle.notify_all();
}

void OffloadPipeline::decide_now() {
  take_new();
  take_settled();
  sweep_if_due(clock_.now());
  while (!ending_ && on_deck_.size() < static_cast<size_t>(options_.on_deck_batches) && batch_is_due(clock_.now()))
    commit_batch();
}

// All that is not on deck ends, wherever deciding left it.
void OffloadPipeline::fail(const Status& failure) {
  log().error("{} is over, blocks that are offered to it fail: {}", route_.name(), failure.error().what);
  if (usable_) {
    usable_ = catching([&]() -> Status { return failure.error().within(route_.name()); });
  }
  new_.clear();
  waiting_.clear();
  in_queue_.clear();
  ages_.clear();
  in_queue_blocks_ = queued_blocks_ = 0;
  evaluating_ = false;
  for (auto next = open_.begin(); next != open_.end();) {
    const std::shared_ptr<detail::OffloadTicket> ticket = *next++;
    const uint64_t rest = ticket->blocks - ticket->ended - ticket->under_way;
    if (rest > 0) end(ticket, BlockOutcome::kFailed, rest);
  }
}

// The deciding thread.
void OffloadPipeline::decide() {
  const MutexLock lock(signals_->mutex);
  while (true) {
    decide_once();
    if (ending_) break;
    if (!new_.empty() || !signals_->settled.empty() || signals_->any_settled) continue;
    if (const std::optional<std::chrono::nanoseconds> deadline = next_deadline()) {
      signals_->decide.wait_for(signals_->mutex, std::max(*deadline - clock_.now(), std::chrono::nanoseconds(1)));
    } else {
      signals_->decide.wait(signals_->mutex);
    }
  }
  shut_down();
}

// Ends all that is not committed.
void OffloadPipeline::shut_down() {
  const auto end_here = [this](const Container& container) TORPOR_REQUIRES(signals_->mutex) {
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
void OffloadPipeline::take_new() {
  std::deque<Container> arrived;
  arrived.swap(new_);
  if (arrived.empty()) return;
  enum class Verdict : uint8_t { kGood, kLate, kThrew };
  std::vector<std::vector<uint8_t>> wanted(arrived.size());
  std::vector<Verdict> verdicts(arrived.size(), Verdict::kGood);
  for (size_t i = 0; i < arrived.size(); ++i) wanted[i].assign(arrived[i].blocks.size(), 1);
  evaluating_ = true;
  signals_->mutex.unlock();
  for (size_t i = 0; i < arrived.size(); ++i) {
    const std::chrono::nanoseconds deadline = clock_.now() + options_.policy_timeout;
    try {
      for (const auto& policy : policies_) {
        if (policy->evaluate(arrived[i].blocks, wanted[i], deadline) && clock_.now() <= deadline) continue;
        verdicts[i] = Verdict::kLate;
        break;
      }
    } catch (...) {
      verdicts[i] = Verdict::kThrew;
    }
  }
  signals_->mutex.lock();
  evaluating_ = false;
  for (size_t i = 0; i < arrived.size(); ++i) {
    Container& container = arrived[i];
    if (container.ticket->cancelled) {  // a sweep does not look here
      end_container(container, BlockOutcome::kCancelled);
      continue;
    }
    if (verdicts[i] != Verdict::kGood) {
      if (verdicts[i] == Verdict::kThrew) log().error("{}: a policy threw, its blocks fail", route_.name());
      end_container(container, verdicts[i] == Verdict::kLate ? BlockOutcome::kPolicyTimeout : BlockOutcome::kFailed);
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
  if (signals_->any_settled) {
    for (const auto& [sequence, container] : waiting_) settled.push_back(sequence);
    signals_->any_settled = false;
  }
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
  for (auto entry = waiting_.begin(); entry != waiting_.end();) {
    if (!entry->second.ticket->cancelled) {
      ++entry;
      continue;
    }
    end_container(entry->second, BlockOutcome::kCancelled);
    entry = waiting_.erase(entry);
  }
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
  size_t blocks = 0;
  size_t containers = 0;
  for (const auto& [key, container] : in_queue_) {
    const size_t size = container.blocks.size();
    if (blocks > 0 && blocks + size > static_cast<size_t>(options_.max_batch_size)) break;
    blocks += size;
    ++containers;
  }
  // In its place from the beginning, with room for all: what is upgraded is transferred, even if the rest fails.
  Batch& batch = on_deck_.emplace_back();
  const Status all = catching([&]() TORPOR_REQUIRES(signals_->mutex) {
    batch.blocks.reserve(blocks);
    batch.owners.reserve(containers);
    batch.outcomes.assign(blocks, BlockOutcome::kFailed);
    for (; containers > 0; --containers) {
      const Container container = take_from_queue(in_queue_.begin());
      queued_blocks_ -= static_cast<int64_t>(container.blocks.size());
      container.ticket->committed = true;
      batch.owners.emplace_back(container.ticket, 0);
      for (const BlockName& block : container.blocks) {
        if (!send_off(block.key)) {
          end(container.ticket, BlockOutcome::kPresent, 1);
        } else if (!route_.upgrade(block)) {
          arrived(block.key);
          end(container.ticket, BlockOutcome::kEvicted, 1);
        } else {
          batch.blocks.push_back(block);
          ++batch.owners.back().second;
          ++container.ticket->under_way;
        }
      }
    }
    return ok();
  });
  if (batch.blocks.empty()) {
    on_deck_.pop_back();
  } else {
    batch.outcomes.resize(batch.blocks.size());
    report("committed", batch.blocks.size());
    signals_->deck.notify_one();
  }
  if (!all) fail(all);
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

void OffloadPipeline::arrived(const Digest& key) {
  try {
    spare_nodes_.push_back(on_the_way_.extract(key));
  } catch (const std::bad_alloc&) {  // one less to spare
  }
}

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
  const MutexLock lock(signals_->mutex);
  while (true) {
    while (on_deck_.empty() && !ending_) signals_->deck.wait(signals_->mutex);
    if (on_deck_.empty()) return;
    transfer_one();
  }
}

void OffloadPipeline::transfer_one() {
  Batch batch = std::move(on_deck_.front());
  on_deck_.pop_front();
  ++transferring_;
  if (!in_queue_.empty() && on_deck_.size() <= static_cast<size_t>(options_.on_deck_batches) / 2)
    signals_->decide.notify_one();
  signals_->mutex.unlock();
  const std::chrono::nanoseconds began = clock_.now();
  try {
    route_.transfer(batch.blocks, batch.outcomes);
  } catch (const std::exception& error) {  // what has no outcome yet has failed
    log().error("{}: a transfer of {} blocks threw: {}", route_.name(), batch.blocks.size(), error.what());
  } catch (...) {
    log().error("{}: a transfer of {} blocks threw", route_.name(), batch.blocks.size());
  }
  if (sink_ != nullptr) {
    try {
      const auto transferred = std::count(batch.outcomes.begin(), batch.outcomes.end(), BlockOutcome::kTransferred);
      sink_->on_transfer({.route = route_.name(),
                          .items = batch.blocks.size(),
                          .transferred = static_cast<uint64_t>(transferred),
                          .seconds = seconds_between(began, clock_.now())});
    } catch (...) {
      log().warn("{}: an event was lost, its receiver threw", route_.name());
    }
  }
  signals_->mutex.lock();
  auto outcome = batch.outcomes.begin();
  for (const auto& [ticket, count] : batch.owners) {
    ticket->under_way -= count;
    for (size_t i = 0; i < count; ++i) end(ticket, *outcome++, 1);
  }
  for (const BlockName& block : batch.blocks) arrived(block.key);
  --transferring_;
  if (idle()) signals_->idle.notify_all();
}

}  // namespace torpor
