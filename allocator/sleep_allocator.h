// SPDX-License-Identifier: Apache-2.0
// SleepAllocator: regions of device memory by tag. Sleep takes the physical memory away and keeps the addresses; wake
// puts fresh memory under the same addresses.
//
// States of a tag (docs/semantics.md): kAttached -> kSaving -> kDetached -> kAttaching -> kRestoring -> kAttached,
// and kBroken. The allocator moves no content: between begin_save() and detach(), and between attach_region() and
// finish_restore(), the owner (engine/rank_memory.h) copies through offload.
//
// Each call is all or nothing over all regions of all its tags: on failure it undoes exactly what it did, in reverse.
// What cannot be undone makes its region kBroken; broken tags are refused afterwards, by name. What is still mapped or
// not released of a broken region is known exactly: free() may be tried again.
//
// Ownership: regions belong to the allocator; callers hold addresses. Threads: all methods are safe from any thread. A
// call that changes something has its tags to itself until it ends, others that want one of them wait; those that only
// look never wait. No lock is held while the device works.
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
bool is_asleep(RegionState state);         // detached, or left on the way by a wake that could not be undone

struct RegionInfo {
  std::string tag;
  std::string name;  // unique within the tag
  DeviceAddress address = 0;
  uint64_t size_bytes = 0;      // as asked for
  uint64_t reserved_bytes = 0;  // rounded up to the granularity
  RegionState state = RegionState::kAttached;
};

struct DevicePage {  // a piece of a region that has physical memory of its own
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
  // `device` outlives the result.
  static Result<std::unique_ptr<SleepAllocator>> create(DeviceMemory& device, SleepAllocatorOptions options = {});
  ~SleepAllocator();  // frees everything; logs what the device would not give up

  // A new zeroed region, attached: also in a tag that is detached, whose other regions come and go without it until all
  // are attached. kInvalidArgument: empty tag or name, size 0, name taken in this tag. kFailedPrecondition: the tag is
  // on its way down or up. kResourceExhausted: no room.
  Result<DeviceAddress> allocate(std::string_view tag, std::string_view name, uint64_t size_bytes);
  // In any state but kSaving, kAttaching and kRestoring. After a failure the rest may be freed by another call.
  Status free(DeviceAddress address);
  // Give back the physical memory of a region of which nothing is in use, and take it out of its tag: no sleep, wake,
  // regions() or states() has it from then on. Its addresses stay reserved until free(), because the caller still knows
  // them; nobody may touch them. Return the bytes given back: 0 if an earlier call, or a sleep, did that.
  // Precondition: nothing reads or writes there, now or later; work on the device is waited for here.
  // Errors: as free(). If the wait fails nothing has changed. If the device keeps memory, the region has left its tag
  // all the same, all other regions can be used, and another trim() or free() tries again.
  Result<uint64_t> trim(DeviceAddress address);

  // `tags` empty: all tags that exist. An unknown tag is kNotFound.
  Status begin_save(std::span<const std::string> tags);  // attached -> saving
  // saving -> attached. Takes no memory, so that it can undo where there is none.
  Status cancel_save(std::span<const std::string> tags);
  // saving or attached -> detached. First every region is unmapped (undone by mapping the same memory, which still
  // holds the content), only then is memory released. Precondition: device work on the regions is proven done.
  Status detach(std::span<const std::string> tags);
  // detached -> attaching, without memory yet. Also of tags that cancel_restore() left attaching or restoring.
  Status begin_attach(std::span<const std::string> tags);
  // attaching -> restoring, of one region: fresh memory, zeroed, under its old addresses. Nothing happens if it is
  // there. Regions may be copied into while others are still to come. kResourceExhausted says how many bytes are
  // still to come; the region is attaching then.
  Status attach_region(DeviceAddress address);
  // Page by page, where memory goes, or comes, while other memory is still copied (engine/swap_pages.h). A region that
  // is saving may have given pages: cancel_save() refuses it until all are taken back, detach() does not.
  std::vector<DevicePage> pages_of(std::span<const std::string> tags) const;  // of such regions, in order
  // Of one that is saving: its memory and content go. Precondition: device work on it is proven done.
  Status give_page(const DevicePage& page);
  // Of one that is saving or attaching: zeroed memory under its address. Nothing happens if it is there, as in one that
  // cancel_restore() left restoring.
  Status take_page(const DevicePage& page);
  Status finish_restore(std::span<const std::string> tags);  // restoring -> attached
  Status cancel_restore(
      std::span<const std::string> tags);  // attaching, restoring -> detached; where that fails, as before

  std::optional<RegionInfo> region_at(DeviceAddress address) const;  // that begins there
  std::vector<RegionInfo> regions() const;                           // by tag, then in order of allocation
  std::vector<RegionInfo> regions_of(std::string_view tag) const;
  // A tag's state: kAttached if all of its regions are; kBroken if one is.
  std::map<std::string, RegionState> states() const;
  DeviceMemory& device() const { return device_; }

 private:
  struct Region;
  class Hold;
  using Tags = std::set<std::string>;
  explicit SleepAllocator(DeviceMemory& device, SleepAllocatorOptions options);
  // Selects the regions of `tags` (empty: all), all of which must be in one of `allowed`. With `coming`, but for
  // attached ones of a tag that has others: they were allocated while those were detached.
  Result<std::vector<Region*>> select(std::span<const std::string> tags, std::initializer_list<RegionState> allowed,
                                      bool coming = false) const;
  uint64_t attaching_bytes() const;  // of address space of all regions that are attaching
  // The caller holds the tags of `selected`.
  Status take_memory(const std::vector<Region*>& selected);
  // The region that begins at `address`, in its tag or trimmed. `tag`: which the caller holds; null: any.
  Result<Region*> find(DeviceAddress address, const std::string* tag) const TORPOR_REQUIRES(mutex_);
  // Call `call(region, state)`, which returns a Status or Result, with the region that begins at `address`; the tag is
  // held meanwhile. kNotFound: there is none. kFailedPrecondition: its tag is saving, attaching or restoring.
  template <class Call>
  auto on_region(DeviceAddress address, const Call& call) -> decltype(call(std::declval<Region&>(), RegionState{}));
  template <class Call>
  Status on_page(const DevicePage& page, std::initializer_list<RegionState> allowed, const Call& call);
  void set_state(std::span<Region* const> regions, RegionState state);  // broken ones are broken
  Status check(std::span<const std::string> tags, std::initializer_list<RegionState> allowed, bool coming = false) const
      TORPOR_REQUIRES(mutex_);
  bool came_asleep(const Region& region) const TORPOR_REQUIRES(mutex_);
  static bool is_of(std::span<const std::string> tags, const Region& region);
  template <class Some>
  bool in_use(const Some& tags) const TORPOR_REQUIRES(mutex_);

  DeviceMemory& device_;
  const SleepAllocatorOptions options_;
  mutable Mutex mutex_;                  // never held while the device works
  CondVar call_ended_;                       // a call has ended
  Tags held_ TORPOR_GUARDED_BY(mutex_);  // by calls that are at work
  bool all_held_ TORPOR_GUARDED_BY(mutex_) = false;
  std::map<DeviceAddress, std::unique_ptr<Region>> regions_ TORPOR_GUARDED_BY(mutex_);
  // trim() took these out of their tags. They have the memory that the device did not let go of.
  std::map<DeviceAddress, std::unique_ptr<Region>> trimmed_ TORPOR_GUARDED_BY(mutex_);
  std::set<std::pair<std::string, std::string>> names_ TORPOR_GUARDED_BY(mutex_);  // tag and name of each of regions_
  uint64_t last_number_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
