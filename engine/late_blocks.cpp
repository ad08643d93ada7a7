#include "engine/late_blocks.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace torpor {

LateBlocks::LateBlocks(TransferEngine& transfers, std::vector<Part> parts, bool own_thread)
    : transfers_(transfers), parts_(std::move(parts)) {
  for (const Part& part : parts_) total_ += part.chunks.size();
  {
    const MutexLock lock(mutex_);
    ended_.reserve(total_);  // from here on it takes no memory
  }
  if (!own_thread) return;
  // Without a thread to be had they come as they are asked for.
  (void)catching([this]() -> Status {
    thread_ = std::thread([this] { run(); });
    return ok();
  });
}

LateBlocks::~LateBlocks() {
  cancel();
  if (thread_.joinable()) thread_.join();
}

void LateBlocks::run() noexcept {
  std::optional<JobId> before;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    if (part.alone) {
      if (before) end(parts_[i - 1], *std::exchange(before, std::nullopt));
      transfers_.release_staging();
    }
    const std::optional<JobId> begun = begin(part);
    if (before) end(parts_[i - 1], *before);
    before = begun;
  }
  if (before) end(parts_.back(), *before);
}

bool LateBlocks::pace() noexcept {
  if (next_ == parts_.size()) return false;
  const Part& part = parts_[next_++];
  if (part.alone) transfers_.release_staging();
  if (const std::optional<JobId> begun = begin(part)) end(part, *begun);
  return true;
}

std::optional<JobId> LateBlocks::begin(const Part& part) noexcept {
  std::optional<JobId> begun;
  const Status submitted = catching([&]() -> Status {
    {
      const MutexLock lock(mutex_);
      if (cancelled_) return Error{.code = Code::kAborted, .what = "the wake was ended", .next_step = "none"};
    }
    std::vector<ChunkTransfer> chunks(part.chunks.size());
    for (size_t i = 0; i < chunks.size(); ++i) chunks[i] = {.plan = &part.plans[i], .saved = part.chunks[i]};
    TORPOR_ASSIGN(
        begun,
        transfers_.submit(
            {.kind = JobKind::kRestore, .tier = part.tier, .chunks = std::move(chunks), .urgency = Urgency::kLoad}));
    return ok();
  });
  if (!submitted) lost(part, submitted.error());
  return begun;
}

void LateBlocks::end(const Part& part, JobId id) noexcept {
  const JobResult result = transfers_.wait(id);
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < part.chunks.size(); ++i) {
    // A result without its chunks cannot be: then nothing is known of the copies.
    BlockArrival how = BlockArrival::kUnproven;
    if (i < result.chunks.size()) {
      const BlockOutcome outcome = result.chunks[i].outcome;
      how = outcome == BlockOutcome::kTransferred ? BlockArrival::kArrived
            : outcome == BlockOutcome::kUnproven  ? BlockArrival::kUnproven
                                                  : BlockArrival::kLost;
    }
    ended_.push_back({static_cast<int32_t>(part.chunks[i].key.index), how});
  }
  if (!result.status && why_.empty()) {
    (void)catching([&]() TORPOR_REQUIRES(mutex_) -> Status {
      why_ = result.status.error().to_string();
      return ok();
    });
  }
  changed_.notify_all();
}

void LateBlocks::lost(const Part& part, const Error& why) noexcept {
  const MutexLock lock(mutex_);
  for (const SavedChunk& chunk : part.chunks)
    ended_.push_back({static_cast<int32_t>(chunk.key.index), BlockArrival::kLost});
  if (why_.empty()) {
    (void)catching([&]() TORPOR_REQUIRES(mutex_) -> Status {
      why_ = why.to_string();
      return ok();
    });
  }
  changed_.notify_all();
}

void LateBlocks::wait(LateWait wait, size_t seen) {
  const auto enough = [&]() TORPOR_REQUIRES(mutex_) {
    return ended_.size() == total_ || wait == LateWait::kNone || (wait == LateWait::kSome && ended_.size() > seen);
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

std::vector<LateArrival> LateBlocks::from(size_t seen) const {
  const MutexLock lock(mutex_);
  return {ended_.begin() + static_cast<std::ptrdiff_t>(std::min(seen, ended_.size())), ended_.end()};
}

std::string LateBlocks::why() const {
  const MutexLock lock(mutex_);
  return why_;
}

bool LateBlocks::finished() const {
  const MutexLock lock(mutex_);
  return ended_.size() == total_;
}

void LateBlocks::cancel() noexcept {
  const MutexLock lock(mutex_);
  cancelled_ = true;
}

}  // namespace torpor
