// Touches what a lock guards without it, in the ways that the target `thread_safety` must find. Never linked.
#include "base/mutex.h"

namespace torpor::test {

class Counter {
 public:
  void without_the_lock() { ++count_; }  // unguarded
  void after_letting_go() {
    MutexLock lock(mutex_);
    lock.unlock();
    ++count_;  // unguarded
  }
  void through_a_helper() { add(); }  // unguarded
  void as_it_should_be() {
    const MutexLock lock(mutex_);
    while (count_ == 0) changed_.wait(mutex_);
    add();
  }

 private:
  void add() TORPOR_REQUIRES(mutex_) { ++count_; }
  Mutex mutex_;
  CondVar changed_;
  int count_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor::test
