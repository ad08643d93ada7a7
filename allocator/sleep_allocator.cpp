#include "allocator/sleep_allocator.h"

#include <algorithm>
#include <functional>
#include <tuple>

#include <fmt/format.h>

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

struct SleepAllocator::Region {
  RegionInfo info;
  uint64_t number = 0;  // in order of allocation
  struct Handle {
    PhysicalId id{};
    uint64_t offset = 0;
    uint64_t size = 0;
  };
  std::vector<Handle> handles;  // created; mapped unless a call is between its two phases
};

namespace {

// What a call has done so far; unless kept, destroyed in reverse.
class UndoList {
 public:
  void add(std::function<Status()> step, std::function<void()> on_failure) {
    steps_.push_back({std::move(step), std::move(on_failure)});
  }
  // True if every step was undone.
  bool undo() {
    bool whole = true;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      if (const Status done = step->undo(); !done) {
        log().error("cannot undo: {}", done.error().to_string());
        step->on_failure();
        whole = false;
      }
    }
    steps_.clear();
    return whole;
  }

 private:
  struct Step {
    std::function<Status()> undo;
    std::function<void()> on_failure;
  };
  std::vector<Step> steps_;
};

}  // namespace

// The operations below need the lock and the private Region, so they live in one helper.
struct RegionOperations {
  using Region = SleepAllocator::Region;

  static Status create(DeviceMemory& device, Region& region, uint64_t handle_bytes, UndoList& undo) {
    undo.add(
        [&region] {
          region.handles.clear();
          return ok();
        },
        [] {});
    for (uint64_t offset = 0; offset < region.info.reserved_bytes; offset += handle_bytes) {
      const uint64_t size = std::min(handle_bytes, region.info.reserved_bytes - offset);
      TORPOR_ASSIGN(const PhysicalId id, device.create(size));
      undo.add([&device, id] { return device.release(id); }, [&region] { region.info.state = RegionState::kBroken; });
      region.handles.push_back({id, offset, size});
    }
    return ok();
  }

  static Status map(DeviceMemory& device, Region& region, UndoList& undo) {
    for (const Region::Handle& handle : region.handles) {
      const DeviceAddress address = region.info.address + handle.offset;
      TORPOR_TRY(device.map(address, handle.id));
      undo.add([&device, address, size = handle.size] { return device.unmap(address, size); },
               [&region] { region.info.state = RegionState::kBroken; });
    }
    return device.set_access(region.info.address, region.info.reserved_bytes, Access::kReadWrite);
  }

  static Status unmap(DeviceMemory& device, Region& region, UndoList& undo) {
    if (Status done = device.unmap(region.info.address, region.info.reserved_bytes); !done) {
      if (done.error().state_changed) region.info.state = RegionState::kBroken;
      return done;
    }
    const auto map_again = [&device, &region] {
      UndoList kept;
      return map(device, region, kept);
    };
    undo.add(map_again, [&region] { region.info.state = RegionState::kBroken; });
    return ok();
  }
};

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
  for (const auto& [address, region] : regions_) {
    const auto report = [&](const Status& done) {
      if (!done)
        log().error("region {}/{} was not freed: {}", region->info.tag, region->info.name, done.error().to_string());
    };
    if (!region->handles.empty() && region->info.state != RegionState::kAttaching)
      report(device_.unmap(region->info.address, region->info.reserved_bytes));
    for (const Region::Handle& handle : region->handles) report(device_.release(handle.id));
    report(device_.free_reservation(region->info.address));
  }
}

Result<DeviceAddress> SleepAllocator::allocate(std::string_view tag, std::string_view region_name,
                                               uint64_t size_bytes) {
  if (tag.empty() || region_name.empty() || size_bytes == 0 || size_bytes > (uint64_t{1} << 60)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("a region needs a tag, a name and a size: \"{}\", \"{}\", {} bytes", tag,
                                     region_name, size_bytes),
                 .next_step = "give all three"};
  }
  const std::lock_guard lock(mutex_);
  if (names_.contains(std::pair(std::string(tag), std::string(region_name)))) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("the region {}/{} exists already", tag, region_name),
                 .next_step = "choose another name"};
  }
  for (const auto& [other_address, other] : regions_) {
    if (other->info.tag == tag && other->info.state != RegionState::kAttached) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("the tag {} is {}", tag, name(other->info.state)),
                   .next_step = "wake it before allocating in it"};
    }
  }
  auto region = std::make_unique<Region>();
  const uint64_t reserved = align_up(size_bytes, device_.granularity());
  TORPOR_ASSIGN(const DeviceAddress address, device_.reserve(reserved));
  region->info = {std::string(tag), std::string(region_name), address, size_bytes, reserved, RegionState::kAttached};
  UndoList undo;
  undo.add([&] { return device_.free_reservation(address); }, [] {});
  Status made = RegionOperations::create(device_, *region, options_.handle_bytes, undo);
  if (made) made = RegionOperations::map(device_, *region, undo);
  if (!made) {
    Error error = std::move(made).error();
    error.state_changed = !undo.undo();
    return error.within(fmt::format("region {}/{}", tag, region_name));
  }
  names_.emplace(tag, region_name);
  region->number = ++last_number_;
  regions_.emplace(address, std::move(region));
  return address;
}

