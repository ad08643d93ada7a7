// SPDX-License-Identifier: Apache-2.0
// Progress of long work, and its cancellation.
//
// Threads: any thread may call ProgressMeter::add(). The thread that did the work calls the sink, under the meter's
// lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/status.h"

namespace torpor {

struct Progress {
  std::string_view phase;
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;  // 0: unknown
  double seconds = 0;        // since the phase began
  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes_done) / seconds : 0; }
  double seconds_left() const {
    return bytes_done > 0 && bytes_total > bytes_done
               ? static_cast<double>(bytes_total - bytes_done) / bytes_per_second()
               : 0;
  }
};

// Reports progress; returns whether to go on. False cancels the work.
using ProgressSink = std::function<bool(const Progress&)>;

class ProgressMeter {
 public:
  // If `sink` is empty, the meter costs nothing. `clock` must outlive the meter.
  ProgressMeter(ProgressSink sink, std::string phase, uint64_t bytes_total, const Clock& clock = system_clock())
      : sink_(std::move(sink)), phase_(std::move(phase)), total_(bytes_total), clock_(clock), began_(clock.now()) {}

  // Add bytes that are done and report. kAborted: the sink returned false, now or earlier.
  Status add(uint64_t bytes) {
    if (!sink_) return ok();
    const MutexLock lock(mutex_);
    done_ += bytes;
    if (!cancelled_) cancelled_ = !sink_({phase_, done_, total_, seconds_between(began_, clock_.now())});
    if (!cancelled_) return ok();
    return Error{.code = Code::kAborted, .what = phase_ + " was cancelled", .next_step = "start it again"};
  }

 private:
  const ProgressSink sink_;
  const std::string phase_;
  const uint64_t total_;
  const Clock& clock_;
  const std::chrono::nanoseconds began_;
  Mutex mutex_;
  uint64_t done_ TORPOR_GUARDED_BY(mutex_) = 0;
  bool cancelled_ TORPOR_GUARDED_BY(mutex_) = false;
};

}  // namespace torpor
