// SPDX-License-Identifier: Apache-2.0
#include "kvcache/offload_queue.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor {

std::string_view name(Way way) {
  switch (way) {
    case Way::kOnboard: return "onboard";
    case Way::kOffload: return "offload";
    case Way::kDemote: return "demote";
    case Way::kPublish: return "publish";
    case Way::kLookup: return "lookup";
    case Way::kPrefetch: return "prefetch";
  }
  return "?";
}

std::string_view name(CandidateState state) {
  switch (state) {
    case CandidateState::kNone: return "none";
    case CandidateState::kWaiting: return "waiting";
    case CandidateState::kQueued: return "queued";
    case CandidateState::kPromoted: return "promoted";
    case CandidateState::kCompleted: return "completed";
    case CandidateState::kSkipped: return "skipped";
  }
  return "none";
}

Status OffloadQueueOptions::validate() const {
  const auto check = [](std::string_view option, int64_t value, int64_t least) -> Status {
    if (value >= least) return ok();
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} is {}", option, value),
                 .next_step = fmt::format("use {} or more", least)};
  };
  TORPOR_RETURN_IF_ERROR(check("max_batch_size", max_batch_size, 1));
  TORPOR_RETURN_IF_ERROR(check("min_batch_size", min_batch_size, 1));
  TORPOR_RETURN_IF_ERROR(check("flush_interval", flush_interval.count(), 0));
  TORPOR_RETURN_IF_ERROR(check("policy_timeout", policy_timeout.count(), 1));
  TORPOR_RETURN_IF_ERROR(check("sweep_interval", sweep_interval.count(), 1));
  TORPOR_RETURN_IF_ERROR(check("max_concurrent_transfers", max_concurrent_transfers, 1));
  TORPOR_RETURN_IF_ERROR(check("on_deck_batches", on_deck_batches, 1));
  TORPOR_RETURN_IF_ERROR(check("loading_batches", loading_batches, 1));
  TORPOR_RETURN_IF_ERROR(check("queue_blocks", queue_blocks, 1));
  if (min_batch_size > max_batch_size) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("min_batch_size is {}, max_batch_size is {}", min_batch_size, max_batch_size),
                 .next_step = "use a min_batch_size that is not larger"};
  }
  return ok();
}

// ---- handles

TransferStatus TransferHandle::status() const {
  if (ticket_->ended == ticket_->blocks) return TransferStatus::kDone;
  return ticket_->committed ? TransferStatus::kCommitted : TransferStatus::kQueued;
}

void TransferHandle::cancel() {
  if (ticket_->committed || ticket_->cancelled || ticket_->container < 0 || ticket_->queue == nullptr) return;
  ticket_->cancelled = true;
  ticket_->queue->cancelled(ticket_->container);
}

Result<TransferResult> TransferHandle::wait(std::chrono::nanoseconds timeout) const {
  if (!any()) return TransferResult{};  // there was nothing to move
  constexpr std::chrono::nanoseconds kMostWait = std::chrono::hours(24 * 365);
  const auto until = std::chrono::steady_clock::now() + std::min(timeout, kMostWait);
  const detail::TransferTicket& ticket = *ticket_;
  detail::TransferWaiters& waiters = *ticket.waiters;
  {
    const MutexLock lock(waiters.mutex);
    ++waiters.waiting;  // before the look at `done`: who sets it afterwards sees that somebody waits
    while (!ticket.done.load() && !waiters.closed.load()) {
      const std::chrono::nanoseconds left = until - std::chrono::steady_clock::now();
      if (left <= std::chrono::nanoseconds(0)) break;
      waiters.changed.wait_for(waiters.mutex, left);
    }
    --waiters.waiting;
  }
  if (ticket.done.load())
    return TransferResult{.blocks = ticket.blocks, .counts = ticket.counts, .cause = ticket.cause};
  if (waiters.closed.load()) {
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("offloading has ended before candidate {}", ticket.number),
                 .next_step = "look into the stores after the next start: what is not there is computed"};
  }
  return Error{.code = Code::kTimeout,
               .what = fmt::format("candidate {} has not ended in {:.3f} s", ticket.number,
                                   std::chrono::duration<double>(timeout).count()),
               .next_step = "wait again, or cancel it: its blocks end while the engine takes steps"};
}