Status SleepAllocator::free(DeviceAddress address) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(address);
  if (found == regions_.end()) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("no region begins at {:#x}", address),
                 .next_step = "free what allocate() returned"};
  }
  Region& region = *found->second;
  const RegionState state = region.info.state;
  if (state == RegionState::kSaving || state == RegionState::kAttaching || state == RegionState::kRestoring) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("the region {}/{} is {}", region.info.tag, region.info.name, name(state)),
                 .next_step = "wait for the operation to end"};
  }
  TORPOR_TRY(device_.synchronize());
  if (!region.handles.empty() && state != RegionState::kBroken) {
    TORPOR_TRY(device_.unmap(region.info.address, region.info.reserved_bytes));
  }
  region.info.state = RegionState::kBroken;  // until it is gone: what fails now, free() may try again
  while (!region.handles.empty()) {
    TORPOR_TRY(device_.release(region.handles.back().id));
    region.handles.pop_back();
  }
  TORPOR_TRY(device_.free_reservation(region.info.address));
  names_.erase({region.info.tag, region.info.name});
  regions_.erase(found);
  return ok();
}

namespace {

Error wrong_state(const RegionInfo& region, std::string_view wanted) {
  if (region.state == RegionState::kBroken) {
    return Error{.code = Code::kDevice,
                 .what = fmt::format("the region {}/{} is broken: an earlier failure could not be undone", region.tag,
                                     region.name),
                 .next_step = "end this process; what was saved can be woken in a new one",
                 .origin = Origin::kDevice};
  }
  return Error{.code = Code::kFailedPrecondition,
               .what = fmt::format("the tag {} is {}, not {}", region.tag, name(region.state), wanted),
               .next_step = "see state()"};
}

}  // namespace

// Selects the regions of `tags`, all of which must be in one of `allowed`.
struct RegionSelection {
  static Result<std::vector<SleepAllocator::Region*>> select(
      const std::map<DeviceAddress, std::unique_ptr<SleepAllocator::Region>>& regions,
      std::span<const std::string> tags, std::initializer_list<RegionState> allowed) {
    std::vector<SleepAllocator::Region*> selected;
    for (const std::string& tag : tags) {
      const bool known =
          std::any_of(regions.begin(), regions.end(), [&](const auto& entry) { return entry.second->info.tag == tag; });
      if (!known) {
        return Error{.code = Code::kNotFound,
                     .what = fmt::format("there is no tag \"{}\"", tag),
                     .next_step = "see state() for the tags"};
      }
    }
    for (const auto& [address, region] : regions) {
      if (!tags.empty() && std::find(tags.begin(), tags.end(), region->info.tag) == tags.end()) continue;
      if (std::find(allowed.begin(), allowed.end(), region->info.state) == allowed.end()) {
        return wrong_state(region->info, name(*allowed.begin()));
      }
      selected.push_back(region.get());
    }
    return selected;
  }
};

Status SleepAllocator::begin_save(std::span<const std::string> tags) {
  const std::lock_guard lock(mutex_);
  TORPOR_ASSIGN(const std::vector<Region*> selected, RegionSelection::select(regions_, tags, {RegionState::kAttached}));
  TORPOR_TRY(device_.synchronize());  // what is saved is what the owner's work has written
  for (Region* region : selected) region->info.state = RegionState::kSaving;
  return ok();
}

Status SleepAllocator::cancel_save(std::span<const std::string> tags) {
  const std::lock_guard lock(mutex_);
  TORPOR_ASSIGN(const std::vector<Region*> selected, RegionSelection::select(regions_, tags, {RegionState::kSaving}));
  for (Region* region : selected) region->info.state = RegionState::kAttached;
  return ok();
}

