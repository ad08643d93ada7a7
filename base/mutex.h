// SPDX-License-Identifier: Apache-2.0
// Mutex, MutexLock and CondVar that clang's thread-safety analysis understands (base/thread_annotations.h). std::mutex
// of libstdc++ has no such attributes, hence the wrappers; they add nothing else.
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

// Holds a mutex for the time of a scope; may let go of it in between.
class TORPOR_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TORPOR_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  // Takes over what try_lock() got.
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

// Waits may end without cause: call them in a loop that looks at what is waited for.
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
