// SPDX-License-Identifier: Apache-2.0
// SharedEvent: an event that happens once, in memory that several processes share. Allocates nothing.
#pragma once

#include <semaphore.h>

#include <cerrno>
#include <chrono>
#include <ctime>

namespace torpor::test {

class SharedEvent {
 public:
  SharedEvent() { ::sem_init(&happened_, /*pshared=*/1, 0); }
  ~SharedEvent() { ::sem_destroy(&happened_); }
  SharedEvent(const SharedEvent&) = delete;
  SharedEvent& operator=(const SharedEvent&) = delete;

  void set() { ::sem_post(&happened_); }
  // Make it not have happened. Precondition: nobody waits.
  void reset() {
    ::sem_destroy(&happened_);
    ::sem_init(&happened_, /*pshared=*/1, 0);
  }
  // Wait until it has happened, at most `most`. Return false if it did not. Any number of callers may wait.
  bool wait(std::chrono::seconds most) {
    timespec end{};
    ::clock_gettime(CLOCK_REALTIME, &end);  // sem_timedwait() uses this clock only
    end.tv_sec += most.count();
    while (::sem_timedwait(&happened_, &end) != 0) {
      if (errno != EINTR) return false;
    }
    set();  // for the next caller
    return true;
  }

 private:
  sem_t happened_{};
};

}  // namespace torpor::test
