// SPDX-License-Identifier: Apache-2.0
// MemorySaver: the memory of one process for programs that have no controller: an allocator below torch, tags, sleep
// and wake. One RankMemory for each device in use, made when it is first asked for.
//
// Each thread has a stack of scopes; what it allocates belongs to the tag of the innermost one. A tag's memory is kept
// over a sleep or not, as its scope said; the same tag may have both kinds. The C ABI over this:
// bindings/memory_c_api.h.
//
// Each sleep and wake of a device is told as an operation, with what the device has then (RankMemoryOptions::events).
//
// Threads: any. After a fork the child is refused by name.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/rank_memory.h"
#include "engine/tag_sleep.h"

namespace torpor {

class MemorySaver {
 public:
  struct Scope {
    std::string tag = "default";
    bool keep = true;      // over a sleep; else the memory comes back without content
    bool active = true;    // false: allocations fail here; they are not to be torpor's
    bool on_disk = false;  // wanted for the backup, and not offered: allocations fail, too
  };
  using MakeMemory = std::function<Result<std::unique_ptr<RankMemory>>(int ordinal)>;

  // `make_memory` is asked once for the device of each ordinal.
  explicit MemorySaver(MakeMemory make_memory);
  ~MemorySaver();

  static std::vector<Scope>& scopes();  // of this thread; empty: the default scope

  Result<DeviceAddress> allocate(int device, uint64_t bytes);  // in the present scope
  Status free(int device, DeviceAddress address);
  // Give the memory of allocations of which nothing is in use back to the device; their addresses stay taken until
  // free(). Nobody may touch them. Return the bytes given back. What fails is logged, and stays as usable as it was:
  // the next call tries again. Nothing happens to addresses that were not allocated here, or while their tag moves.
  uint64_t trim(int device, std::span<const DeviceAddress> addresses);
  // From now on an allocation fails that would leave less than this free on its device, where that is known.
  void set_margin(uint64_t bytes);
  // What is saved of memory that sleeps. kNotFound: nothing is.
  Status read_saved(DeviceAddress address, std::span<std::byte> out) const;
  // The memory of this device, for a controller above it; lives as long as this object. The first who asks for it, or
  // allocates there, makes it: `make`, if it is given, instead of what the constructor got.
  Result<RankMemory*> memory_of(int device, const MakeMemory& make = {});
  // `tags` empty: all that are awake, or asleep. On every device that has them. `keep`: of which tags the content is
  // saved; none: as their scopes said. A device that fails has undone itself; those before it stay as they then are,
  // and a retry goes on from there.
  Result<TagMove> sleep(const std::vector<std::string>& tags, const std::optional<std::vector<std::string>>& keep = {},
                        CleanCheck clean = CleanCheck::kTrust);
  Result<TagMove> wake(const std::vector<std::string>& tags);
  Result<TagMove> plan_sleep(const std::vector<std::string>& tags,
                             const std::optional<std::vector<std::string>>& keep = {});
  Result<TagMove> plan_wake(const std::vector<std::string>& tags);
  void mark_dirty(const std::vector<std::string>& tags);  // empty: all
  std::map<int, RankLedger> ledgers() const;              // of each device; states by tag in it
  void end_prefault() noexcept;  // RankMemory's, of each device; not while another thread allocates, sleeps or wakes

 private:
  struct Device {
    std::unique_ptr<RankMemory> memory;
    uint64_t allocations = 0;  // so far; names them
  };
  Result<RankMemory*> find_or_make(int device, const MakeMemory& make) TORPOR_REQUIRES(mutex_);
  static std::vector<std::string> kept(const std::vector<std::string>& tags,
                                       const std::optional<std::vector<std::string>>& keep);
  // `operation`: as it is told; empty: it only looks.
  Result<TagMove> each(std::string_view operation, const std::vector<std::string>& tags, RegionState wanted,
                       const std::function<Result<TagMove>(RankMemory&, const std::vector<std::string>&)>& work)
      TORPOR_REQUIRES(mutex_);

  const MakeMemory make_memory_;
  mutable Mutex mutex_;
  std::map<int, Device> devices_ TORPOR_GUARDED_BY(mutex_);
  uint64_t margin_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
