// SPDX-License-Identifier: Apache-2.0
#include "allocator/sleep_allocator.h"

#include <algorithm>
#include <tuple>

#include <fmt/core.h>

#include "allocator/sleep_allocator_internal.h"
#include "base/log.h"
#include "base/units.h"

namespace torpor {

std::string_view name(RegionState state) {
  switch (state) {
    case RegionState::kAttached: return "attached";
    case RegionState::kSaving: return "saving";
    case RegionState::kDetached: return "detached";
    case RegionState::kAttaching: return "attaching";
    case RegionState::kRestoring: return "restoring";
    case RegionState::kBroken: return "broken";
  }
  return "broken";
}

bool is_asleep(RegionState state) {
  return state == RegionState::kDetached || state == RegionState::kAttaching || state == RegionState::kRestoring;
}

void SleepAllocator::set_state(std::span<Region* const> regions, RegionState state) {
  const MutexLock lock(mutex_);
  for (Region* const region : regions) region->info.state = region->broken ? RegionState::kBroken : state;
}

SleepAllocator::SleepAllocator(DeviceMemory& device, SleepAllocatorOptions options)
    : device_(device), options_(options) {}

Result<std::unique_ptr<SleepAllocator>> SleepAllocator::create(DeviceMemory& device, SleepAllocatorOptions options) {
  if (options.handle_bytes == 0 || !is_aligned(options.handle_bytes, device.granularity())) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("handle_bytes is {}", options.handle_bytes),
                 .next_step = fmt::format("use a multiple of the device's granularity {}", device.granularity())};
  }
  return std::unique_ptr<SleepAllocator>(new SleepAllocator(device, options));
}

SleepAllocator::~SleepAllocator() {
  const auto give_up = [&](Region& region) {
    const auto report = [&](const Status& done) {
      if (!done) log().error("region {}/{} was not freed: {}", region.info.tag, region.info.name, done.error());
    };
    report(region.unmap_each(device_));
    report(region.release(device_));
    report(device_.free_reservation(region.info.address));
  };
  for (const auto& [address, region] : regions_) give_up(*region);
  for (const auto& [address, region] : trimmed_) give_up(*region);
}

Result<DeviceAddress> SleepAllocator::allocate(std::string_view tag, std::string_view region_name,
                                               uint64_t size_bytes) {
  if (tag.empty() || region_name.empty() || size_bytes == 0 || size_bytes > (uint64_t{1} << 60)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("a region needs a tag, a name and a size: \"{}\", \"{}\", {} bytes", tag,
                                     region_name, size_bytes),
                 .next_step = "give all three"};
  }
  const Hold hold(*this, Tags{std::string(tag)});
  {
    const MutexLock lock(mutex_);
    if (names_.contains(std::pair(std::string(tag), std::string(region_name)))) {
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("the region {}/{} exists already", tag, region_name),
                   .next_step = "choose another name"};
    }
    for (const auto& [other_address, other] : regions_) {
      const RegionState state = other->info.state;
      if (other->info.tag == tag && state != RegionState::kAttached && state != RegionState::kDetached) {
        return Error{.code = Code::kFailedPrecondition,
                     .what = fmt::format("the tag {} is {}", tag, name(state)),
                     .next_step = "wait for the operation to end before allocating in it"};
      }
    }
  }
  // Make all records before the device is called.
  std::set<std::pair<std::string, std::string>> fresh_name{{std::string(tag), std::string(region_name)}};
  std::map<DeviceAddress, std::unique_ptr<Region>> fresh;
  Region& region = *fresh.emplace(0, std::make_unique<Region>()).first->second;
  const uint64_t reserved = align_up(size_bytes, device_.granularity());
  region.info = {std::string(tag), std::string(region_name), 0, size_bytes, reserved, RegionState::kAttached};
  region.reserved_bytes = reserved;
  TORPOR_ASSIGN_OR_RETURN(const DeviceAddress address, device_.reserve(reserved));
  region.info.address = region.address = address;
  Status made = region.create(device_, options_.handle_bytes);
  if (made && !(made = region.map(device_))) (void)region.release(device_);
  if (!made) {
    Error error = std::move(made).error();
    const Status undone = try_catch([&] { return device_.free_reservation(address); });
    error.state_changed = region.broken || !undone;
    if (error.state_changed)
      log().error("memory of the region {}/{}, which was not made, stays with the device", tag, region_name);
    return error.within(fmt::format("region {}/{}", tag, region_name));
  }
  auto node = fresh.extract(fresh.begin());
  node.key() = address;
  const MutexLock lock(mutex_);
  names_.merge(fresh_name);
  region.number = ++last_number_;
  regions_.insert(std::move(node));
  return address;
}

