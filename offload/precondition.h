// Precondition: what must have happened before blocks may be read: usually the end of the forward pass that writes
// them.
//
// Signalled once, from any thread; whoever waits is called back, nobody polls.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace torpor {

class Precondition {
 public:
  enum class State : uint8_t { kPending, kMet, kFailed };

  State state() const {
    const MutexLock lock(mutex_);
    return state_;
  }
  void meet() { settle(State::kMet); }
  void fail() { settle(State::kFailed); }

  // Calls `wake` when it is settled; at once if it is already. `wake` must not call back into this object.
  void on_settled(std::function<void()> wake) {
    {
      const MutexLock lock(mutex_);
      if (state_ == State::kPending) {
        waiting_.push_back(std::move(wake));
        return;
      }
    }
    wake();
  }

 private:
  void settle(State state) {
    std::vector<std::function<void()>> waiting;
    {
      const MutexLock lock(mutex_);
      if (state_ != State::kPending) return;
      state_ = state;
      waiting.swap(waiting_);
    }
    for (const auto& wake : waiting) wake();
  }

  mutable Mutex mutex_;
  State state_ TORPOR_GUARDED_BY(mutex_) = State::kPending;
  std::vector<std::function<void()>> waiting_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
