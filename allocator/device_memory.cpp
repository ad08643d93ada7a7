// SPDX-License-Identifier: Apache-2.0
#include "allocator/device_memory.h"

#include <fmt/core.h>

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

// Make an entry of a map before the device is called: recording what the device has done can then not fail.
template <class Map>
typename Map::node_type entry(const Map&, typename Map::mapped_type value) {
  Map made;
  made.emplace(typename Map::key_type{}, std::move(value));
  return made.extract(made.begin());
}

}  // namespace

Result<DeviceAddress> DeviceMemory::reserve(uint64_t size) {
  if (size == 0 || !is_aligned(size, granularity())) {
    return invalid(
        fmt::format("a reservation of {} bytes is not a multiple of the granularity {}", size, granularity()));
  }
  auto fresh = entry(std::map<DeviceAddress, Reservation>(), {.size = size});
  TORPOR_ASSIGN_OR_RETURN(const DeviceAddress address, do_reserve(size));
  fresh.key() = address;
  const MutexLock lock(mutex_);
  reservations_.insert(std::move(fresh));
  return address;
}

Status DeviceMemory::free_reservation(DeviceAddress address) {
  MutexLock lock(mutex_);
  auto found = reservations_.find(address);
  while (found != reservations_.end() && found->second.busy) {
    changed_.wait(mutex_);
    found = reservations_.find(address);
  }
  if (found == reservations_.end()) return invalid(fmt::format("{:#x} is not the start of a reservation", address));
  const uint64_t size = found->second.size;
  const auto mapped = mappings_.lower_bound(address);
  if (mapped != mappings_.end() && mapped->first < address + size) {
    return precondition(
        fmt::format("the reservation at {:#x} still has memory mapped at {:#x}", address, mapped->first));
  }
  found->second.busy = true;
  lock.unlock();
  Status done = try_catch([&] { return do_free_reservation(address, size); });
  lock.lock();
  found->second.busy = false;
  if (done) reservations_.erase(found);
  changed_.notify_all();
  return done;
}

Result<PhysicalId> DeviceMemory::create(uint64_t size) {
  if (size == 0 || !is_aligned(size, granularity())) {
    return invalid(
        fmt::format("physical memory of {} bytes is not a multiple of the granularity {}", size, granularity()));
  }
  const uint64_t capacity = capacity_bytes();
  auto fresh = entry(std::map<PhysicalId, Physical>(), {.size = size});
  {
    const MutexLock lock(mutex_);
    if (capacity != 0 && (physical_bytes_ > capacity || size > capacity - physical_bytes_)) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("{} bytes of device memory wanted, {} of {} are free", size,
                                       capacity - std::min(physical_bytes_, capacity), capacity),
                   .next_step = "free device memory and call again",
                   .origin = Origin::kDevice};
    }
    physical_bytes_ += size;
  }
  Result<PhysicalId> id = try_catch([&] { return do_create(size); });
  const MutexLock lock(mutex_);
  if (!id) {
    physical_bytes_ -= size;
    return id;
  }
  fresh.key() = *id;
  physical_.insert(std::move(fresh));
  return id;
}

Status DeviceMemory::release(PhysicalId id) {
  MutexLock lock(mutex_);
  auto found = physical_.find(id);
  while (found != physical_.end() && found->second.busy) {
    changed_.wait(mutex_);
    found = physical_.find(id);
  }
  if (found == physical_.end() || found->second.released) {
    return invalid(fmt::format("physical memory {} is unknown or already released", static_cast<uint64_t>(id)));
  }
  found->second.busy = true;
  lock.unlock();
  Status done = try_catch([&] { return do_release(id); });
  lock.lock();
  found->second.busy = false;
  found->second.released = done.has_value();
  forget_if_gone(found);
  changed_.notify_all();
  return done;
}