Result<SleepAllocator::Region*> SleepAllocator::find(DeviceAddress address, const std::string* tag) const {
  for (const auto* regions : {&regions_, &trimmed_}) {
    const auto found = regions->find(address);
    if (found != regions->end() && (tag == nullptr || found->second->info.tag == *tag)) return found->second.get();
  }
  return Error{.code = Code::kNotFound,
               .what = fmt::format("no region begins at {:#x}", address),
               .next_step = "free what allocate() returned"};
}

template <class Call>
auto SleepAllocator::on_region(DeviceAddress address, const Call& call)
    -> decltype(call(std::declval<Region&>(), RegionState{})) {
  std::string tag;
  {
    const MutexLock lock(mutex_);
    TORPOR_ASSIGN_OR_RETURN(const Region* const wanted, find(address, nullptr));
    tag = wanted->info.tag;
  }
  const Hold hold(*this, Tags{tag});
  Region* region = nullptr;
  RegionState state{};
  {
    const MutexLock lock(mutex_);
    TORPOR_ASSIGN_OR_RETURN(region, find(address, &tag));
    state = region->info.state;
  }
  if (state == RegionState::kSaving || state == RegionState::kAttaching || state == RegionState::kRestoring) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("the region {}/{} is {}", region->info.tag, region->info.name, name(state)),
                 .next_step = "wait for the operation to end"};
  }
  return call(*region, state);
}

Status SleepAllocator::free(DeviceAddress address) {
  return on_region(address, [&](Region& region, RegionState state) -> Status {
    Region* const one = &region;
    TORPOR_RETURN_IF_ERROR(device_.synchronize());
    if (region.mapped() && !region.broken) {
      if (Status done = region.unmap(device_); !done) {
        set_state({&one, 1}, state);
        return done;
      }
    }
    region.broken = true;  // until it is gone; if a step fails now, free() may try again
    set_state({&one, 1}, state);
    TORPOR_RETURN_IF_ERROR(region.unmap_each(device_));
    TORPOR_RETURN_IF_ERROR(region.release(device_));
    TORPOR_RETURN_IF_ERROR(device_.free_reservation(address));
    const MutexLock lock(mutex_);
    if (trimmed_.erase(address) > 0) return ok();  // its name may belong to another region by now
    names_.erase({region.info.tag, region.info.name});
    regions_.erase(address);
    return ok();
  });
}

Result<uint64_t> SleepAllocator::trim(DeviceAddress address) {
  return on_region(address, [&](Region& region, RegionState) -> Result<uint64_t> {
    if (!region.handles.empty()) TORPOR_RETURN_IF_ERROR(device_.synchronize());
    {
      const MutexLock lock(mutex_);
      if (regions_.contains(address)) {
        names_.erase({region.info.tag, region.info.name});
        trimmed_.insert(regions_.extract(address));
        region.info.state = RegionState::kDetached;
      }
    }
    region.broken = false;  // nobody needs its content, so any part of its memory may stay or go
    const auto held = [&] {
      uint64_t bytes = 0;
      for (const RegionMemory::Handle& handle : region.handles) bytes += handle.size;
      return bytes;
    };
    const uint64_t before = held();
    Status done = region.unmap_each(device_);
    if (done) done = region.release(device_);
    if (done) return before;
    Error error = std::move(done).error();
    return error.within(fmt::format("trimming {}/{}, of which {} of {} bytes are left", region.info.tag,
                                    region.info.name, held(), before));
  });
}

Result<std::vector<SleepAllocator::Region*>> SleepAllocator::select(std::span<const std::string> tags,
                                                                    std::initializer_list<RegionState> allowed,
                                                                    bool coming) const {
  const MutexLock lock(mutex_);
  TORPOR_RETURN_IF_ERROR(check(tags, allowed, coming));
  std::vector<Region*> selected;
  for (const auto& [address, region] : regions_) {
    if (is_of(tags, *region) && !(coming && came_asleep(*region))) selected.push_back(region.get());
  }
  std::sort(selected.begin(), selected.end(), [](const Region* a, const Region* b) { return a->number < b->number; });
  return selected;
}

bool SleepAllocator::came_asleep(const Region& region) const {
  return region.info.state == RegionState::kAttached &&
         std::any_of(regions_.begin(), regions_.end(), [&](const auto& other) {
           return other.second->info.tag == region.info.tag && is_asleep(other.second->info.state);
         });
}

