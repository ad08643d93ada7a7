// SPDX-License-Identifier: Apache-2.0
#include "allocator/arena_slab.h"

#include <algorithm>
#include <cerrno>

#include <fmt/core.h>

#include "allocator/device_memory.h"
#include "allocator/prefault.h"
#include "base/log.h"

namespace torpor {

Result<std::byte*> map_slab(uint64_t size, NumaSystem& numa, NumaTarget& target) {
  std::byte* const data = map_fresh(size);
  if (data == nullptr)
    return system_error(errno, fmt::format("cannot take {} bytes of host memory", size),
                        "free memory, or sleep to disk");
  prefer_target(numa, target, data, size);
  return data;
}

void pin_slab(ArenaSlab& slab, DeviceMemory* device, uint64_t piece) noexcept {
  slab.refused = slab.pin_later = false;
  while (device != nullptr && !slab.stuck && slab.pinned < slab.size) {
    const uint64_t bytes = std::min(piece, slab.size - slab.pinned);
    const Status done = try_catch([&] { return device->pin_host({slab.data + slab.pinned, bytes}); });
    if (done) {
      slab.pinned += bytes;
      continue;
    }
    slab.refused = true;
    slab.stuck = done.error().state_changed;
    slab.pin_later = done.error().code == Code::kUnavailable && !slab.stuck;
    (void)try_catch([&] {
      log().warn("host memory is used unpinned{}, copies are slower: {}", slab.pin_later ? " until later" : "",
                 done.error());
      return ok();
    });
    return;
  }
}

bool drop_slab(const ArenaSlab& slab, DeviceMemory* device) noexcept {
  if (slab.stuck) return false;
  if (slab.pinned > 0) {
    const Status done = try_catch([&] { return device->unpin_host({slab.data, slab.pinned}); });
    if (!done) {
      (void)try_catch([&] {
        log().error("host memory stays: {}", done.error());
        return ok();
      });
      return false;
    }
  }
  unmap_fresh(slab.data, slab.size);
  return true;
}

}  // namespace torpor
