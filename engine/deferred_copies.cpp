// SPDX-License-Identifier: Apache-2.0
#include "engine/deferred_copies.h"

#include <algorithm>
#include <utility>

#include <fmt/core.h>

namespace torpor {

DeferredCopies::DeferredCopies(TransferEngine& transfers, std::vector<Part> parts, bool own_thread)
    : transfers_(transfers), parts_(std::move(parts)) {
  {
    const MutexLock lock(mutex_);
    for (size_t part = 0; part < parts_.size(); ++part) {
      const std::vector<SavedChunk>& chunks = parts_[part].chunks;
      progress_.push_back({.ended = std::vector<uint8_t>(chunks.size())});
      for (size_t i = 0; i < chunks.size(); ++i)
        places_[static_cast<int32_t>(chunks[i].key.index)] = {.part = part, .chunk = i};
      total_ += chunks.size();
    }
    ended_.reserve(total_);  // nothing is allocated from here on
  }
  if (!own_thread) return;
  // If no thread can be started, wait() makes the copies.
  (void)try_catch([this]() -> Status {
    thread_ = std::thread([this] { run(); });
    return ok();
  });
}

DeferredCopies::~DeferredCopies() {
  cancel();
  if (thread_.joinable()) thread_.join();
}

// Return the first preferred part, otherwise the first one, that has not begun; mark it as begun.
std::optional<size_t> DeferredCopies::next() noexcept {
  const MutexLock lock(mutex_);
  auto found = std::find_if(progress_.begin(), progress_.end(),
                            [](const Progress& part) { return part.preferred && !part.begun; });
  if (found == progress_.end())
    found = std::find_if(progress_.begin(), progress_.end(), [](const Progress& part) { return !part.begun; });
  if (found == progress_.end()) return std::nullopt;
  found->begun = true;
  return static_cast<size_t>(found - progress_.begin());
}

void DeferredCopies::run() noexcept {
  std::optional<Begun> before;
  while (const std::optional<size_t> part = next()) {
    if (parts_[*part].alone) {
      if (before) end(*std::exchange(before, std::nullopt));
      transfers_.release_staging();
    }
    std::optional<Begun> begun = begin(*part);
    if (before) end(*before);
    before = std::move(begun);
  }
  if (before) end(*before);
}

bool DeferredCopies::pace() noexcept {
  const std::optional<size_t> part = next();
  if (!part) return false;
  if (parts_[*part].alone) transfers_.release_staging();
  if (const std::optional<Begun> begun = begin(*part)) end(*begun);
  return true;
}

std::optional<DeferredCopies::Begun> DeferredCopies::begin(size_t number) noexcept {
  const Part& part = parts_[number];
  std::optional<Begun> begun;
  const Status submitted = try_catch([&]() -> Status {
    Begun job{.part = number};
    {
      const MutexLock lock(mutex_);
      if (cancelled_) return Error{.code = Code::kAborted, .what = "the wake was ended", .next_step = "none"};
      for (size_t i = 0; i < part.chunks.size(); ++i) {
        if (progress_[number].ended[i] == 0) job.chunks.push_back(i);
      }
    }
    if (job.chunks.empty()) return ok();
    std::vector<ChunkTransfer> chunks(job.chunks.size());
    for (size_t i = 0; i < chunks.size(); ++i)
      chunks[i] = {.plan = &part.plans[job.chunks[i]], .saved = part.chunks[job.chunks[i]]};
    TORPOR_ASSIGN_OR_RETURN(job.id, transfers_.submit({.kind = JobKind::kRestore,
                                                       .store = part.tier,
                                                       .chunks = std::move(chunks),
                                                       .priority = TransferPriority::kLoad}));
    begun = std::move(job);
    return ok();
  });
  if (!submitted) lost(number, submitted.error());
  return begun;
}

void DeferredCopies::end_chunk(Place place, BlockArrival how) noexcept {
  uint8_t& ended = progress_[place.part].ended[place.chunk];
  if (std::exchange(ended, 1) != 0) return;
  ended_.push_back({static_cast<int32_t>(parts_[place.part].chunks[place.chunk].key.index), how});
}

void DeferredCopies::end(const Begun& begun) noexcept {
  const JobResult result = transfers_.wait(begun.id);
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < begun.chunks.size(); ++i) {
    // A result always has its chunks. If it had not, nothing would be known of the copies.
    BlockArrival how = BlockArrival::kUnproven;
    if (i < result.chunks.size()) {
      const BlockOutcome outcome = result.chunks[i].outcome;
      how = outcome == BlockOutcome::kTransferred ? BlockArrival::kArrived
            : outcome == BlockOutcome::kUnproven  ? BlockArrival::kUnproven
                                                  : BlockArrival::kLost;
    }
    end_chunk({.part = begun.part, .chunk = begun.chunks[i]}, how);
  }
  if (!result.status && why_.empty()) {
    (void)try_catch([&]() TORPOR_REQUIRES(mutex_) -> Status {
      why_ = result.status.error().to_string();
      return ok();
    });
  }
  changed_.notify_all();
}

void DeferredCopies::lost(size_t part, const Error& why) noexcept {
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < parts_[part].chunks.size(); ++i) end_chunk({.part = part, .chunk = i}, BlockArrival::kLost);
  if (why_.empty()) {
    (void)try_catch([&]() TORPOR_REQUIRES(mutex_) -> Status {
      why_ = why.to_string();
      return ok();
    });
  }
  changed_.notify_all();
}

void DeferredCopies::prefer(std::span<const int32_t> blocks) noexcept {
  const MutexLock lock(mutex_);
  for (const int32_t block : blocks) {
    if (const auto place = places_.find(block); place != places_.end()) progress_[place->second.part].preferred = true;
  }
}

void DeferredCopies::skip(std::span<const int32_t> blocks) noexcept {
  const MutexLock lock(mutex_);
  for (const int32_t block : blocks) {
    const auto place = places_.find(block);
    if (place == places_.end() || progress_[place->second.part].begun) continue;
    end_chunk(place->second, BlockArrival::kSkipped);
  }
  changed_.notify_all();
}

void DeferredCopies::wait(DeferredWait wait, size_t seen) {
  const auto enough = [&]() TORPOR_REQUIRES(mutex_) {
    return ended_.size() == total_ || wait == DeferredWait::kNone ||
           (wait == DeferredWait::kSome && ended_.size() > seen);
  };
  MutexLock lock(mutex_);
  while (!enough()) {
    if (thread_.joinable()) {
      changed_.wait(mutex_);
    } else {
      lock.unlock();
      (void)pace();
      lock.lock();
    }
  }
}

std::vector<DeferredArrival> DeferredCopies::from(size_t seen) const {
  const MutexLock lock(mutex_);
  return {ended_.begin() + static_cast<std::ptrdiff_t>(std::min(seen, ended_.size())), ended_.end()};
}

std::string DeferredCopies::why() const {
  const MutexLock lock(mutex_);
  return why_;
}

void DeferredCopies::cancel() noexcept {
  const MutexLock lock(mutex_);
  cancelled_ = true;
}

}  // namespace torpor
