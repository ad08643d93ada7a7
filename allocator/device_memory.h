// SPDX-License-Identifier: Apache-2.0
// DeviceMemory: the seam to GPU memory, about a dozen verbs in the shape of CUDA's virtual memory management.
//
// A range of addresses is reserved; physical memory is created; physical memory is mapped at an address of a reserved
// range and access is set; unmapping keeps the addresses reserved and the content with the physical memory; physical
// memory is gone once it is released and nothing maps it. Sizes and addresses are multiples of granularity().
//
// The public methods check what can be checked (alignment, ranges, known ids, double map, leaks) and are stricter than
// CUDA; the do_* methods do the work. Implementations: HostDevice (no GPU; mmap and mremap), CudaDevice. Contract
// suite: tests/contract/device_memory_contract.h.
//
// Threads: all methods may be called from any thread. Copies on one stream complete in order. A call that takes its
// time (zeroing, a copy of pageable memory) holds up only calls about the same memory: no lock is held while a do_*
// method runs, what it works on is marked. do_* methods of different memory run at once.
// Failure: a failed call changes nothing, except where it says otherwise.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "base/mutex.h"
#include "base/status.h"

namespace torpor {

using DeviceAddress = uint64_t;
enum class PhysicalId : uint64_t {};
enum class StreamId : uint64_t {};
enum class EventId : uint64_t {};

enum class Access : uint8_t { kNone, kReadWrite };  // drivers differ on memory that can only be read
enum class Direction : uint8_t { kDeviceToHost, kHostToDevice };
// kEngines: by the copy engines alone, for the device's processors are at work for an engine's steps.
enum class CopyBy : uint8_t { kFastest, kEngines };

struct Copy {
  DeviceAddress device = 0;
  std::byte* host = nullptr;
  uint64_t bytes = 0;
  // Where takes_digests(): the copied bytes are added to it in the same pass, copies of one call in their order. Read
  // it only after an event behind the copy completed. Otherwise it stays as it is.
  StreamingDigest* digest = nullptr;
};

// Within the memory of one device.
struct InnerCopy {
  DeviceAddress to = 0;
  DeviceAddress from = 0;
  uint64_t bytes = 0;
};

struct DeviceMemoryInfo {
  uint64_t capacity_bytes = 0;  // 0: not limited by this device
  uint64_t physical_bytes = 0;  // created and not yet gone
  uint64_t mapped_bytes = 0;
  uint64_t reserved_bytes = 0;
  // Of all memory of the device in use by anybody, by the device's own count; none where it keeps none.
  std::optional<uint64_t> used_bytes;

  // Return the bytes of the capacity that nobody uses; none if the capacity is not known.
  std::optional<uint64_t> free_bytes() const {
    if (capacity_bytes == 0) return std::nullopt;
    return capacity_bytes - std::min(capacity_bytes, std::max(physical_bytes, used_bytes.value_or(0)));
  }
};

// How a wait for device work ended. After kUnproven the work may still be running: memory
// on both sides must not be unmapped, reused or freed.
enum class Drain : uint8_t { kCompleted, kDrainedWithError, kUnproven };
struct DrainResult {
  Drain drain = Drain::kCompleted;
  Error error;  // meaningful unless kCompleted
};

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  virtual std::string_view kind() const = 0;  // "host", "cuda:0"
  virtual uint64_t granularity() const = 0;   // bytes, a power of two
  virtual bool takes_digests() const { return false; }

  Result<DeviceAddress> reserve(uint64_t size);
  Status free_reservation(DeviceAddress address);  // kFailedPrecondition while something is mapped in it

  Result<PhysicalId> create(uint64_t size);  // kResourceExhausted beyond the capacity; content is zero
  Status release(PhysicalId id);             // the memory goes when the last mapping goes

  Status map(DeviceAddress address, PhysicalId id);  // whole physical memory; no access until set_access
  Status set_access(DeviceAddress address, uint64_t size, Access access);  // the range must be mapped without gaps
  // Whole mappings only; the caller has proven that work is done. state_changed: a part is unmapped and could not be
  // mapped again. Neither this nor release() takes memory of the process: for want of it nothing stays half done.
  Status unmap(DeviceAddress address, uint64_t size);

  Result<StreamId> create_stream();
  Status destroy_stream(StreamId stream);  // waits for its work
  // Enqueues copies. Host memory must stay valid and, for kDeviceToHost, untouched until an event after them completed.
  // The device side must be mapped with access for the whole time.
  Status copy_async(StreamId stream, Direction direction, std::span<const Copy> copies, CopyBy by = CopyBy::kFastest);
  // Copies from one place of this device to another, and returns when that is over. The ranges are mapped with access
  // for the whole time, and no target overlaps another range: kInvalidArgument. After another error the content of all
  // targets is void. Work that was given before is not waited for: synchronize().
  Status copy_within(std::span<const InnerCopy> copies);
  Result<EventId> record(StreamId stream);
  DrainResult wait(EventId event);     // consumes the event
  DrainResult drain(StreamId stream);  // waits for all work of the stream; where record() or wait() proved nothing

