// SPDX-License-Identifier: Apache-2.0
// Mutex, MutexLock and CondVar, which clang's thread-safety analysis understands (base/thread_annotations.h). They only
// wrap libstdc++'s std::mutex, which has no such attributes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/thread_annotations.h"

namespace torpor {

class TORPOR_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void lock() TORPOR_ACQUIRE() { mutex_.lock(); }
  bool try_lock() TORPOR_TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() TORPOR_RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex for a scope; unlock() and lock() release it in between.
class TORPOR_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TORPOR_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  // Adopts a mutex that try_lock() has locked.
  MutexLock(Mutex& mutex, std::adopt_lock_t) TORPOR_REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() TORPOR_RELEASE() {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  void unlock() TORPOR_RELEASE() {
    mutex_.unlock();
    held_ = false;
  }
  void lock() TORPOR_ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// Waits may end without a cause: call them in a loop that checks the condition.
class CondVar {
 public:
  void wait(Mutex& mutex) TORPOR_REQUIRES(mutex) {
    std::unique_lock held(mutex.mutex_, std::adopt_lock);
    changed_.wait(held);
    held.release();
  }
  void wait_for(Mutex& mutex, std::chrono::nanoseconds time) TORPOR_REQUIRES(mutex) {
    std::unique_lock held(mutex.mutex_, std::adopt_lock);
    (void)changed_.wait_for(held, time);
    held.release();
  }
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace torpor
