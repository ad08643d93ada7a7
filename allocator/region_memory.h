// SPDX-License-Identifier: Apache-2.0
// RegionMemory: the physical memory behind one reserved range of addresses. It records each step at once, so that after
// any failure the step can be undone or tried again. Threads: one at a time.
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
    bool mapped = false;  // true also if a failed call left that open
  };
  std::vector<Handle> handles;  // created and not released
  bool broken = false;          // a failure could not be undone

  bool mapped() const {
    return std::any_of(handles.begin(), handles.end(), [](const Handle& handle) { return handle.mapped; });
  }

  auto find(uint64_t offset) {
    return std::find_if(handles.begin(), handles.end(), [=](const Handle& handle) { return handle.offset == offset; });
  }
  bool whole() const {  // there is memory for all of it
    uint64_t bytes = 0;
    for (const Handle& handle : handles) bytes += handle.size;
    return bytes == reserved_bytes;
  }

  // If one of these calls fails, it changes nothing or marks the region broken.
  //
  // Create the memory that is missing, in pieces of `handle_bytes`.
  Status create(DeviceMemory& device, uint64_t handle_bytes) {
    const size_t before = handles.size();
    const Status done = try_catch([&]() -> Status {
      handles.reserve(reserved_bytes / handle_bytes + 1);
      for (uint64_t offset = 0; offset < reserved_bytes; offset += handle_bytes) {
        if (before > 0 && find(offset) != handles.end()) continue;
        const uint64_t size = std::min(handle_bytes, reserved_bytes - offset);
        TORPOR_ASSIGN_OR_RETURN(const PhysicalId id, device.create(size));
        handles.push_back({id, offset, size});
      }
      return ok();
    });
    if (!done) (void)release(device, before);
    return done;
  }

  Status map(DeviceMemory& device) {
    const Status done = try_catch([&]() -> Status {
      for (Handle& handle : handles) {
        if (handle.mapped) continue;
        TORPOR_RETURN_IF_ERROR(device.map(address + handle.offset, handle.id));
        handle.mapped = true;
      }
      if (whole()) return device.set_access(address, reserved_bytes, Access::kReadWrite);
      for (const Handle& handle : handles)
        TORPOR_RETURN_IF_ERROR(device.set_access(address + handle.offset, handle.size, Access::kReadWrite));
      return ok();
    });
    if (!done && !unmap_each(device)) broken = true;
    return done;
  }

  // Make one piece present and mapped, with access; nothing happens if it is. If this fails, a piece that was created
  // stays.
  Status acquire_piece(DeviceMemory& device, uint64_t offset, uint64_t size) {
    return try_catch([&]() -> Status {
      auto handle = find(offset);
      if (handle == handles.end()) {
        handles.reserve(handles.size() + 1);
        TORPOR_ASSIGN_OR_RETURN(const PhysicalId id, device.create(size));
        handle = handles.insert(handles.end(), {id, offset, size});
      }
      return handle->mapped ? ok() : map_one(device, *handle);
    });
  }

  // Release one piece that is present, with its content.
  Status release_piece(DeviceMemory& device, uint64_t offset) {
    const auto handle = find(offset);
    Status done = try_catch([&] { return device.unmap(address + offset, handle->size); });
    if (!done) {
      broken = broken || done.error().state_changed;
      return done;
    }
    handle->mapped = false;
    done = try_catch([&] { return device.release(handle->id); });
    if (done) {
      handles.erase(handle);
    } else if (!try_catch([&] { return map_one(device, *handle); })) {  // its content is still there
      broken = true;
    }
    return done;
  }

  Status map_one(DeviceMemory& device, Handle& handle) {
    TORPOR_RETURN_IF_ERROR(device.map(address + handle.offset, handle.id));
    handle.mapped = true;
    Status done =
        try_catch([&] { return device.set_access(address + handle.offset, handle.size, Access::kReadWrite); });
    if (done) return done;
    if (try_catch([&] { return device.unmap(address + handle.offset, handle.size); })) {
      handle.mapped = false;
    } else {
      broken = true;
    }
    return done;
  }

  Status unmap(DeviceMemory& device) {
    const bool all_mapped = std::all_of(handles.begin(), handles.end(), [](const Handle& each) { return each.mapped; });
    if (!whole() || !all_mapped) return unmap_each(device);  // a region with missing pieces has no content to lose
    Status done = try_catch([&] { return device.unmap(address, reserved_bytes); });
    if (!done) {
      broken = broken || done.error().state_changed;
      return done;
    }
    for (Handle& handle : handles) handle.mapped = false;
    return done;
  }

  // Unmap all mapped pieces, in reverse order, as far as the device lets it. Return the first error.
  Status unmap_each(DeviceMemory& device) {
    Status first;
    for (auto handle = handles.rbegin(); handle != handles.rend(); ++handle) {
      if (!handle->mapped) continue;
      Status done = try_catch([&] { return device.unmap(address + handle->offset, handle->size); });
      if (done) {
        handle->mapped = false;
      } else if (first) {
        first = std::move(done);
      }
    }
    return first;
  }

  // Release all pieces but the first `kept`, as far as the device lets it. If some remain, they stay in `handles` and
  // the region is broken.
  Status release(DeviceMemory& device, size_t kept = 0) {
    Status first;
    const auto released = [&](const Handle& handle) {
      Status done = try_catch([&] { return device.release(handle.id); });
      if (done) return true;
      if (first) first = std::move(done);
      return false;
    };
    const auto from = handles.begin() + static_cast<std::ptrdiff_t>(kept);
    handles.erase(std::remove_if(from, handles.end(), released), handles.end());
    if (!first) broken = true;
    return first;
  }
};

}  // namespace torpor
