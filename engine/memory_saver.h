// SPDX-License-Identifier: Apache-2.0
// MemorySaver: sleep and wake for programs that have no controller: an allocator below torch, with tags. It has one
// RankMemory for each device in use, and makes it at the first use.
//
// Each thread has a stack of scopes. An allocation gets the tag of the innermost scope. The scope also says whether a
// sleep saves the content; one tag may have both kinds of memory. bindings/memory_c_api.h is the C ABI of this class.
//
// Each sleep and wake of a device emits the events of an operation, and the memory of the device after it
// (RankMemoryOptions::events).
//
// Threads: any. Failure: errors are values. In a child that was forked after the first memory was made, every call that
// returns a Status or a Result is kFailedPrecondition, and the others do nothing. None waits for a lock there: a thread
// that the child does not have may have held it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
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
    bool keep = true;      // a sleep saves the content; else the memory comes back without content
    bool active = true;    // false: allocations fail here, as they should not be torpor's
    bool on_disk = false;  // a backup on disk, which is not offered: allocations fail, too
    bool engine = false;   // the tag is an engine's that shares this memory with its program
  };
  using MakeMemory = std::function<Result<std::unique_ptr<RankMemory>>(int ordinal)>;

  // `make_memory` is called once for each device ordinal.
  explicit MemorySaver(MakeMemory make_memory);
  ~MemorySaver();

  static std::vector<Scope>& scopes();  // of this thread; empty: the default scope applies
  // kFailedPrecondition: the tag of the scope has memory of an engine, and the scope is the program's, or the other way
  // round.
  Status check_owner(const Scope& scope) const;
  std::set<std::string> engine_tags() const;  // with and without memory

  Result<DeviceAddress> allocate(int device, uint64_t bytes);  // in the current scope
  // Free an allocation of this device.
  Status free(int device, DeviceAddress address);
  // The same for a caller that cannot try again: if it fails now, a later free, sleep or wake frees it.
  Status free_soon(int device, DeviceAddress address);
  // Give the memory of unused allocations back to the device. Their addresses stay reserved until free(), and must not
  // be touched. Return the bytes given back. A failure is logged and leaves the allocation as it was; the next call
  // tries again. Addresses that were not allocated here, or whose tag is falling asleep or waking, are ignored.
  uint64_t trim(int device, std::span<const DeviceAddress> addresses);
  // From now on fail every allocation that would leave less than `bytes` free on its device, where the free memory is
  // known.
  void set_margin(uint64_t bytes);
  // Read saved bytes of memory that sleeps. kNotFound: nothing is saved of it.
  Status read_saved(DeviceAddress address, std::span<std::byte> out) const;
  // Return the memory of this device, for a controller above it. It lives as long as this object. The first call, or
  // the first allocation there, makes it, with `make` if that is given.
  Result<RankMemory*> memory_of(int device, const MakeMemory& make = {});
  // Put these tags to sleep on every device that has them. `tags` empty: all that are awake but for an engine's, which
  // would not know of it. The calls below leave those alone, too. `keep`: the tags whose content is saved; none: as
  // their scopes said. A device that fails undoes its own sleep. Devices that slept before it stay asleep; a retry goes
  // on from there.
  Result<TagMove> sleep(const std::vector<std::string>& tags, const std::optional<std::vector<std::string>>& keep = {},
                        CleanCheck clean = CleanCheck::kTrust);
  // Wake these tags on every device that has them. `tags` empty: all that are asleep. Failures: as sleep().
  Result<TagMove> wake(const std::vector<std::string>& tags);
  // Return what the same calls would move. Nothing changes.
  Result<TagMove> plan_sleep(const std::vector<std::string>& tags,
                             const std::optional<std::vector<std::string>>& keep = {});
  Result<TagMove> plan_wake(const std::vector<std::string>& tags);
  void mark_dirty(const std::vector<std::string>& tags);  // `tags` empty: all
  // Return the ledgers by device ordinal. They have the state of each tag.
  Result<std::map<int, RankLedger>> ledgers() const;
  // Call RankMemory::end_prefault() of each device. No other thread may allocate, sleep or wake meanwhile.
  void end_prefault() noexcept;

 private:
  struct Device {
    std::unique_ptr<RankMemory> memory;
    uint64_t allocations = 0;  // made so far; the number names the next one
  };
  Status same_process() const;
  Result<RankMemory*> find_or_make(int device, const MakeMemory& make) TORPOR_REQUIRES(mutex_);
  Result<RankMemory*> find(int device) const TORPOR_REQUIRES(mutex_);
  void free_left() TORPOR_REQUIRES(mutex_);  // what free_soon() left
  Status is_owner(const Scope& scope) const TORPOR_REQUIRES(mutex_);
  bool is_left_out(const std::vector<std::string>& tags, const std::string& name) const TORPOR_REQUIRES(mutex_);
  static std::vector<std::string> kept(const std::vector<std::string>& tags,
                                       const std::optional<std::vector<std::string>>& keep);
  // Do `work` on each device with those of its tags that are in the state `wanted`. `operation`: its name in events;
  // empty: emit none.
  Result<TagMove> each(std::string_view operation, const std::vector<std::string>& tags, RegionState wanted,
                       const std::function<Result<TagMove>(RankMemory&, const std::vector<std::string>&)>& work)
      TORPOR_REQUIRES(mutex_);

  const MakeMemory make_memory_;
  std::atomic<int64_t> process_ = 0;  // id of the process that made the first memory; 0: none was made
  mutable Mutex mutex_;
  std::map<int, Device> devices_ TORPOR_GUARDED_BY(mutex_);
  std::set<std::string> engine_tags_ TORPOR_GUARDED_BY(mutex_);
  uint64_t margin_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
