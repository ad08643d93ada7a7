// SPDX-License-Identifier: Apache-2.0
#include "base/swap_channel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <ctime>
#include <utility>

#include <fmt/core.h>

#include "base/linux_file.h"

namespace torpor {
namespace {

constexpr uint64_t kSwapMark = 0x324d4f4f52524f54;  // "TORROOM2"
constexpr const char* kSwapFile = "a swap file";
// interval at which to look for ended processes
constexpr std::chrono::nanoseconds kLook = std::chrono::milliseconds{50};

// Locked bytes: 0 and 1 for the sides, this one for the process that made the file.
constexpr int kMaker = 2;

// A lock of the open file, not of the process: it lasts until this descriptor is closed, whatever else the process does
// with the file.
struct flock lock_at(int byte) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}
bool take_lock(int fd, int byte) {
  struct flock lock = lock_at(byte);
  return ::fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

// Open the file. Only this user may write to its directory.
Result<Descriptor> open_own(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (!path.starts_with('/') || slash + 1 == path.size()) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("\"{}\" is not the absolute path of {}", path, kSwapFile),
                 .next_step = "give the path as it was made"};
  }
  const std::string folder = path.substr(0, slash + 1);
  TORPOR_ASSIGN_OR_RETURN(const Descriptor directory,
                          guarded(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), folder));
  struct stat status {};
  if (::fstat(directory.get(), &status) != 0) return system_error(errno, fmt::format("looking at {}", folder));
  if (!is_own(status)) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} is not a directory of this user alone", folder),
                 .next_step = "use one of your own engines"};
  }
  const int flags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  return guarded(::openat(directory.get(), path.c_str() + slash + 1, flags), fmt::format("opening {}", path));
}

}  // namespace

struct SwapChannel::Page {
  std::atomic<uint64_t> mark;
  std::atomic<uint32_t> changes;  // waiters wait for this to change
  std::atomic<uint32_t> ended;
  std::atomic<uint32_t> agreement;
  std::array<std::atomic<uint32_t>, 2> heartbeats;  // counts, by side
  std::atomic<double> peer_timeout;                 // seconds
  std::array<std::atomic<uint64_t>, 2> sizes;       // ranks, by side
  struct Rank {
    std::atomic<uint64_t> supply, lent, released, acquired;  // bytes
  };
  std::array<Rank, kMostRanks> ranks;
};

// Measures how long one side has waited for a heartbeat of the other. Between two looks at most twice the usual
// interval counts: if more has passed, this process was itself stopped.
class SwapChannel::PeerTimeout {
 public:
  PeerTimeout(const Page& page, Side of)
      : heartbeats_(page.heartbeats[static_cast<size_t>(of)]),
        most_(page.peer_timeout),
        seen_(heartbeats_),
        last_(now()) {}
  bool timed_out() noexcept {
    const std::chrono::nanoseconds time = now();
    waited_ += std::min(time - std::exchange(last_, time), 2 * kLook);
    if (const uint32_t heartbeats = heartbeats_; std::exchange(seen_, heartbeats) != heartbeats) waited_ = {};
    return Seconds(waited_).count() >= most_;
  }

 private:
  static std::chrono::nanoseconds now() noexcept { return std::chrono::steady_clock::now().time_since_epoch(); }

  const std::atomic<uint32_t>& heartbeats_;
  const std::atomic<double>& most_;
  uint32_t seen_;
  std::chrono::nanoseconds last_;
  std::chrono::nanoseconds waited_{};
};

SwapChannel::SwapChannel(std::unique_ptr<SharedPage> page, int locks)
    : shared_(std::move(page)), page_(shared_->as<Page>()), locks_(locks) {}

SwapChannel::~SwapChannel() { (void)::close(locks_); }

Result<std::unique_ptr<SwapChannel>> SwapChannel::create(const std::string& path, Seconds peer_timeout) {
  if (!(peer_timeout.count() > 0)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("a swap is to be given up after {} s", peer_timeout.count()),
                 .next_step = "use more than 0"};
  }
  TORPOR_RETURN_IF_ERROR(SharedPage::create(path, kSwapMark));
  Result<std::unique_ptr<SwapChannel>> made = open(path);
  if (made && !take_lock((*made)->locks_, kMaker)) made = system_error(errno, path);
  if (made) {
    (*made)->page_.peer_timeout = peer_timeout.count();
  } else {
    (void)::unlink(path.c_str());
  }
  return made;
}

Result<std::unique_ptr<SwapChannel>> SwapChannel::open(const std::string& path) {
  return try_catch([&]() -> Result<std::unique_ptr<SwapChannel>> {
    TORPOR_ASSIGN_OR_RETURN(Descriptor file, open_own(path));
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<SharedPage> page, SharedPage::open(file.get(), path, kSwapMark, kSwapFile));
    std::unique_ptr<SwapChannel> opened(new SwapChannel(std::move(page), file.get()));
    (void)file.release();
    return opened;
  });
}

