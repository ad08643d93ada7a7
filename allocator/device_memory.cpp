#include "allocator/device_memory.h"

#include <fmt/format.h>

#include "base/units.h"

namespace torpor {
namespace {

Error invalid(std::string what, std::string next_step = "this is a mistake in the calling code") {
  return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}

Error precondition(std::string what) {
  return Error{
      .code = Code::kFailedPrecondition, .what = std::move(what), .next_step = "this is a mistake in the calling code"};
}

}  // namespace

Result<DeviceAddress> DeviceMemory::reserve(uint64_t size) {
  if (size == 0 || !is_aligned(size, granularity())) {
    return invalid(
        fmt::format("a reservation of {} bytes is not a multiple of the granularity {}", size, granularity()));
  }
  const std::lock_guard lock(mutex_);
  TORPOR_ASSIGN(const DeviceAddress address, do_reserve(size));
  reservations_.emplace(address, size);
  return address;
}

Status DeviceMemory::free_reservation(DeviceAddress address) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end()) return invalid(fmt::format("{:#x} is not the start of a reservation", address));
  const auto mapped = mappings_.lower_bound(address);
  if (mapped != mappings_.end() && mapped->first < address + found->second) {
    return precondition(
        fmt::format("the reservation at {:#x} still has memory mapped at {:#x}", address, mapped->first));
  }
  TORPOR_TRY(do_free_reservation(address, found->second));
  reservations_.erase(found);
  return ok();
}

Result<PhysicalId> DeviceMemory::create(uint64_t size) {
  if (size == 0 || !is_aligned(size, granularity())) {
    return invalid(
        fmt::format("physical memory of {} bytes is not a multiple of the granularity {}", size, granularity()));
  }
  const std::lock_guard lock(mutex_);
  if (capacity_bytes() != 0 && (physical_bytes_ > capacity_bytes() || size > capacity_bytes() - physical_bytes_)) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("{} bytes of device memory wanted, {} of {} are free", size,
                                     capacity_bytes() - std::min(physical_bytes_, capacity_bytes()), capacity_bytes()),
                 .next_step = "free device memory and call again",
                 .origin = Origin::kDevice};
  }
  TORPOR_ASSIGN(const PhysicalId id, do_create(size));
  physical_.emplace(id, Physical{.size = size});
  physical_bytes_ += size;
  return id;
}

Status DeviceMemory::release(PhysicalId id) {
  const std::lock_guard lock(mutex_);
  const auto found = physical_.find(id);
  if (found == physical_.end() || found->second.released) {
    return invalid(fmt::format("physical memory {} is unknown or already released", static_cast<uint64_t>(id)));
  }
  TORPOR_TRY(do_release(id));
  found->second.released = true;
  if (found->second.mappings == 0) forget(found);
  return ok();
}

Status DeviceMemory::map(DeviceAddress address, PhysicalId id) {
  const std::lock_guard lock(mutex_);
  const auto memory = physical_.find(id);
  if (memory == physical_.end() || memory->second.released) {
    return invalid(fmt::format("physical memory {} is unknown or already released", static_cast<uint64_t>(id)));
  }
  const uint64_t size = memory->second.size;
  auto reservation = reservations_.upper_bound(address);
  if (!is_aligned(address, granularity()) || reservation == reservations_.begin() ||
      address + size > (--reservation)->first + reservation->second) {
    return invalid(fmt::format("{} bytes at {:#x} do not lie inside one reservation", size, address));
  }
  const auto next = mappings_.lower_bound(address);
  const bool overlaps_next = next != mappings_.end() && next->first < address + size;
  const bool overlaps_previous =
      next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.size > address;
  if (overlaps_next || overlaps_previous) {
    return precondition(fmt::format("something is already mapped in the {} bytes at {:#x}", size, address));
  }
  TORPOR_TRY(do_map(address, id, size));
  mappings_.emplace(address, Mapping{.id = id, .size = size});
  ++memory->second.mappings;
  return ok();
}

Status DeviceMemory::set_access(DeviceAddress address, uint64_t size, Access access) {
  const std::lock_guard lock(mutex_);
  // The range must start and end with a mapping and be covered without a gap.
  std::vector<Mapping*> covered;
  uint64_t reached = address;
  for (auto at = mappings_.find(address); at != mappings_.end() && at->first == reached && reached < address + size;
       ++at) {
    covered.push_back(&at->second);
    reached += at->second.size;
  }
  if (size == 0 || reached != address + size) {
    return invalid(fmt::format("the {} bytes at {:#x} are not exactly covered by mappings", size, address));
  }
  TORPOR_TRY(do_set_access(address, size, access));
  for (Mapping* mapping : covered) mapping->access = access;
  return ok();
}

Status DeviceMemory::unmap(DeviceAddress address, uint64_t size) {
  const std::lock_guard lock(mutex_);
  uint64_t reached = address;
  for (auto at = mappings_.find(address); at != mappings_.end() && at->first == reached && reached < address + size;
       ++at) {
    reached += at->second.size;
  }
  if (size == 0 || reached != address + size) {
    return invalid(fmt::format("the {} bytes at {:#x} are not whole mappings", size, address));
  }
  TORPOR_TRY(do_unmap(address, size));
  for (auto at = mappings_.find(address); at != mappings_.end() && at->first < address + size;) {
    const auto memory = physical_.find(at->second.id);
    if (--memory->second.mappings == 0 && memory->second.released) forget(memory);
    at = mappings_.erase(at);
  }
  return ok();
}

Result<StreamId> DeviceMemory::create_stream() { return do_create_stream(); }

Status DeviceMemory::destroy_stream(StreamId stream) { return do_destroy_stream(stream); }

Status DeviceMemory::copy_async(StreamId stream, Direction direction, std::span<const Copy> copies) {
  const std::lock_guard lock(mutex_);
  for (const Copy& copy : copies) {
    if (copy.bytes == 0 || copy.host == nullptr) return invalid("a copy of no bytes, or without host memory");
    uint64_t reached = copy.device;
    while (reached < copy.device + copy.bytes) {
      auto mapping = mappings_.upper_bound(reached);
      if (mapping == mappings_.begin() || (--mapping)->first + mapping->second.size <= reached ||
          mapping->second.access == Access::kNone ||
          (direction == Direction::kHostToDevice && mapping->second.access != Access::kReadWrite)) {
        return invalid(fmt::format("copy of {} bytes at {:#x}: {:#x} is not mapped with access", copy.bytes,
                                   copy.device, reached));
      }
      reached = mapping->first + mapping->second.size;
    }
  }
  return do_copy_async(stream, direction, copies);
}

Result<EventId> DeviceMemory::record(StreamId stream) { return do_record(stream); }

DrainResult DeviceMemory::wait(EventId event) { return do_wait(event); }

DrainResult DeviceMemory::drain(StreamId stream) { return do_drain(stream); }

void DeviceMemory::forget(std::map<PhysicalId, Physical>::iterator physical) {
  physical_bytes_ -= physical->second.size;
  physical_.erase(physical);
}

DeviceMemoryInfo DeviceMemory::info() const {
  const std::lock_guard lock(mutex_);
  DeviceMemoryInfo info{
      .capacity_bytes = capacity_bytes(), .physical_bytes = physical_bytes_, .used_bytes = used_bytes()};
  for (const auto& [address, mapping] : mappings_) info.mapped_bytes += mapping.size;
  for (const auto& [address, size] : reservations_) info.reserved_bytes += size;
  return info;
}

}  // namespace torpor
