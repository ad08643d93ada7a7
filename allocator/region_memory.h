// RegionMemory: physical memory behind one reserved range of addresses. What is done is written down at once, so that
// it can be undone, or tried again, wherever something fails. Threads: one at a time.
#pragma once

#include <algorithm>
#include <vector>

#include "allocator/device_memory.h"

namespace torpor {

struct RegionMemory {
  DeviceAddress address = 0;
  uint64_t reserved_bytes = 0;
  struct Handle {
    PhysicalId id{};
    uint64_t offset = 0;
    uint64_t size = 0;
    bool mapped = false;  // also where a failed call left that open
  };
  std::vector<Handle> handles;  // created and not released
  bool broken = false;          // what failed could not be undone

  bool mapped() const {
    return std::any_of(handles.begin(), handles.end(), [](const Handle& handle) { return handle.mapped; });
  }

  // Each of these changes nothing if it fails, or makes the region broken.
  Status create(DeviceMemory& device, uint64_t handle_bytes) {
    const Status done = catching([&]() -> Status {
      handles.reserve(reserved_bytes / handle_bytes + 1);
      for (uint64_t offset = 0; offset < reserved_bytes; offset += handle_bytes) {
        const uint64_t size = std::min(handle_bytes, reserved_bytes - offset);
        TORPOR_ASSIGN(const PhysicalId id, device.create(size));
        handles.push_back({id, offset, size});
      }
      return ok();
    });
    if (!done) (void)release(device);
    return done;
  }

  Status map(DeviceMemory& device) {
    const Status done = catching([&]() -> Status {
      for (Handle& handle : handles) {
        TORPOR_TRY(device.map(address + handle.offset, handle.id));
        handle.mapped = true;
      }
      return device.set_access(address, reserved_bytes, Access::kReadWrite);
    });
    if (!done && !unmap_each(device)) broken = true;
    return done;
  }

  Status unmap(DeviceMemory& device) {
    Status done = catching([&] { return device.unmap(address, reserved_bytes); });
    if (!done) {
      broken = broken || done.error().state_changed;
      return done;
    }
    for (Handle& handle : handles) handle.mapped = false;
    return done;
  }

  // What is mapped of it, in reverse; as much as the device lets go.
  Status unmap_each(DeviceMemory& device) {
    Status first;
    for (auto handle = handles.rbegin(); handle != handles.rend(); ++handle) {
      if (!handle->mapped) continue;
      Status done = catching([&] { return device.unmap(address + handle->offset, handle->size); });
      if (done) {
        handle->mapped = false;
      } else if (first) {
        first = std::move(done);
      }
    }
    return first;
  }

  // As much as the device releases; the rest stays in `handles`, and the region is broken.
  Status release(DeviceMemory& device) {
    Status first;
    std::erase_if(handles, [&](const Handle& handle) {
      Status done = catching([&] { return device.release(handle.id); });
      if (done) return true;
      if (first) first = std::move(done);
      return false;
    });
    if (!first) broken = true;
    return first;
  }
};

}  // namespace torpor
