// SPDX-License-Identifier: Apache-2.0
// RegionMapper: on a thread of its own, attaches regions one after the other while what is there is copied into
// already. Without one, all of them before anything is copied: so that the device's calls have one order.
#pragma once

#include <thread>
#include <vector>

#include "allocator/sleep_allocator.h"
#include "base/mutex.h"

namespace torpor {

class RegionMapper {
 public:
  // `regions` are attaching, or attached already; all in `allocator`, which outlives this.
  RegionMapper(SleepAllocator& allocator, std::vector<DeviceAddress> regions, bool own_thread = true);
  ~RegionMapper();  // ends after the region at work

  // Waits until the first `count` regions are there. An error: attaching one of them, or of those after, failed.
  Status wait(size_t count);
  bool finished() const;  // all are there

 private:
  void run();
  SleepAllocator& allocator_;
  const std::vector<DeviceAddress> regions_;
  mutable Mutex mutex_;
  CondVar changed_;
  size_t attached_ TORPOR_GUARDED_BY(mutex_) = 0;
  Status status_ TORPOR_GUARDED_BY(mutex_);
  bool ending_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace torpor