OffloadQueue::~OffloadQueue() {
  end_all(BlockOutcome::kShutDown);
  for (Container& container : containers_) container.ticket.reset();
  waiters_->closed.store(true);
  waiters_->wake();
}

// Nothing of the ticket changes afterwards.
void OffloadQueue::set_done(detail::TransferTicket& ticket) {
  ticket.done.store(true);
  ticket.waiters->wake();
}

// ---- into the queue

// Return the first free container; add one if there is none.
OffloadQueue::Container& OffloadQueue::spare_container() {
  if (free_ == kNone) {
    containers_.emplace_back();
    free_ = static_cast<int32_t>(containers_.size()) - 1;
  }
  return at(free_);
}

void OffloadQueue::free_container(int32_t container) {
  Container& of = at(container);
  of.ticket->container = kNone;
  of.ticket->queue = nullptr;
  of.ticket.reset();
  of.blocks.clear();
  of.next = free_;
  free_ = container;
}

TransferHandle OffloadQueue::enqueue(const Enqueue& how, std::span<const QueuedBlock> blocks, uint64_t offered,
                                     BlockOutcome filtered, Time now) {
  // Allocate all memory first, so that a failure has changed nothing.
  InQueue& queue = in_queue(how.way);
  grow(queue.levels, queue.levels.size() + waiting_.size() + 1);
  grow(waiting_, waiting_.size() + 1);
  grow(ended_owners_, ended_owners_.size() + owned_tickets_ + 1);
  Container& made = spare_container();
  made.blocks.assign(blocks.begin(), blocks.end());
  auto ticket = std::make_shared<detail::TransferTicket>();
  ticket->waiters = waiters_;
  ticket->blocks = offered;
  ticket->owner = how.owner;
  ticket->number = static_cast<uint64_t>(how.way) << 48 | ++tickets_;
  owned_tickets_ += how.owner == UINT32_MAX ? 0 : 1;
  TransferHandle handle(ticket);
  if (offered > blocks.size()) end(ticket, how.way, filtered, offered - blocks.size());
  if (offered == 0) set_done(*ticket);
  if (blocks.empty()) return handle;
  // Ways to and from a disk or a network have limits of their own, so that a slow one does not keep blocks from host
  // memory.
  constexpr std::array kSlow = {Way::kDemote, Way::kPublish, Way::kPrefetch};
  int64_t before = queued_blocks_;
  for (const Way way : kSlow) before -= in_queue(way).blocks;
  if (std::find(kSlow.begin(), kSlow.end(), how.way) != kSlow.end()) before = in_queue(how.way).blocks;
  // A load waits at most for blocks that its request holds, and the engine waits for it.
  const bool bounded = how.way != Way::kOnboard && !how.within_step;
  if (bounded && before + static_cast<int64_t>(blocks.size()) > options_.queue_blocks) {
    end(ticket, how.way, BlockOutcome::kQueueFull, blocks.size());
    return handle;
  }
  const bool waits = how.after_step > acknowledged_;
  const int32_t container = std::exchange(free_, made.next);
  made.ticket = std::move(ticket);
  made.ticket->queue = this;
  made.ticket->container = container;
  made.way = how.way;
  made.priority = how.priority;
  made.after_step = how.after_step;
  made.waiting = waits;
  made.held = false;
  made.skip = false;
  made.within_step = how.within_step;
  queued_blocks_ += static_cast<int64_t>(blocks.size());
  if (waits) {
    move(*made.ticket, CandidateState::kWaiting, blocks.size());
    waiting_.push_back(container);
  } else {
    make_ready(container, now);
  }
  return handle;
}

