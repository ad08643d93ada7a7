// SPDX-License-Identifier: Apache-2.0
#include "engine/region_mapper.h"

namespace torpor {

RegionMapper::RegionMapper(SleepAllocator& allocator, std::vector<DeviceAddress> regions, bool own_thread)
    : allocator_(allocator), regions_(std::move(regions)) {
  if (!own_thread) {
    run();
    return;
  }
  const Status started = try_catch([this]() -> Status {
    thread_ = std::thread([this] { run(); });
    return ok();
  });
  if (!started) run();  // no thread could be started
}

RegionMapper::~RegionMapper() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void RegionMapper::run() {
  for (const DeviceAddress region : regions_) {
    {
      const MutexLock lock(mutex_);
      if (ending_) return;
    }
    Status done = try_catch([&]() -> Status { return allocator_.attach_region(region); });
    const MutexLock lock(mutex_);
    if (done) ++attached_;
    status_ = std::move(done);
    changed_.notify_all();
    if (!status_) return;
  }
}

Status RegionMapper::wait(size_t count) {
  const MutexLock lock(mutex_);
  while (attached_ < count && status_) changed_.wait(mutex_);
  return status_;
}

bool RegionMapper::finished() const {
  const MutexLock lock(mutex_);
  return attached_ == regions_.size();
}

}  // namespace torpor
