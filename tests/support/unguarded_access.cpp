// SPDX-License-Identifier: Apache-2.0
// Accesses guarded members without their lock, in the ways that clang must find. Never linked.
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
  void through_a_lambda() {
    const auto add = [this]() TORPOR_REQUIRES(mutex_) { ++count_; };
    add();  // unguarded
  }
  void in_a_lambda_that_says_nothing() {
    const MutexLock lock(mutex_);
    [this] { ++count_; }();  // unguarded
  }
  void though_the_lock_was_not_to_be_had() {
    if (mutex_.try_lock()) return mutex_.unlock();
    ++count_;  // unguarded
  }
  void as_it_should_be() {
    const MutexLock lock(mutex_);
    while (count_ == 0) changed_.wait(mutex_);
    add();
  }
  bool where_the_lock_was_to_be_had() {
    if (!mutex_.try_lock()) return false;
    const MutexLock taken(mutex_, std::adopt_lock);
    const auto add = [this]() TORPOR_REQUIRES(mutex_) { ++count_; };
    add();
    return true;
  }

 private:
  void add() TORPOR_REQUIRES(mutex_) { ++count_; }
  Mutex mutex_;
  CondVar changed_;
  int count_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor::test