void OffloadQueue::make_ready(int32_t container, Time now) {
  Container& made = at(container);
  made.waiting = false;
  made.held = false;
  made.ready_since = now;
  made.next = kNone;
  InQueue& queue = in_queue(made.way);
  auto level = std::lower_bound(queue.levels.begin(), queue.levels.end(), made.priority,
                                [](const Level& each, int32_t priority) { return each.priority > priority; });
  if (level == queue.levels.end() || level->priority != made.priority)
    level = queue.levels.insert(level, Level{.priority = made.priority});
  (level->last == kNone ? level->first : at(level->last).next) = container;
  level->last = container;
  queue.blocks += static_cast<int64_t>(made.blocks.size());
  if (made.ticket->state != CandidateState::kQueued) move(*made.ticket, CandidateState::kQueued, made.blocks.size());
}

void OffloadQueue::move(detail::TransferTicket& ticket, CandidateState to, uint64_t blocks) const {
  const CandidateState from = std::exchange(ticket.state, to);
  (void)port_.record({.type = EventType::kCandidate,
                      .from = static_cast<uint8_t>(from),
                      .to = static_cast<uint8_t>(to),
                      .request = event_request(ticket.owner),
                      .transfer = ticket.number,
                      .a = blocks});
}

void OffloadQueue::publish_planned(const Ticket& ticket, uint64_t job, uint64_t blocks) const {
  (void)port_.record({.type = EventType::kPlanned,
                      .request = event_request(ticket->owner),
                      .transfer = ticket->number,
                      .a = job,
                      .b = blocks});
}

void OffloadQueue::acknowledge(uint64_t step, Time now) {
  acknowledged_ = std::max(acknowledged_, step);
  size_t kept = 0;
  for (const int32_t container : waiting_) {
    if (at(container).after_step > acknowledged_ || at(container).held) {
      waiting_[kept++] = container;
    } else {
      make_ready(container, now);
    }
  }
  waiting_.resize(kept);
}

void OffloadQueue::fail_step(uint64_t step) {
  size_t kept = 0;
  for (const int32_t container : waiting_) {
    if (at(container).after_step != step) {
      waiting_[kept++] = container;
    } else {
      end_container(container, BlockOutcome::kPreconditionFailed);
    }
  }
  waiting_.resize(kept);
}

// ---- out of it again

void OffloadQueue::end_container(int32_t container, BlockOutcome outcome) {
  Container& of = at(container);
  queued_blocks_ -= static_cast<int64_t>(of.blocks.size());
  end(of.ticket, of.way, outcome, of.blocks.size());
  free_container(container);
}

void OffloadQueue::cancelled(int32_t container) {
  if (!at(container).waiting) {
    any_cancelled_ = true;  // the next sweep ends it
    return;
  }
  std::erase(waiting_, container);
  end_container(container, BlockOutcome::kCancelled);
}

uint64_t OffloadQueue::cancel(uint64_t number) {
  const auto found =
      std::find_if(containers_.begin(), containers_.end(), [&](const Container& each) { return each.is(number); });
  if (found == containers_.end() || found->ticket->cancelled) return 0;
  const uint64_t blocks = found->blocks.size();
  found->ticket->cancelled = true;
  cancelled(found->ticket->container);
  sweep();
  return blocks;
}

uint64_t OffloadQueue::skip(uint64_t number) {
  const auto found =
      std::find_if(containers_.begin(), containers_.end(), [&](const Container& each) { return each.is(number); });
  if (found == containers_.end() || found->way != Way::kOnboard || found->skip || found->ticket->cancelled) return 0;
  found->skip = true;  // set_held_aside() lets it go
  return found->blocks.size();
}

void OffloadQueue::sweep_if_due(Time now) {
  if (any_cancelled_ && now - swept_at_ >= options_.sweep_interval) sweep();
  if (!any_cancelled_) swept_at_ = now;
}

void OffloadQueue::sweep() {
  any_cancelled_ = false;
  take_out([this](int32_t container) {
    if (!at(container).ticket->cancelled) return false;
    end_container(container, BlockOutcome::kCancelled);
    return true;
  });
}