Status DeviceMemory::map(DeviceAddress address, PhysicalId id) {
  auto fresh = entry(std::map<DeviceAddress, Mapping>(), {.id = id});
  MutexLock lock(mutex_);
  PhysicalAt memory = physical_.find(id);
  auto reservation = reservations_.end();
  while (true) {
    if (memory == physical_.end() || memory->second.released) {
      return invalid(fmt::format("physical memory {} is unknown or already released", static_cast<uint64_t>(id)));
    }
    reservation = reservations_.upper_bound(address);
    if (!is_aligned(address, granularity()) || reservation == reservations_.begin() ||
        address + memory->second.size > (--reservation)->first + reservation->second.size) {
      return invalid(fmt::format("{} bytes at {:#x} do not lie inside one reservation", memory->second.size, address));
    }
    if (!memory->second.busy && !reservation->second.busy) break;
    changed_.wait(mutex_);
    memory = physical_.find(id);
  }
  const uint64_t size = memory->second.size;
  const auto next = mappings_.lower_bound(address);
  const bool overlaps_next = next != mappings_.end() && next->first < address + size;
  const bool overlaps_previous =
      next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.size > address;
  if (overlaps_next || overlaps_previous) {
    return precondition(fmt::format("something is already mapped in the {} bytes at {:#x}", size, address));
  }
  fresh.key() = address;
  fresh.mapped().size = size;
  const MappingAt mapping = mappings_.insert(std::move(fresh)).position;  // no other call can map there meanwhile
  memory->second.busy = true;
  lock.unlock();
  Status done = try_catch([&] { return do_map(address, id, size); });
  lock.lock();
  memory->second.busy = false;
  if (done) {
    ++memory->second.mappings;
  } else {
    mappings_.erase(mapping);
  }
  changed_.notify_all();
  return done;
}

bool DeviceMemory::take(DeviceAddress address, uint64_t size) {
  while (true) {
    bool in_use = false;
    uint64_t reached = address;
    for (auto at = mappings_.find(address); at != mappings_.end() && at->first == reached && reached < address + size;
         ++at) {
      in_use = in_use || at->second.copies > 0 || physical_.at(at->second.id).busy;
      reached += at->second.size;
    }
    if (size == 0 || reached != address + size) return false;
    if (!in_use) break;
    changed_.wait(mutex_);
  }
  each_in(address, size, [this](MappingAt at) TORPOR_REQUIRES(mutex_) { physical_.at(at->second.id).busy = true; });
  return true;
}

void DeviceMemory::give_back(DeviceAddress address, uint64_t size) {
  each_in(address, size, [this](MappingAt at) TORPOR_REQUIRES(mutex_) { physical_.at(at->second.id).busy = false; });
  changed_.notify_all();
}

Status DeviceMemory::set_access(DeviceAddress address, uint64_t size, Access access) {
  MutexLock lock(mutex_);
  if (!take(address, size))
    return invalid(fmt::format("the {} bytes at {:#x} are not exactly covered by mappings", size, address));
  lock.unlock();
  Status done = try_catch([&] { return do_set_access(address, size, access); });
  lock.lock();
  if (done) each_in(address, size, [access](MappingAt at) { at->second.access = access; });
  give_back(address, size);
  return done;
}

Status DeviceMemory::unmap(DeviceAddress address, uint64_t size) {
  MutexLock lock(mutex_);
  if (!take(address, size)) return invalid(fmt::format("the {} bytes at {:#x} are not whole mappings", size, address));
  lock.unlock();
  Status done = try_catch([&] { return do_unmap(address, size); });
  lock.lock();
  give_back(address, size);
  if (!done) return done;
  each_in(address, size, [this](MappingAt at) TORPOR_REQUIRES(mutex_) {
    const PhysicalAt memory = physical_.find(at->second.id);
    --memory->second.mappings;
    mappings_.erase(at);
    forget_if_gone(memory);
  });
  return done;
}

Result<StreamId> DeviceMemory::create_stream() { return do_create_stream(); }

Status DeviceMemory::destroy_stream(StreamId stream) { return do_destroy_stream(stream); }