// Allocates memory only to report an error.
Status SleepAllocator::check(std::span<const std::string> tags, std::initializer_list<RegionState> allowed,
                             bool coming) const {
  for (const std::string& tag : tags) {
    const bool known =
        std::any_of(regions_.begin(), regions_.end(), [&](const auto& entry) { return entry.second->info.tag == tag; });
    if (!known) {
      return Error{.code = Code::kNotFound,
                   .what = fmt::format("there is no tag \"{}\"", tag),
                   .next_step = "see state() for the tags"};
    }
  }
  const Region* wrong = nullptr;  // the first that was allocated
  for (const auto& [address, region] : regions_) {
    const bool fits = std::find(allowed.begin(), allowed.end(), region->info.state) != allowed.end();
    if (is_of(tags, *region) && !fits && !(coming && came_asleep(*region)) &&
        (wrong == nullptr || region->number < wrong->number))
      wrong = region.get();
  }
  return wrong == nullptr ? ok() : wrong_state(wrong->info, name(*allowed.begin()));
}

bool SleepAllocator::is_of(std::span<const std::string> tags, const Region& region) {
  return tags.empty() || std::find(tags.begin(), tags.end(), region.info.tag) != tags.end();
}

Status SleepAllocator::begin_save(std::span<const std::string> tags) {
  const Hold hold(*this, tags);
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Region*> selected, select(tags, {RegionState::kAttached}));
  TORPOR_RETURN_IF_ERROR(device_.synchronize());  // save what the owner's work has written
  set_state(selected, RegionState::kSaving);
  return ok();
}

Status SleepAllocator::cancel_save(std::span<const std::string> tags) {
  const MutexLock lock(mutex_);
  while (in_use(tags)) call_ended_.wait(mutex_);
  TORPOR_RETURN_IF_ERROR(check(tags, {RegionState::kSaving}));
  for (const auto& [address, region] : regions_) {
    if (is_of(tags, *region) && !region->whole())
      return Error{.code = Code::kInternal, .what = "pages of a region were released, and not acquired again"};
  }
  for (const auto& [address, region] : regions_) {
    if (is_of(tags, *region)) region->info.state = RegionState::kAttached;
  }
  return ok();
}

Status SleepAllocator::detach(std::span<const std::string> tags) {
  const Hold hold(*this, tags);
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Region*> selected,
                          select(tags, {RegionState::kAttached, RegionState::kSaving}));
  return unmap_and_release(selected);
}

Status SleepAllocator::unmap_and_release(const std::vector<Region*>& selected) {
  TORPOR_RETURN_IF_ERROR(unmap_all(selected));
  return release_all(selected);
}

// Unmap all regions. If one fails, map those before it again, with the same memory and so the same content. A region
// that cannot be mapped again becomes broken.
Status SleepAllocator::unmap_all(const std::vector<Region*>& selected) {
  std::vector<Region*> unmapped;
  unmapped.reserve(selected.size());
  TORPOR_RETURN_IF_ERROR(device_.synchronize());
  for (Region* const region : selected) {
    if (!region->mapped()) continue;  // attaching
    Status done = region->unmap(device_);
    if (done) {
      unmapped.push_back(region);
      continue;
    }
    bool changed = region->broken;
    for (auto undone = unmapped.rbegin(); undone != unmapped.rend(); ++undone) {
      const Status back = (*undone)->map(device_);
      if (back) continue;
      (*undone)->broken = changed = true;
      (void)try_catch([&] {
        log().error("cannot undo: {}", back.error());
        return ok();
      });
    }
    {
      const MutexLock lock(mutex_);
      for (Region* const each : selected) {
        if (each->broken) each->info.state = RegionState::kBroken;
      }
    }
    Error error = std::move(done).error();
    error.state_changed = changed;
    (void)try_catch([&] {
      error = error.within(fmt::format("detaching {}/{}", region->info.tag, region->info.name));
      return ok();
    });
    return error;
  }
  return ok();
}

// Release the memory of all regions, with its content. This cannot be undone. If the device does not release a handle,
// its region becomes broken; the others are detached.
Status SleepAllocator::release_all(const std::vector<Region*>& selected) {
  Status first;
  for (Region* const region : selected) {
    Status released = region->release(device_);
    if (!released && first) first = std::move(released);
  }
  set_state(selected, RegionState::kDetached);
  if (first) return ok();
  Error error = std::move(first).error();
  error.state_changed = true;
  (void)try_catch([&] {
    std::string broken;
    for (const Region* region : selected) {
      if (region->broken)
        broken += fmt::format("{}{}/{}", broken.empty() ? "" : ", ", region->info.tag, region->info.name);
    }
    error.next_step = "end this process; what was saved can be woken in a new one";
    error = error.within(fmt::format("memory was not released, now broken: {}", broken));
    return ok();
  });
  return error;
}