// Remove the containers for which `gone` returns true from the in-queues.
template <class Gone>
void OffloadQueue::take_out(Gone gone) {
  for (InQueue& queue : in_queues_) {
    for (Level& level : queue.levels) {
      int32_t last = kNone;
      for (int32_t next = kNone, container = level.first; container != kNone; container = next) {
        next = at(container).next;
        const auto blocks = static_cast<int64_t>(at(container).blocks.size());
        if (!gone(container)) {
          last = container;
          continue;
        }
        queue.blocks -= blocks;
        (last == kNone ? level.first : at(last).next) = next;
      }
      level.last = last;
    }
    std::erase_if(queue.levels, [](const Level& level) { return level.first == kNone; });
  }
}

bool OffloadQueue::may_go(const Container& container) const {
  if (container.skip) return true;
  return port_.may_go({.type = EventType::kCandidate,
                       .from = static_cast<uint8_t>(CandidateState::kQueued),
                       .to = static_cast<uint8_t>(CandidateState::kPromoted),
                       .request = event_request(container.ticket->owner),
                       .transfer = container.ticket->number,
                       .a = container.blocks.size()});
}

void OffloadQueue::set_held_aside(Time now) {
  if (!any_held_ && !port_.holds()) return;
  // Allocate all memory first.
  grow(waiting_, containers_.size());
  for (InQueue& queue : in_queues_) grow(queue.levels, queue.levels.size() + waiting_.capacity());
  // Return released candidates first, so that none is asked about twice.
  size_t kept = 0;
  for (const int32_t container : waiting_) {
    if (at(container).held && may_go(at(container))) {
      make_ready(container, now);
    } else {
      waiting_[kept++] = container;
    }
  }
  waiting_.resize(kept);
  any_held_ = std::any_of(waiting_.begin(), waiting_.end(), [this](int32_t container) { return at(container).held; });
  if (!port_.holds()) return;
  take_out([this](int32_t container) {
    Container& each = at(container);
    if (each.ticket->cancelled || each.within_step || may_go(each)) return false;
    waiting_.push_back(container);
    return any_held_ = each.waiting = each.held = true;
  });
}

bool OffloadQueue::has_room(Way way) const {
  if (way == Way::kOnboard) return under_way_[static_cast<size_t>(way)] < options_.loading_batches;
  return under_way_[static_cast<size_t>(way)] < options_.max_concurrent_transfers + options_.on_deck_batches;
}

bool OffloadQueue::is_open(Way way) const {
  if (in_queues_[static_cast<size_t>(way)].blocks > 0 || jobs_under_way(way) > 0) return true;
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [&](int32_t container) { return containers_[static_cast<size_t>(container)].way == way; });
}

bool OffloadQueue::is_due(const InQueue& queue, Way way, Time now) const {
  if (way == Way::kOnboard || queue.blocks >= options_.min_batch_size) return true;
  return std::any_of(queue.levels.begin(), queue.levels.end(), [&](const Level& level) {
    return now - containers_[static_cast<size_t>(level.first)].ready_since >= options_.flush_interval;
  });
}

OffloadQueue::Next OffloadQueue::next(Way way, Time now, bool flush) {
  if (any_cancelled_) sweep();
  Next next;
  const InQueue& queue = in_queue(way);
  if (queue.blocks == 0 || !has_room(way) || (!flush && !is_due(queue, way, now))) return next;
  const auto most = static_cast<size_t>(options_.max_batch_size);
  for (const Level& level : queue.levels) {
    for (int32_t container = level.first; container != kNone; container = at(container).next) {
      const Container& each = at(container);
      if (next.blocks > 0 && next.blocks + each.blocks.size() > most) return next;
      if (next.blocks == 0) next.owner = each.ticket->owner;
      next.skip = each.skip;
      next.blocks += each.blocks.size();
      ++next.containers;
      if (way == Way::kOnboard) return next;  // each request's load is a batch of its own
    }
  }
  return next;
}