SwapChannel::Side SwapChannel::other() const noexcept {
  return side_ == Side::kSwapsOut ? Side::kSwapsIn : Side::kSwapsOut;
}

SwapHandshake SwapChannel::agreement() const noexcept { return SwapHandshake(page_.agreement.load()); }

// Replace the word with next(word), atomically. Return false if `next` returns none: there is no such step.
template <class Step>
bool SwapChannel::step(const Step& next) noexcept {
  uint32_t word = page_.agreement;
  while (true) {
    const std::optional<SwapHandshake> after = next(SwapHandshake(word));
    if (!after) return false;
    if (!page_.agreement.compare_exchange_weak(word, after->word())) continue;
    return announce_change(), true;
  }
}

// Return whether another object holds the lock. If the system does not say, assume that it does.
bool SwapChannel::held(int byte) const noexcept {
  struct flock lock = lock_at(byte);
  return ::fcntl(locks_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// A side publishes its last stage before it drops its lock.
bool SwapChannel::ended(Side side) const noexcept {
  const auto between = [&] {
    const Stage stage = agreement().stage(side);
    return stage == Stage::kHere || stage == Stage::kReady;
  };
  return between() && !held(static_cast<int>(side)) && between();
}

bool SwapChannel::other_ended() const noexcept { return ended(other()); }

bool SwapChannel::has_joined(Side side) const noexcept { return agreement().stage(side) != Stage::kNone; }

bool SwapChannel::stopped_or(Side ended_side) noexcept {
  if (agreement().stopped()) return true;
  if (!ended(ended_side)) return false;
  (void)stop(ended_side);
  return true;
}

Error SwapChannel::stopped_for(std::optional<Side> own) const {
  for (const Side side : {Side::kSwapsOut, Side::kSwapsIn}) {
    if (own == side || stopped_by() != side || !ended(side)) continue;
    return {.code = Code::kAborted,
            .what = "the process of the other engine ended",
            .next_step = "start it again, or wake another one"};
  }
  const SwapHandshake now = agreement();
  if (now.for_timeout()) {
    const double seconds = page_.peer_timeout;
    const bool out = now.stopped_by() == Side::kSwapsOut;
    if (own && now.stopped_by() != own) {
      return {
          .code = Code::kAborted,
          .what = fmt::format("the other engine has given it up: it had no heartbeat of this one for {} s", seconds),
          .next_step = "see what stopped this one"};
    }
    return {.code = Code::kTimeout,
            .what = fmt::format("no heartbeat of the engine that {} for {} s", out ? "wakes" : "falls asleep", seconds),
            .next_step = "see what it does: it is stopped, hangs, or needs longer"};
  }
  return {.code = Code::kAborted, .what = "the other engine could not be exchanged", .next_step = "see its error"};
}

std::optional<SwapChannel::Side> SwapChannel::stopped_by() const noexcept { return agreement().stopped_by(); }

Status SwapChannel::join(Side side, size_t ranks) {
  const auto refuse = [](std::string what, std::string next) {
    return Error{.code = Code::kFailedPrecondition, .what = std::move(what), .next_step = std::move(next)};
  };
  if (side_ || has_joined(side) || !take_lock(locks_, static_cast<int>(side)))
    return refuse("another engine has this side of the exchange", "make a file for each");
  side_ = side;
  // Before it reads the other's: if both join at once, at least one sees the other.
  page_.sizes[static_cast<size_t>(side)].store(ranks);
  const uint64_t others = page_.sizes[static_cast<size_t>(other())];
  if (others == 0 || others == ranks) return reach(Stage::kHere), ok();
  return refuse(fmt::format("the engines have {} and {} ranks", page_.sizes[0].load(), page_.sizes[1].load()),
                "put one to sleep, then wake the other");
}

void SwapChannel::reach(Stage stage) noexcept {
  if (!side_) return;
  (void)step([&](SwapHandshake now) { return std::optional(now.reach(*side_, stage)); });
  send_heartbeat(*side_);
}

Status SwapChannel::wait_for(Stage wanted, const std::function<Status()>& go_on) {
  PeerTimeout peer(page_, other());
  while (true) {
    const uint32_t seen = page_.changes.load(std::memory_order_acquire);
    const bool maker_ended = !held(kMaker);
    (void)stopped_or(other());
    const SwapHandshake now = agreement();  // last: a process may have published its stage before it ended
    switch (now.look(other(), wanted)) {
      case SwapHandshake::Look::kThere: return ok();
      case SwapHandshake::Look::kOver: return stopped();
      case SwapHandshake::Look::kWait: break;
    }
    if (maker_ended && now.stage(other()) == Stage::kNone) {
      (void)stop(other());
    } else if (peer.timed_out()) {
      (void)stop_by(side_, /*for_timeout=*/true);
    } else {
      if (go_on) TORPOR_RETURN_IF_ERROR(go_on());
      wait(seen);
    }
  }
}

SwapChannel::End SwapChannel::wait_for_end() noexcept {
  PeerTimeout peer(page_, Side::kSwapsIn);
  while (true) {
    const uint32_t seen = page_.changes.load(std::memory_order_acquire);
    const bool gone = ended(Side::kSwapsIn);
    if (const End end = agreement().end(); end != End::kNone) return end;
    if (gone) return End::kHasNothing;
    if (peer.timed_out()) {
      (void)stop_by(Side::kSwapsOut, /*for_timeout=*/true);
      const SwapHandshake now = agreement();
      if (now.end() != End::kNone) return now.end();
      return now.committed() ? End::kMayRun : End::kMayHold;
    }
    wait(seen);
  }
}

Status SwapChannel::commit() {
  if (step([](SwapHandshake now) { return now.commit(); })) return ok();
  return stopped();
}

Status SwapChannel::check(size_t rank) {
  if (rank < kMostRanks) return ok();
  return Error{.code = Code::kUnsupported,
               .what = fmt::format("engines of more than {} ranks cannot be exchanged", kMostRanks),
               .next_step = "put one to sleep, then wake the other"};
}

void SwapChannel::send_heartbeat(Side side) noexcept {
  page_.heartbeats[static_cast<size_t>(side)].fetch_add(1);
  announce_change();
}

void SwapChannel::announce_change() noexcept {
  page_.changes.fetch_add(1, std::memory_order_release);
  (void)::syscall(SYS_futex, &page_.changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SwapChannel::wait(uint32_t seen) const noexcept {
  const timespec until_look{.tv_sec = 0, .tv_nsec = kLook.count()};
  (void)::syscall(SYS_futex, &page_.changes, FUTEX_WAIT, seen, &until_look, nullptr, 0);
}

Status SwapChannel::supply(size_t rank, uint64_t bytes) {
  TORPOR_RETURN_IF_ERROR(check(rank));
  page_.ranks[rank].supply.store(bytes);
  return ok();
}

Status SwapChannel::demand(size_t rank, uint64_t bytes) {
  TORPOR_RETURN_IF_ERROR(check(rank));
  const uint64_t supply = page_.ranks[rank].supply;
  page_.ranks[rank].lent.store(bytes - std::min(bytes, supply));
  return ok();
}

Status SwapChannel::release(size_t rank, uint64_t bytes) {
  if (stopped_or(Side::kSwapsIn)) return stopped_for(Side::kSwapsOut);
  page_.ranks[rank].released.fetch_add(bytes);
  send_heartbeat(Side::kSwapsOut);
  return ok();
}

void SwapChannel::end() noexcept {
  page_.ended.store(1);
  send_heartbeat(Side::kSwapsOut);
}

bool SwapChannel::stop() noexcept { return stop_by(side_); }

bool SwapChannel::stop(Side side) noexcept { return stop_by(side); }

bool SwapChannel::stop_by(std::optional<Side> whom, bool for_timeout) noexcept {
  return step([&](SwapHandshake now) { return now.stop(whom, for_timeout); });
}

uint64_t SwapChannel::released(size_t rank) const noexcept { return page_.ranks[rank].released; }

Status SwapChannel::acquire(size_t rank, uint64_t bytes) {
  Page::Rank& own = page_.ranks[rank];
  PeerTimeout peer(page_, Side::kSwapsOut);
  while (true) {
    const uint32_t seen = page_.changes.load(std::memory_order_acquire);
    const bool ended = page_.ended != 0;
    if (stopped_or(Side::kSwapsOut)) return stopped_for(Side::kSwapsIn);
    const uint64_t free = own.released + own.lent - own.acquired;
    if (free >= bytes) break;
    if (ended) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("{} bytes of device memory are needed, and {} are free", bytes, free)};
    }
    if (peer.timed_out()) (void)stop_by(Side::kSwapsIn, /*for_timeout=*/true);
    wait(seen);
  }
  own.acquired.fetch_add(bytes);
  send_heartbeat(Side::kSwapsIn);
  return ok();
}

Result<bool> SwapChannel::wait_for_more(size_t rank, uint64_t seen) {
  PeerTimeout peer(page_, Side::kSwapsOut);
  while (true) {
    const uint32_t changes = page_.changes.load(std::memory_order_acquire);
    const bool ended = page_.ended != 0;
    if (stopped_or(Side::kSwapsOut)) return stopped_for(Side::kSwapsIn);
    if (page_.ranks[rank].released > seen) return true;
    if (ended) return false;
    if (peer.timed_out()) (void)stop_by(Side::kSwapsIn, /*for_timeout=*/true);
    wait(changes);
  }
}

}  // namespace torpor
