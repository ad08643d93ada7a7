// Mutex, MutexLock and CondVar that clang's thread-safety analysis understands, and its attributes as macros. What a
// lock guards is written at the fields (GUARDED_BY), what a function needs at the function (REQUIRES); the target
// `thread_safety` (cmake/ThreadSafety.cmake) has clang check it. With other compilers the macros are empty.
//
// std::mutex of libstdc++ has no such attributes, hence the wrappers; they add nothing else.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define TORPOR_THREAD_ATTRIBUTE(attribute) __attribute__((attribute))
#else
#define TORPOR_THREAD_ATTRIBUTE(attribute)
#endif

#define TORPOR_CAPABILITY(name) TORPOR_THREAD_ATTRIBUTE(capability(name))
#define TORPOR_SCOPED_CAPABILITY TORPOR_THREAD_ATTRIBUTE(scoped_lockable)
#define TORPOR_GUARDED_BY(mutex) TORPOR_THREAD_ATTRIBUTE(guarded_by(mutex))
#define TORPOR_PT_GUARDED_BY(mutex) TORPOR_THREAD_ATTRIBUTE(pt_guarded_by(mutex))
#define TORPOR_REQUIRES(...) TORPOR_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define TORPOR_EXCLUDES(...) TORPOR_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define TORPOR_ACQUIRE(...) TORPOR_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define TORPOR_RELEASE(...) TORPOR_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define TORPOR_RETURN_CAPABILITY(mutex) TORPOR_THREAD_ATTRIBUTE(lock_returned(mutex))
// For what the analysis cannot follow; a comment beside it says why it is right.
#define TORPOR_NO_THREAD_SAFETY_ANALYSIS TORPOR_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace torpor {

class TORPOR_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void lock() TORPOR_ACQUIRE() { mutex_.lock(); }
  void unlock() TORPOR_RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex for the time of a scope; may let go of it in between.
class TORPOR_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TORPOR_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
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
