#include "engine/region_mapper.h"

namespace torpor {

RegionMapper::RegionMapper(SleepAllocator& allocator, std::vector<DeviceAddress> regions)
    : allocator_(allocator), regions_(std::move(regions)) {
  const Status started = catching([this]() -> Status {
    thread_ = std::thread([this] { run(); });
    return ok();
  });
  if (!started) run();  // no thread to be had
}

RegionMapper::~RegionMapper() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void RegionMapper::run() {
  for (const DeviceAddress region : regions_) {
    {
      const std::lock_guard lock(mutex_);
      if (ending_) return;
    }
    Status done = catching([&]() -> Status { return allocator_.attach_region(region); });
    const std::lock_guard lock(mutex_);
    if (done) ++attached_;
    status_ = std::move(done);
    changed_.notify_all();
    if (!status_) return;
  }
}

Status RegionMapper::wait(size_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return attached_ >= count || !status_; });
  return status_;
}

bool RegionMapper::finished() const {
  const std::lock_guard lock(mutex_);
  return attached_ == regions_.size();
}

}  // namespace torpor