Status SleepAllocator::detach(std::span<const std::string> tags) {
  const std::lock_guard lock(mutex_);
  TORPOR_ASSIGN(const std::vector<Region*> selected,
                RegionSelection::select(regions_, tags, {RegionState::kAttached, RegionState::kSaving}));
  return take_memory(selected);
}

Status SleepAllocator::take_memory(const std::vector<Region*>& selected) {
  TORPOR_TRY(device_.synchronize());
  UndoList undo;
  for (Region* region : selected) {
    if (region->info.state == RegionState::kAttaching) continue;  // mapped nowhere
    if (Status done = RegionOperations::unmap(device_, *region, undo); !done) {
      Error error = std::move(done).error();
      error.state_changed = !undo.undo() || error.state_changed;
      return error.within(fmt::format("detaching {}/{}", region->info.tag, region->info.name));
    }
  }
  // From here on content goes. A handle that will not be released makes its region broken, the others are detached.
  std::string broken;
  Error first;
  for (Region* region : selected) {
    region->info.state = RegionState::kDetached;
    for (const Region::Handle& handle : region->handles) {
      if (Status done = device_.release(handle.id); !done) {
        if (broken.empty()) first = std::move(done).error();
        broken += fmt::format("{}{}/{}", broken.empty() ? "" : ", ", region->info.tag, region->info.name);
        region->info.state = RegionState::kBroken;
        break;
      }
    }
    if (region->info.state == RegionState::kDetached) region->handles.clear();
  }
  if (!broken.empty()) {
    first.state_changed = true;
    first.next_step = "end this process; what was saved can be woken in a new one";
    return first.within(fmt::format("memory was not released, now broken: {}", broken));
  }
  return ok();
}

Status SleepAllocator::begin_attach(std::span<const std::string> tags) {
  const std::lock_guard lock(mutex_);
  TORPOR_ASSIGN(std::vector<Region*> selected,
                RegionSelection::select(regions_, tags,
                                        {RegionState::kDetached, RegionState::kAttaching, RegionState::kRestoring}));
  // The others: an earlier cancel_restore() could not take the memory away again. It is still there, without content.
  std::erase_if(selected, [](const Region* region) { return region->info.state != RegionState::kDetached; });
  UndoList undo;
  for (Region* region : selected) {
    if (Status done = RegionOperations::create(device_, *region, options_.handle_bytes, undo); !done) {
      uint64_t missing = 0;
      for (const Region* other : selected) missing += other->info.reserved_bytes;
      Error error = std::move(done).error();
      error.state_changed = !undo.undo();
      return error.within(fmt::format("{} bytes of device memory are needed to wake; region {}/{}", missing,
                                      region->info.tag, region->info.name));
    }
  }
  for (Region* region : selected) region->info.state = RegionState::kAttaching;
  return ok();
}

Status SleepAllocator::attach_region(DeviceAddress address) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(address);
  if (found == regions_.end()) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("no region begins at {:#x}", address),
                 .next_step = "attach what allocate() returned"};
  }
  Region& region = *found->second;
  if (region.info.state == RegionState::kRestoring) return ok();
  if (region.info.state != RegionState::kAttaching) return wrong_state(region.info, name(RegionState::kAttaching));
  UndoList undo;
  if (Status done = RegionOperations::map(device_, region, undo); !done) {
    Error error = std::move(done).error();
    error.state_changed = !undo.undo();
    return error.within(fmt::format("attaching {}/{}", region.info.tag, region.info.name));
  }
  region.info.state = RegionState::kRestoring;
  return ok();
}

Status SleepAllocator::finish_restore(std::span<const std::string> tags) {
  const std::lock_guard lock(mutex_);
  TORPOR_ASSIGN(const std::vector<Region*> selected,
                RegionSelection::select(regions_, tags, {RegionState::kRestoring}));
  for (Region* region : selected) region->info.state = RegionState::kAttached;
  return ok();
}

Status SleepAllocator::cancel_restore(std::span<const std::string> tags) {
  const std::lock_guard lock(mutex_);
  TORPOR_ASSIGN(const std::vector<Region*> selected,
                RegionSelection::select(regions_, tags, {RegionState::kRestoring, RegionState::kAttaching}));
  return take_memory(selected);
}

std::optional<RegionInfo> SleepAllocator::region_at(DeviceAddress address) const {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(address);
  return found == regions_.end() ? std::nullopt : std::optional(found->second->info);
}

std::vector<RegionInfo> SleepAllocator::regions() const {
  const std::lock_guard lock(mutex_);
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
    if (!fresh && info.state == RegionState::kBroken) entry->second = RegionState::kBroken;
  }
  return states;
}

}  // namespace torpor
