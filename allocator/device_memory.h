// SPDX-License-Identifier: Apache-2.0
// DeviceMemory: the interface to GPU memory, about a dozen operations in the form of CUDA's virtual memory management.
//
// reserve() reserves a range of addresses. create() makes physical memory. map() maps it at an address of a reserved
// range, and set_access() allows access. unmap() keeps the addresses reserved and the content with the physical memory.
// Physical memory is gone once it is released and nothing maps it. Sizes and addresses are multiples of granularity().
//
// The public methods check what can be checked (alignment, ranges, known ids, double map, leaks) and are stricter than
// CUDA; the do_* methods do the work. Implementations: HostDevice (no GPU; mmap and mremap), CudaDevice. Contract
// suite: tests/contract/device_memory_contract.h.
//
// Threads: any thread may call any method. Copies on one stream complete in order. A long call (zeroing, a copy of
// pageable memory) delays only calls on the same memory: while a do_* method runs no lock is held, and the memory that
// it works on is marked. do_* methods on different memory run at once.
//
// Failure: a failed call changes nothing, unless its comment says otherwise.
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

enum class Access : uint8_t { kNone, kReadWrite };  // no read-only access: drivers differ on it
enum class Direction : uint8_t { kDeviceToHost, kHostToDevice };
// kEngines: use the copy engines alone, because the device's processors are busy with an engine's steps.
enum class CopyBy : uint8_t { kFastest, kEngines };

struct Copy {
  DeviceAddress device = 0;
  std::byte* host = nullptr;
  uint64_t bytes = 0;
  // If takes_digests(), the call adds the copied bytes to it in the same pass, copy by copy in their order. Read it
  // only after an event behind the copy has completed. Otherwise the call leaves it unchanged.
  StreamingDigest* digest = nullptr;
};

// A copy within the memory of one device.
struct InnerCopy {
  DeviceAddress to = 0;
  DeviceAddress from = 0;
  uint64_t bytes = 0;
};

struct DeviceMemoryInfo {
  uint64_t capacity_bytes = 0;  // 0: the device sets no limit
  uint64_t physical_bytes = 0;  // created and not yet gone
  uint64_t mapped_bytes = 0;
  uint64_t reserved_bytes = 0;
  // Bytes of the device that any process uses, by the device's own count; none if it has no count.
  std::optional<uint64_t> used_bytes;

  // Return the bytes of the capacity that nobody uses; none if the capacity is not known.
  std::optional<uint64_t> free_bytes() const {
    if (capacity_bytes == 0) return std::nullopt;
    return capacity_bytes - std::min(capacity_bytes, std::max(physical_bytes, used_bytes.value_or(0)));
  }
};

// How a wait for device work ended. After kUnproven the work may still run: memory on both sides must not be unmapped,
// reused or freed.
enum class Drain : uint8_t { kCompleted, kDrainedWithError, kUnproven };
struct DrainResult {
  Drain drain = Drain::kCompleted;
  Error error;  // set unless kCompleted
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
  Status free_reservation(DeviceAddress address);  // kFailedPrecondition: something is mapped in it

  Result<PhysicalId> create(uint64_t size);  // content is zero. kResourceExhausted: it is beyond the capacity
  Status release(PhysicalId id);             // the memory is gone when the last mapping is gone

  Status map(DeviceAddress address, PhysicalId id);  // map all of it, without access until set_access()
  Status set_access(DeviceAddress address, uint64_t size, Access access);  // the range must be mapped without gaps
  // Unmap whole mappings. Precondition: work that uses them is proven done. state_changed: a part is unmapped and could
  // not be mapped again. Neither this nor release() allocates host memory, so they cannot fail half-way for lack of it.
  Status unmap(DeviceAddress address, uint64_t size);