Result<bool> DeviceMemory::find_for_copies(std::span<const Range> ranges, std::vector<MappingAt>& touched) {
  touched.clear();
  bool in_use = false;
  for (const Range& copy : ranges) {
    uint64_t reached = copy.address;
    if (!touched.empty()) {  // most pieces of a batch lie in the same mapping as the piece before
      const auto& [address, mapping] = *touched.back();
      if (reached >= address && copy.bytes <= mapping.size && reached - address <= mapping.size - copy.bytes) continue;
    }
    while (reached < copy.address + copy.bytes) {
      MappingAt mapping = mappings_.upper_bound(reached);
      const bool there = mapping != mappings_.begin() && (--mapping)->first + mapping->second.size > reached;
      if (there && physical_.at(mapping->second.id).busy) {  // check its state when that call has ended
        in_use = true;
      } else if (!there || mapping->second.access == Access::kNone) {
        return invalid(fmt::format("copy of {} bytes at {:#x}: {:#x} is not mapped with access", copy.bytes,
                                   copy.address, reached));
      }
      if (touched.empty() || touched.back() != mapping) touched.push_back(mapping);
      reached = mapping->first + mapping->second.size;
    }
  }
  return !in_use;
}

template <class Use>
Status DeviceMemory::while_mapped(std::span<const Range> ranges, const Use& use) {
  std::vector<MappingAt> touched;
  MutexLock lock(mutex_);
  while (true) {
    TORPOR_ASSIGN_OR_RETURN(const bool free, find_for_copies(ranges, touched));
    if (free) break;
    changed_.wait(mutex_);
  }
  for (const MappingAt at : touched) ++at->second.copies;
  lock.unlock();
  Status done = try_catch(use);
  lock.lock();
  for (const MappingAt at : touched) --at->second.copies;
  changed_.notify_all();
  return done;
}

Status DeviceMemory::copy_async(StreamId stream, Direction direction, std::span<const Copy> copies, CopyBy by) {
  std::vector<Range> ranges;
  ranges.reserve(copies.size());
  for (const Copy& copy : copies) {
    if (copy.bytes == 0 || copy.host == nullptr) return invalid("a copy of no bytes, or without host memory");
    ranges.push_back({copy.device, copy.bytes});
  }
  return while_mapped(ranges, [&] { return do_copy_async(stream, direction, copies, by); });
}

Status DeviceMemory::copy_within(std::span<const InnerCopy> copies) {
  std::vector<Range> targets;
  std::vector<Range> ranges;
  for (const InnerCopy& copy : copies) {
    if (copy.bytes == 0) return invalid("a copy of no bytes");
    targets.push_back({copy.to, copy.bytes});
    ranges.push_back({copy.from, copy.bytes});
  }
  std::sort(targets.begin(), targets.end(), [](const Range& a, const Range& b) { return a.address < b.address; });
  for (size_t i = 1; i < targets.size(); ++i) {
    if (targets[i].address - targets[i - 1].address < targets[i - 1].bytes)
      return invalid(fmt::format("two copies have a target at {:#x}", targets[i].address));
  }
  for (const Range& source : ranges) {
    const auto next = std::upper_bound(targets.begin(), targets.end(), source.address,
                                       [](uint64_t address, const Range& target) { return address < target.address; });
    const bool meets_next = next != targets.end() && next->address - source.address < source.bytes;
    if (meets_next || (next != targets.begin() && source.address - std::prev(next)->address < std::prev(next)->bytes))
      return invalid(fmt::format("what is copied from {:#x} is written meanwhile", source.address));
  }
  ranges.insert(ranges.end(), targets.begin(), targets.end());
  return while_mapped(ranges, [&] { return do_copy_within(copies); });
}

Result<EventId> DeviceMemory::record(StreamId stream) { return do_record(stream); }

DrainResult DeviceMemory::wait(EventId event) { return do_wait(event); }

DrainResult DeviceMemory::drain(StreamId stream) { return do_drain(stream); }

void DeviceMemory::forget_if_gone(PhysicalAt physical) {
  if (!physical->second.released || physical->second.mappings > 0) return;
  physical_bytes_ -= physical->second.size;
  physical_.erase(physical);
}

DeviceMemoryInfo DeviceMemory::info() const {
  DeviceMemoryInfo info{.capacity_bytes = capacity_bytes(), .used_bytes = used_bytes()};
  const MutexLock lock(mutex_);
  info.physical_bytes = physical_bytes_;
  for (const auto& [address, mapping] : mappings_) info.mapped_bytes += mapping.size;
  for (const auto& [address, reservation] : reservations_) info.reserved_bytes += reservation.size;
  return info;
}

}  // namespace torpor
