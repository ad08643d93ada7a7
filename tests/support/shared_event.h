// SPDX-License-Identifier: Apache-2.0
// SharedEvent: something that happens once, in memory that several processes share. Takes no memory.
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
  // As if it had not happened. Nobody may be waiting.
  void reset() {
    ::sem_destroy(&happened_);
    ::sem_init(&happened_, /*pshared=*/1, 0);
  }
  // Whether it has happened, or does so in that time. For any number that wait.
  bool wait(std::chrono::seconds most) {
    timespec end{};
    ::clock_gettime(CLOCK_REALTIME, &end);  // sem_timedwait() knows no other
    end.tv_sec += most.count();
    while (::sem_timedwait(&happened_, &end) != 0) {
      if (errno != EINTR) return false;
    }
    set();  // for the next one
    return true;
  }

 private:
  sem_t happened_{};
};

}  // namespace torpor::test
