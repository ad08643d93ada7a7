// SPDX-License-Identifier: Apache-2.0
// SleepAllocator: regions of device memory, by tag. A sleep removes the physical memory and keeps the addresses; a wake
// puts new memory under the same addresses.
//
// States of a tag (docs/semantics.md): kAttached -> kSaving -> kDetached -> kAttaching -> kRestoring -> kAttached, and
// kBroken. The allocator moves no content: between begin_save() and detach(), and between attach_region() and
// finish_restore(), the owner (engine/rank_memory.h) copies it through offload.
//
// Each call is all or nothing over all regions of its tags: on failure it undoes exactly what it did, in reverse. If a
// step cannot be undone, its region becomes kBroken, and later calls fail and name the broken region. The allocator
// knows exactly which memory of a broken region is still mapped or not released; free() may be tried again.
//
// Ownership: regions belong to the allocator; callers hold addresses. Threads: all methods are safe from any thread. A
// call that changes tags holds them until it ends; other calls that need one of them wait. Calls that only read never
// wait. No lock is held while the device works.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "allocator/device_memory.h"
#include "base/mutex.h"

namespace torpor {

enum class RegionState : uint8_t { kAttached, kSaving, kDetached, kAttaching, kRestoring, kBroken };
std::string_view name(RegionState state);  // "attached" …
bool is_asleep(RegionState state);         // detached, or left part-way by a wake that could not be undone

struct RegionInfo {
  std::string tag;
  std::string name;  // unique within the tag
  DeviceAddress address = 0;
  uint64_t size_bytes = 0;      // as requested
  uint64_t reserved_bytes = 0;  // rounded up to the granularity
  RegionState state = RegionState::kAttached;
};

struct DevicePage {  // a piece of a region with physical memory of its own
  DeviceAddress region = 0;
  uint64_t offset = 0;
  uint64_t size_bytes = 0;
  DeviceAddress address() const { return region + offset; }
};

struct SleepAllocatorOptions {
  uint64_t handle_bytes = 64ull << 20;  // a region's physical memory is created in pieces of this size
};

class SleepAllocator {
 public:
  // `device` must outlive the result.
  static Result<std::unique_ptr<SleepAllocator>> create(DeviceMemory& device, SleepAllocatorOptions options = {});
  ~SleepAllocator();  // frees everything; logs the memory that the device would not release

  // Make a zeroed region, attached. If the tag is detached, its other regions detach and attach without the new one
  // until all are attached. kInvalidArgument: empty tag or name, size 0, or the name is taken in this tag.
  // kFailedPrecondition: the tag is saving, attaching, restoring or broken. kResourceExhausted: not enough memory.
  Result<DeviceAddress> allocate(std::string_view tag, std::string_view name, uint64_t size_bytes);
  // Free a region in any state but kSaving, kAttaching and kRestoring. After a failure another call may free the rest.
  Status free(DeviceAddress address);
  // Release the physical memory of an unused region and remove the region from its tag: sleeps, wakes, regions() and
  // states() no longer include it. Its addresses stay reserved until free(), because the caller still knows them;
  // nobody may touch them. Return the bytes released: 0 if an earlier call or a sleep did that.
  //
  // Precondition: nothing reads or writes there, now or later; this call waits for work on the device. Errors: as
  // free(). If the wait fails, nothing has changed. If the device keeps memory, the region has left its tag all the
  // same, all other regions can be used, and another trim() or free() tries again.
  Result<uint64_t> trim(DeviceAddress address);

