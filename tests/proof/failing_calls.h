// SPDX-License-Identifier: Apache-2.0
// Calls that fail where a test wants it: every allocation and every start of a thread of the program that links this.
#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>

namespace torpor::proof {

// Fails the n-th time, or from then on; or sends its process a signal then.
struct Fuse {
  std::atomic<bool> armed = false;
  std::atomic<uint64_t> count = 0;
  uint64_t at = 0;
  bool for_ever = false;
  int signal = 0;

  void arm(uint64_t n, bool from_then_on) {
    at = n;
    for_ever = from_then_on;
    count = 0;
    armed = true;
  }
  bool disarm() {  // whether it has fired
    armed = false;
    return count >= at;
  }
  bool fires() {
    if (!armed) return false;
    const uint64_t now = ++count;
    if (signal != 0) {
      if (now == at) (void)std::raise(signal);
      return false;
    }
    return now == at || (for_ever && now > at);
  }
};

extern Fuse allocations, thread_starts;

}  // namespace torpor::proof