  // Waits for all work on the device, whoever gave it: before content is read, and before memory goes.
  Status synchronize() { return do_synchronize(); }

  // Tells the device about host memory that copies will use, so that they run at the speed of the link. `host` is whole
  // pages, which forked children do not get. kUnavailable: not beside what goes on now; it may work later. After a
  // failed unpin_host() the memory must not be freed. Devices that gain nothing from it do nothing.
  Status pin_host(std::span<std::byte> host) { return do_pin_host(host); }
  Status unpin_host(std::span<std::byte> host) { return do_unpin_host(host); }

  // The host's NUMA node that the device is attached to, where it knows one: memory for copies is best taken there.
  virtual std::optional<int> host_numa_node() const { return std::nullopt; }

  DeviceMemoryInfo info() const;
  // Where mapped memory is the host's own: how much of it the system has really given. Takes a millisecond a GiB.
  virtual std::optional<uint64_t> resident_bytes() const { return std::nullopt; }

 protected:
  DeviceMemory() = default;
  virtual Result<DeviceAddress> do_reserve(uint64_t size) = 0;
  virtual Status do_free_reservation(DeviceAddress address, uint64_t size) = 0;
  virtual Result<PhysicalId> do_create(uint64_t size) = 0;
  virtual Status do_release(PhysicalId id) = 0;
  virtual Status do_map(DeviceAddress address, PhysicalId id, uint64_t size) = 0;
  virtual Status do_set_access(DeviceAddress address, uint64_t size, Access access) = 0;
  virtual Status do_unmap(DeviceAddress address, uint64_t size) = 0;
  virtual Result<StreamId> do_create_stream() = 0;
  virtual Status do_destroy_stream(StreamId stream) = 0;
  virtual Status do_copy_async(StreamId stream, Direction direction, std::span<const Copy> copies, CopyBy by) = 0;
  virtual Status do_copy_within(std::span<const InnerCopy> copies) = 0;
  virtual Result<EventId> do_record(StreamId stream) = 0;
  virtual DrainResult do_wait(EventId event) = 0;
  virtual DrainResult do_drain(StreamId stream) = 0;
  virtual Status do_synchronize() { return ok(); }
  virtual Status do_pin_host(std::span<std::byte>) { return ok(); }
  virtual Status do_unpin_host(std::span<std::byte>) { return ok(); }
  virtual uint64_t capacity_bytes() const = 0;
  virtual std::optional<uint64_t> used_bytes() const { return std::nullopt; }

 private:
  struct Mapping {
    PhysicalId id{};
    uint64_t size = 0;
    Access access = Access::kNone;
    uint64_t copies = 0;  // being given to the device
  };
  struct Physical {
    uint64_t size = 0;
    uint64_t mappings = 0;
    bool released = false;
    bool busy = false;  // a call is at work on it, or on a mapping of it
  };
  struct Reservation {
    uint64_t size = 0;
    bool busy = false;
  };
  using MappingAt = std::map<DeviceAddress, Mapping>::iterator;
  using PhysicalAt = std::map<PhysicalId, Physical>::iterator;
  // Marks the mappings that are exactly the range; waits for calls that are at work on them. False: there are none.
  bool take(DeviceAddress address, uint64_t size) TORPOR_REQUIRES(mutex_);
  void give_back(DeviceAddress address, uint64_t size) TORPOR_REQUIRES(mutex_);
  // Calls `use` for each mapping that begins in the range; `use` may take it away.
  template <class Use>
  void each_in(DeviceAddress address, uint64_t size, const Use& use) TORPOR_REQUIRES(mutex_) {
    for (auto at = mappings_.lower_bound(address); at != mappings_.end() && at->first < address + size;) use(at++);
  }
  // The mappings that these ranges touch; false: another call is at work on one of them.
  struct Range {
    DeviceAddress address = 0;
    uint64_t bytes = 0;
  };
  Result<bool> find_for_copies(std::span<const Range> ranges, std::vector<MappingAt>& touched) TORPOR_REQUIRES(mutex_);
  // Calls `use` while the mappings of these ranges stay as they are.
  template <class Use>
  Status while_mapped(std::span<const Range> ranges, const Use& use);
  void forget_if_gone(PhysicalAt physical) TORPOR_REQUIRES(mutex_);

  mutable Mutex mutex_;  // never held while a do_* method runs
  CondVar changed_;      // a call has ended its work on something
  std::map<DeviceAddress, Reservation> reservations_ TORPOR_GUARDED_BY(mutex_);
  std::map<DeviceAddress, Mapping> mappings_ TORPOR_GUARDED_BY(mutex_);
  std::map<PhysicalId, Physical> physical_ TORPOR_GUARDED_BY(mutex_);
  uint64_t physical_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;  // of physical_, and being created
};

}  // namespace torpor