Status SleepAllocator::begin_attach(std::span<const std::string> tags) {
  const Hold hold(*this, tags);
  TORPOR_ASSIGN_OR_RETURN(
      std::vector<Region*> selected,
      select(tags, {RegionState::kDetached, RegionState::kAttaching, RegionState::kRestoring}, true));
  {  // The other regions have their memory, without content: an earlier cancel_restore() could not release it.
    const MutexLock lock(mutex_);
    std::erase_if(selected, [](const Region* region) { return region->info.state != RegionState::kDetached; });
  }
  set_state(selected, RegionState::kAttaching);
  return ok();
}

Status SleepAllocator::attach_region(DeviceAddress address) {
  const std::optional<RegionInfo> wanted = region_at(address);
  const auto unknown = [&] {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("no region begins at {:#x}", address),
                 .next_step = "attach what allocate() returned"};
  };
  if (!wanted) return unknown();
  const Hold hold(*this, Tags{wanted->tag});
  Region* region = nullptr;
  {
    const MutexLock lock(mutex_);
    const auto found = regions_.find(address);
    if (found == regions_.end() || found->second->info.tag != wanted->tag) return unknown();
    region = found->second.get();
    if (region->info.state == RegionState::kRestoring || came_asleep(*region)) return ok();
    if (region->info.state != RegionState::kAttaching) return wrong_state(region->info, name(RegionState::kAttaching));
  }
  Status done = region->create(device_, options_.handle_bytes);  // the pages that are missing
  if (done) done = region->map(device_);
  if (!done) {
    set_state({&region, 1}, RegionState::kAttaching);
    Error error = std::move(done).error();
    error.state_changed = region->broken;
    if (error.code == Code::kResourceExhausted)
      error = error.within(fmt::format("{} more bytes of device memory are needed to wake", attaching_bytes()));
    return error.within(fmt::format("attaching {}/{}", region->info.tag, region->info.name));
  }
  set_state({&region, 1}, RegionState::kRestoring);
  return ok();
}

uint64_t SleepAllocator::attaching_bytes() const {
  uint64_t bytes = 0;
  for (const RegionInfo& region : regions()) {
    if (region.state == RegionState::kAttaching) bytes += region.reserved_bytes;
  }
  return bytes;
}

Status SleepAllocator::finish_restore(std::span<const std::string> tags) {
  const Hold hold(*this, tags);
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Region*> selected, select(tags, {RegionState::kRestoring}, true));
  set_state(selected, RegionState::kAttached);
  return ok();
}

Status SleepAllocator::cancel_restore(std::span<const std::string> tags) {
  const Hold hold(*this, tags);
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Region*> selected,
                          select(tags, {RegionState::kRestoring, RegionState::kAttaching}, true));
  return unmap_and_release(selected);
}

std::optional<RegionInfo> SleepAllocator::region_at(DeviceAddress address) const {
  const MutexLock lock(mutex_);
  const auto found = regions_.find(address);
  return found == regions_.end() ? std::nullopt : std::optional(found->second->info);
}

std::vector<RegionInfo> SleepAllocator::regions() const {
  const MutexLock lock(mutex_);
  std::vector<const Region*> sorted;
  for (const auto& [address, region] : regions_) sorted.push_back(region.get());
  std::sort(sorted.begin(), sorted.end(), [](const Region* a, const Region* b) {
    return std::tie(a->info.tag, a->number) < std::tie(b->info.tag, b->number);
  });
  std::vector<RegionInfo> infos;
  for (const Region* region : sorted) infos.push_back(region->info);
  return infos;
}

std::vector<RegionInfo> SleepAllocator::regions_of(std::string_view tag) const {
  std::vector<RegionInfo> infos = regions();
  std::erase_if(infos, [&](const RegionInfo& info) { return info.tag != tag; });
  return infos;
}

std::map<std::string, RegionState> SleepAllocator::states() const {
  std::map<std::string, RegionState> states;
  for (const RegionInfo& info : regions()) {
    const auto [entry, fresh] = states.try_emplace(info.tag, info.state);
    if (info.state == RegionState::kBroken || entry->second == RegionState::kAttached) entry->second = info.state;
  }
  return states;
}

}  // namespace torpor