  Result<StreamId> create_stream();
  Status destroy_stream(StreamId stream);  // waits for its work
  // Enqueue copies. Host memory must stay valid, and for kDeviceToHost untouched, until an event behind them has
  // completed. The device memory must be mapped with access all that time.
  Status copy_async(StreamId stream, Direction direction, std::span<const Copy> copies, CopyBy by = CopyBy::kFastest);
  // Copy within this device and return when the copies are done. Ranges must be mapped with access all that time.
  // kInvalidArgument: a target overlaps another range. After any other error the content of all targets is undefined.
  // It does not wait for work that was enqueued before: call synchronize().
  Status copy_within(std::span<const InnerCopy> copies);
  Result<EventId> record(StreamId stream);
  DrainResult wait(EventId event);     // consumes the event
  DrainResult drain(StreamId stream);  // waits for all work of the stream; use it if record() or wait() proved nothing

  // Wait for all work on the device, of any origin. Call it before content is read and before memory is released.
  Status synchronize() { return do_synchronize(); }

  // Pin host memory that copies will use, so that they run at the speed of the link. `host` is whole pages; forked
  // children do not get them. kUnavailable: not possible beside the current work; it may be later. After a failed
  // unpin_host() the memory must not be freed. Devices that gain nothing from it do nothing.
  Status pin_host(std::span<std::byte> host) { return do_pin_host(host); }
  Status unpin_host(std::span<std::byte> host) { return do_unpin_host(host); }

  // Return the host's NUMA node to which the device is attached; none if it is not known. Memory for copies is best
  // taken there.
  virtual std::optional<int> host_numa_node() const { return std::nullopt; }

  DeviceMemoryInfo info() const;
  // Return how much of the mapped memory the system has really given, if that is host memory; else none. Takes a
  // millisecond per GiB.
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
    uint64_t copies = 0;  // copies that are being enqueued
  };
  struct Physical {
    uint64_t size = 0;
    uint64_t mappings = 0;
    bool released = false;
    bool busy = false;  // a call works on it, or on a mapping of it
  };
  struct Reservation {
    uint64_t size = 0;
    bool busy = false;
  };
  using MappingAt = std::map<DeviceAddress, Mapping>::iterator;
  using PhysicalAt = std::map<PhysicalId, Physical>::iterator;
  // Mark the mappings that are exactly the range, after waiting for calls that work on them. False: there are none.
  bool take(DeviceAddress address, uint64_t size) TORPOR_REQUIRES(mutex_);
  void give_back(DeviceAddress address, uint64_t size) TORPOR_REQUIRES(mutex_);
  // Call `use` for each mapping that begins in the range; `use` may erase it.
  template <class Use>
  void each_in(DeviceAddress address, uint64_t size, const Use& use) TORPOR_REQUIRES(mutex_) {
    for (auto at = mappings_.lower_bound(address); at != mappings_.end() && at->first < address + size;) use(at++);
  }
  // Find the mappings that the ranges touch. False: another call works on one of them.
  struct Range {
    DeviceAddress address = 0;
    uint64_t bytes = 0;
  };
  Result<bool> find_for_copies(std::span<const Range> ranges, std::vector<MappingAt>& touched) TORPOR_REQUIRES(mutex_);
  // Call `use` while the mappings of these ranges stay as they are.
  template <class Use>
  Status while_mapped(std::span<const Range> ranges, const Use& use);
  void forget_if_gone(PhysicalAt physical) TORPOR_REQUIRES(mutex_);

  mutable Mutex mutex_;  // never held while a do_* method runs
  CondVar changed_;      // a call has ended its work on some memory
  std::map<DeviceAddress, Reservation> reservations_ TORPOR_GUARDED_BY(mutex_);
  std::map<DeviceAddress, Mapping> mappings_ TORPOR_GUARDED_BY(mutex_);
  std::map<PhysicalId, Physical> physical_ TORPOR_GUARDED_BY(mutex_);
  uint64_t physical_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;  // of physical_, and of memory that is being created
};

}  // namespace torpor