  // In each call that changes states, empty `tags` means all tags that exist. kNotFound: a tag does not exist.
  Status begin_save(std::span<const std::string> tags);  // attached -> saving
  // saving -> attached. It allocates nothing, so it can undo a save that failed for lack of memory.
  Status cancel_save(std::span<const std::string> tags);
  // saving or attached -> detached. It first unmaps every region (undone by mapping the same memory, which still holds
  // the content), and only then releases memory. Precondition: device work on the regions is proven done.
  Status detach(std::span<const std::string> tags);
  // detached -> attaching, without memory yet. Accepts tags that cancel_restore() left attaching or restoring.
  Status begin_attach(std::span<const std::string> tags);
  // attaching -> restoring, for one region: new zeroed memory under its old addresses. Nothing happens if the memory is
  // there. The owner may copy into restoring regions while others are still attaching. kResourceExhausted: the error
  // says how many bytes are still to come; the region stays attaching.
  Status attach_region(DeviceAddress address);
  // The next three calls move memory page by page, while other memory is still copied (engine/swap_pages.h). If pages
  // of a saving region were released, cancel_save() refuses the region until all are acquired again; detach() does not.
  //
  // Return the pages of all regions of `tags` that are not attached, in order.
  std::vector<DevicePage> pages_of(std::span<const std::string> tags) const;
  // Release a page of a saving region, with its content. Precondition: device work on it is proven done.
  Status release_page(const DevicePage& page);
  // Map a new zeroed page of a saving or attaching region at its address. Nothing happens if the page is there, as in a
  // region that cancel_restore() left restoring.
  Status acquire_page(const DevicePage& page);
  Status finish_restore(std::span<const std::string> tags);  // restoring -> attached
  Status cancel_restore(
      std::span<const std::string> tags);  // attaching, restoring -> detached; a failure keeps the states

  std::optional<RegionInfo> region_at(DeviceAddress address) const;  // the region that begins there
  std::vector<RegionInfo> regions() const;                           // by tag, then in order of allocation
  std::vector<RegionInfo> regions_of(std::string_view tag) const;
  // Return each tag's state: kAttached if all its regions are attached, kBroken if one is broken.
  std::map<std::string, RegionState> states() const;
  DeviceMemory& device() const { return device_; }

 private:
  struct Region;
  class Hold;
  using Tags = std::set<std::string>;
  explicit SleepAllocator(DeviceMemory& device, SleepAllocatorOptions options);
  // Select the regions of `tags` (empty: all); each must be in one of the `allowed` states. `coming`: skip attached
  // regions of a tag that has sleeping ones: they were allocated meanwhile. In the order in which they were allocated:
  // which one fails, and which one an error names, does not depend on addresses.
  Result<std::vector<Region*>> select(std::span<const std::string> tags, std::initializer_list<RegionState> allowed,
                                      bool coming = false) const;
  uint64_t attaching_bytes() const;  // address space of all regions that are attaching
  // Precondition of the next three: the caller holds the tags of `selected`.
  Status unmap_and_release(const std::vector<Region*>& selected);
  Status unmap_all(const std::vector<Region*>& selected);
  Status release_all(const std::vector<Region*>& selected);
  // Find the region that begins at `address`, in its tag or trimmed. `tag`: the tag that the caller holds; null: any.
  Result<Region*> find(DeviceAddress address, const std::string* tag) const TORPOR_REQUIRES(mutex_);
  // Call `call(region, state)`, which returns a Status or Result, for the region that begins at `address`; hold its tag
  // meanwhile. kNotFound: there is none. kFailedPrecondition: its tag is saving, attaching or restoring.
  template <class Call>
  auto on_region(DeviceAddress address, const Call& call) -> decltype(call(std::declval<Region&>(), RegionState{}));
  template <class Call>
  Status on_page(const DevicePage& page, std::initializer_list<RegionState> allowed, const Call& call);
  void set_state(std::span<Region* const> regions, RegionState state);  // broken regions become kBroken instead
  Status check(std::span<const std::string> tags, std::initializer_list<RegionState> allowed, bool coming = false) const
      TORPOR_REQUIRES(mutex_);
  bool came_asleep(const Region& region) const TORPOR_REQUIRES(mutex_);
  static bool is_of(std::span<const std::string> tags, const Region& region);
  template <class Some>
  bool in_use(const Some& tags) const TORPOR_REQUIRES(mutex_);

  DeviceMemory& device_;
  const SleepAllocatorOptions options_;
  mutable Mutex mutex_;                  // never held while the device works
  CondVar call_ended_;                   // a call has ended
  Tags held_ TORPOR_GUARDED_BY(mutex_);  // tags that calls work on
  bool all_held_ TORPOR_GUARDED_BY(mutex_) = false;
  std::map<DeviceAddress, std::unique_ptr<Region>> regions_ TORPOR_GUARDED_BY(mutex_);
  // Regions that trim() took out of their tags, with the memory that the device did not release.
  std::map<DeviceAddress, std::unique_ptr<Region>> trimmed_ TORPOR_GUARDED_BY(mutex_);
  std::set<std::pair<std::string, std::string>> names_ TORPOR_GUARDED_BY(mutex_);  // tag and name of each of regions_
  uint64_t last_number_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