void OffloadQueue::commit(Way way, const Next& next, Batch& batch) {
  batch.clear();
  batch.blocks.reserve(next.blocks);
  batch.owners.reserve(next.containers);
  InQueue& queue = in_queue(way);
  for (size_t i = 0; i < next.containers; ++i) {
    Level& level = queue.levels.front();
    const int32_t container = level.first;
    Container& each = at(container);
    batch.blocks.insert(batch.blocks.end(), each.blocks.begin(), each.blocks.end());
    batch.owners.push_back({each.ticket, static_cast<uint32_t>(each.blocks.size())});
    each.ticket->committed = true;
    move(*each.ticket, CandidateState::kPromoted, each.blocks.size());
    queue.blocks -= static_cast<int64_t>(each.blocks.size());
    queued_blocks_ -= static_cast<int64_t>(each.blocks.size());
    level.first = each.next;
    if (level.first == kNone) queue.levels.erase(queue.levels.begin());
    free_container(container);
  }
}

void OffloadQueue::end(const Ticket& ticket, Way way, BlockOutcome outcome, uint64_t blocks, const Status& cause) {
  counts_[static_cast<size_t>(way)][static_cast<size_t>(outcome)] += blocks;
  ticket->counts[static_cast<size_t>(outcome)] += blocks;
  ticket->ended += blocks;
  if (!cause && ticket->cause) ticket->cause = try_catch([&]() -> Status { return cause; });
  (void)port_.record({.type = EventType::kEnded,
                      .to = static_cast<uint8_t>(outcome),
                      .request = event_request(ticket->owner),
                      .transfer = ticket->number,
                      .a = blocks});
  if (ticket->ended == ticket->blocks) {
    move(*ticket, ticket->committed ? CandidateState::kCompleted : CandidateState::kSkipped, ticket->blocks);
  }
  if (ticket->ended != ticket->blocks) return;
  if (ticket->owner != UINT32_MAX) {
    ended_owners_.push_back(ticket->owner);
    --owned_tickets_;
  }
  set_done(*ticket);
}

void OffloadQueue::end_all(BlockOutcome outcome, bool skip_loads) {
  const auto stays = [&](int32_t container) {
    Container& each = at(container);
    if (!skip_loads || each.way != Way::kOnboard || each.ticket->cancelled) return false;
    return each.skip = true;
  };
  std::erase_if(waiting_, [&](int32_t container) {
    if (stays(container)) return false;
    end_container(container, outcome);
    return true;
  });
  take_out([&](int32_t container) {
    if (stays(container)) return false;
    end_container(container, at(container).ticket->cancelled ? BlockOutcome::kCancelled : outcome);
    return true;
  });
  any_cancelled_ = false;
}

Status OffloadQueue::check() const {
  const auto wrong = [](std::string_view what) { return Error{.what = fmt::format("offload queue: {}", what)}; };
  int64_t all = 0;
  for (const int32_t container : waiting_)
    all += static_cast<int64_t>(containers_[static_cast<size_t>(container)].blocks.size());
  for (const InQueue& queue : in_queues_) {
    int64_t blocks = 0;
    for (const Level& level : queue.levels) {
      if (level.first == kNone) return wrong("a level without a container");
      for (int32_t at = level.first; at != kNone; at = containers_[static_cast<size_t>(at)].next) {
        const Container& container = containers_[static_cast<size_t>(at)];
        if (container.priority != level.priority || container.ticket == nullptr || container.ticket->container != at)
          return wrong("a container is in the wrong place");
        blocks += static_cast<int64_t>(container.blocks.size());
        if (container.next == kNone && level.last != at) return wrong("a level ends elsewhere");
      }
    }
    if (blocks != queue.blocks) return wrong("an in-queue counts other blocks than it has");
    all += blocks;
  }
  return all == queued_blocks_ ? ok() : Status(wrong("it counts other blocks than it has"));
}

}  // namespace torpor
