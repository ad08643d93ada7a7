// SPDX-License-Identifier: Apache-2.0
#include "allocator/background_prefault.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <sched.h>

namespace torpor {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kRests = 3;  // rest so many times as long as it worked
constexpr std::chrono::nanoseconds kLongestRest = std::chrono::milliseconds(200);

// Give the calling thread the lowest priority. If the system refuses, the thread still rests.
void take_lowest_priority() {
  const sched_param none{};
  (void)::sched_setscheduler(0, SCHED_IDLE, &none);
}

}  // namespace

BackgroundPrefault::~BackgroundPrefault() {
  end();
  std::thread last;
  {
    const MutexLock lock(mutex_);
    last.swap(thread_);
  }
  if (last.joinable()) last.join();
}

// A thread of the lowest priority that touches memory for another thread, one piece after the other. If the system
// gives no thread, the calling thread touches the memory.
class BackgroundPrefault::Toucher {
 public:
  Toucher() {
    (void)try_catch([this] {
      thread_ = std::thread([this] { run(); });
      return ok();
    });
  }
  ~Toucher() {
    if (!thread_.joinable()) return;
    give(nullptr, /*last=*/true);
    thread_.join();
  }
  Toucher(const Toucher&) = delete;
  Toucher& operator=(const Toucher&) = delete;

  void run_there(const std::function<void()>& touch) {
    if (!thread_.joinable()) return touch();
    give(&touch, /*last=*/false);
    const MutexLock lock(mutex_);
    while (piece_ != nullptr) changed_.wait(mutex_);
  }

 private:
  void give(const std::function<void()>* piece, bool last) {
    const MutexLock lock(mutex_);
    piece_ = piece;
    last_ = last;
    changed_.notify_all();
  }
  void run() noexcept {
    take_lowest_priority();
    MutexLock lock(mutex_);
    while (true) {
      while (piece_ == nullptr && !last_) changed_.wait(mutex_);
      if (last_) return;
      const std::function<void()>& piece = *piece_;
      lock.unlock();
      piece();
      lock.lock();
      piece_ = nullptr;
      changed_.notify_all();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  const std::function<void()>* piece_ TORPOR_GUARDED_BY(mutex_) = nullptr;  // null: none
  bool last_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the others
};

void BackgroundPrefault::want(uint64_t bytes) noexcept {
  const MutexLock lock(mutex_);
  wanted_ = std::max(wanted_, bytes);
  begin();
}

void BackgroundPrefault::start() noexcept {
  const MutexLock lock(mutex_);
  waits_ = false;
  begin();
}

void BackgroundPrefault::begin() {
  if (wanted_ == 0 || waits_ || running_ || ended_) return;
  if (thread_.joinable()) thread_.join();  // it has ended its work
  running_ = true;
  const Status begun = try_catch([&]() TORPOR_REQUIRES(mutex_) -> Status {
    thread_ = std::thread([this] { run(); });
    return ok();
  });
  if (!begun) running_ = false;
}

void BackgroundPrefault::run() noexcept {
  Toucher toucher;
  const HostArena::OnThread on_thread = [&](const std::function<void()>& touch) { toucher.run_there(touch); };
  Clock::time_point rested = Clock::now();
  bool full = false;
  // Rest. Return false if no further page is to be prefaulted.
  const auto go_on = [&](uint64_t next_bytes) {
    const std::chrono::nanoseconds worked = Clock::now() - rested;
    {
      const MutexLock lock(mutex_);
      const Clock::time_point until = Clock::now() + std::min(kRests * worked, kLongestRest);
      for (Clock::time_point now = Clock::now(); !ended_ && now < until; now = Clock::now())
        changed_.wait_for(mutex_, until - now);
      if (ended_) return false;
    }
    rested = Clock::now();
    full = headroom_() < next_bytes;
    return !full;
  };
  while (true) {
    uint64_t wanted = 0;
    {
      const MutexLock lock(mutex_);
      wanted = wanted_;
    }
    const Result<uint64_t> came = arena_.prefault_slowly(wanted, go_on, on_thread);
    const MutexLock lock(mutex_);
    if (came && !full && !ended_ && (*came > 0 || wanted_ > wanted)) continue;
    running_ = false;
    changed_.notify_all();
    return;
  }
}

void BackgroundPrefault::end() noexcept {
  const MutexLock lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void BackgroundPrefault::wait() noexcept {
  const MutexLock lock(mutex_);
  while (running_) changed_.wait(mutex_);
}

}  // namespace torpor
