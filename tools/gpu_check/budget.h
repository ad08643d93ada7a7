// SPDX-License-Identifier: Apache-2.0
// Budget: the time of a run, divided among its checks. The checks behind one get the time that it leaves.
//
// Owner: the run. Threads: one.
#pragma once

#include <chrono>

namespace torpor::gpu_check {

class Budget {
 public:
  explicit Budget(double seconds) : seconds_(seconds) {}

  // Begin a check with this share of all the time. False: the time is used up, and the check must not run.
  bool begin(double share) {
    given_ += share * seconds_;
    return passed() < seconds_;
  }
  // Return whether the check may begin another round.
  bool go_on() const { return passed() < given_; }
  double seconds() const { return seconds_; }

 private:
  double passed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count(); }
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  const double seconds_;
  double given_ = 0;
};

}  // namespace torpor::gpu_check
