// SPDX-License-Identifier: Apache-2.0
// RegionMapper: attaches regions one after the other on a thread of its own, while those that are there are filled.
// Without a thread it attaches all of them in the constructor, so that the order of the device's calls is fixed.
//
// Owner: MappedRegions. Threads: one calls it. Failure: wait() returns the error of the region that failed.
#pragma once

#include <thread>
#include <vector>

#include "allocator/sleep_allocator.h"
#include "base/mutex.h"

namespace torpor {

class RegionMapper {
 public:
  // `regions`: all in `allocator`, which outlives this object; attaching, or attached already.
  RegionMapper(SleepAllocator& allocator, std::vector<DeviceAddress> regions, bool own_thread = true);
  ~RegionMapper();  // returns after the current region

  // Wait until the first `count` regions are attached. An error: one of them, or one after them, failed.
  Status wait(size_t count);
  bool finished() const;  // whether all are attached

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
