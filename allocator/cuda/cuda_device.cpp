// SPDX-License-Identifier: Apache-2.0
#include "allocator/cuda/cuda_device.h"

#include <atomic>
#include <map>
#include <optional>

#include <fmt/core.h>

#include "allocator/cuda/context.h"
#include "allocator/cuda/driver.h"
#include "allocator/cuda/host_copies.h"
#include "allocator/cuda/streams.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/units.h"

namespace torpor {
namespace {

class CudaDevice final : public DeviceMemory {
 public:
  CudaDevice(const CudaDriver& driver, CUdevice device, CUcontext context, const CudaDeviceOptions& options)
      : driver_(driver),
        device_(device),
        context_(context),
        kind_(fmt::format("cuda:{}", options.ordinal)),
        copies_(driver, kind_, options.pin_step_bytes),
        streams_(driver, context, kind_) {}

  ~CudaDevice() override {
    {
      const Current current(driver_, context_);
      const bool idle = streams_.end_all();
      if (zeroing_ != nullptr) (void)streams_.end(zeroing_);
      if (idle) copies_.unload();
    }
    const DeviceMemoryInfo left = info();
    if (left.mapped_bytes != 0 || left.physical_bytes != 0 || left.reserved_bytes != 0) {
      log().error("{} closed with {} bytes mapped, {} created, {} reserved", kind_, left.mapped_bytes,
                  left.physical_bytes, left.reserved_bytes);
    }
    (void)twice([&] { return driver_.cuDevicePrimaryCtxRelease(device_); });
  }

  Status start(const CudaDeviceOptions& options, CudaDeviceInfo& info) {
    TORPOR_CUDA_CURRENT();
    char name[256] = {};
    TORPOR_CUDA_TRY(driver_.cuDeviceGetName(name, sizeof name - 1, device_), "reading the name of {}", kind_);
    info.name = name;
    TORPOR_CUDA_TRY(driver_.cuDriverGetVersion(&info.driver_version), "reading the driver's version");
    TORPOR_ASSIGN_OR_RETURN(info.batched_copies, copies_.find_batches(device_));
    int managed = 0;
    TORPOR_CUDA_TRY(
        driver_.cuDeviceGetAttribute(&managed, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_),
        "asking {} for virtual memory management", kind_);
    if (managed == 0) {
      return Error{.code = Code::kUnsupported,
                   .what = fmt::format("{} ({}) has no virtual memory management", kind_, info.name),
                   .next_step = "use a GPU and a driver that have it",
                   .origin = Origin::kDevice};
    }
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device_};
    const auto has = [&](CUdevice_attribute attribute, std::optional<bool> wanted, std::string_view what) {
      int there = 0;
      if (wanted == false) return false;
      if (driver_.cuDeviceGetAttribute(&there, attribute, device_) == CUDA_SUCCESS && there != 0) return true;
      if (!wanted) return false;
      info.notes.push_back(fmt::format("{} has no {}: its memory is made without", kind_, what));
      log().warn("{}", info.notes.back());
      return false;
    };
    if (has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, options.rdma,
            "GPUDirect RDMA for such memory"))
      properties_.allocFlags.gpuDirectRDMACapable = 1;
    if (has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, options.exportable,
            "memory that can be exported as a file descriptor")) {
      properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    }
    int node = -1;  // a machine without NUMA, or a driver before CUDA 12.2, leaves it so
    if (driver_.cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device_) == CUDA_SUCCESS && node >= 0)
      host_numa_node_ = node;
    size_t granularity = 0;
    TORPOR_CUDA_TRY(driver_.cuMemGetAllocationGranularity(&granularity, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                    "asking {} for its granularity", kind_);
    granularity_ = granularity;
    size_t free = 0;
    size_t total = 0;
    TORPOR_CUDA_TRY(driver_.cuMemGetInfo(&free, &total), "asking {} for its size", kind_);
    capacity_ = total;
    TORPOR_CUDA_TRY(driver_.cuStreamCreate(&zeroing_, CU_STREAM_NON_BLOCKING), "creating a stream on {}", kind_);
    const uint64_t gather_below = options.gather_below_bytes.value_or(CudaDeviceOptions::kGatherBelowBytes);
    if (gather_below > 0) {
      const Status loaded = copies_.load_gather(info.driver_version, options.gather_image, gather_below);
      info.gathers = loaded.has_value();
      if (!loaded) {
        info.notes.push_back(
            fmt::format("{} copies small pieces by its copy engines: {}", kind_, loaded.error().to_string()));
        if (options.gather_below_bytes) log().warn("{}", info.notes.back());
      }
    }
    return ok();
  }

  std::string_view kind() const override { return kind_; }
  uint64_t granularity() const override { return granularity_; }
  std::optional<int> host_numa_node() const override { return host_numa_node_; }

 protected:
  uint64_t capacity_bytes() const override { return capacity_; }

  std::optional<uint64_t> used_bytes() const override {
    const Current current(driver_, context_);
    size_t free = 0;
    size_t total = 0;
    if (current.result() != CUDA_SUCCESS || driver_.cuMemGetInfo(&free, &total) != CUDA_SUCCESS) return std::nullopt;
    return total - free;
  }

  Result<DeviceAddress> do_reserve(uint64_t size) override {
    TORPOR_CUDA_CURRENT();
    CUdeviceptr address = 0;
    TORPOR_CUDA_TRY(driver_.cuMemAddressReserve(&address, size, 0, 0, 0), "reserving {} bytes of addresses on {}", size,
                    kind_);
    return static_cast<DeviceAddress>(address);
  }

  Status do_free_reservation(DeviceAddress address, uint64_t size) override {
    TORPOR_CUDA_CURRENT();
    TORPOR_CUDA_TRY(twice([&] { return driver_.cuMemAddressFree(address, size); }),
                    "freeing the addresses at {:#x} on {}", address, kind_);
    return ok();
  }

  Result<PhysicalId> do_create(uint64_t size) override {
    TORPOR_CUDA_CURRENT();
    std::map<PhysicalId, Handle> made;
    const auto id = static_cast<PhysicalId>(++last_id_);
    Handle& handle = made[id];
    TORPOR_CUDA_TRY(driver_.cuMemCreate(&handle.handle, size, &properties_, 0), "creating {} bytes on {}", size, kind_);
    const MutexLock lock(mutex_);
    handles_.merge(made);
    return id;
  }

  Status do_release(PhysicalId id) override {
    TORPOR_CUDA_CURRENT();
    const Handle handle = handle_of(id);
    TORPOR_CUDA_TRY(twice([&] { return driver_.cuMemRelease(handle.handle); }), "releasing physical memory of {}",
                    kind_);
    const MutexLock lock(mutex_);
    const auto found = handles_.find(id);
    found->second.released = true;
    if (found->second.mappings == 0) handles_.erase(found);
    return ok();
  }

  Status do_map(DeviceAddress address, PhysicalId id, uint64_t size) override {
    TORPOR_CUDA_CURRENT();
    std::map<DeviceAddress, Mapped> made{{address, Mapped{.id = id, .size = size}}};
    TORPOR_CUDA_TRY(driver_.cuMemMap(address, size, 0, handle_of(id).handle, 0), "mapping {} bytes at {:#x} on {}",
                    size, address, kind_);
    const MutexLock lock(mutex_);
    mapped_.merge(made);
    ++handles_.at(id).mappings;
    return ok();
  }

  Status do_set_access(DeviceAddress address, uint64_t size, Access access) override {
    TORPOR_CUDA_CURRENT();
    TORPOR_RETURN_IF_ERROR(grant(address, size, access));
    if (access == Access::kReadWrite) {
      if (Status zeroed = zero_fresh(address, size); !zeroed) {
        if (zeroing_unproven_ == 0)
          (void)grant(address, size, Access::kNone);  // a caller that ignores the error has no access
        return zeroed;
      }
    }
    const MutexLock lock(mutex_);
    for (auto at = mapped_.find(address); at != mapped_.end() && at->first < address + size; ++at)
      at->second.access = access;
    return ok();
  }

  // Unmap each mapping by itself: the driver guarantees no more.
  Status do_unmap(DeviceAddress address, uint64_t size) override {
    TORPOR_CUDA_CURRENT();
    if (uint64_t unproven = zeroing_unproven_; unproven != 0) {
      if (const DrainResult drained = streams_.empty(zeroing_); drained.drain != Drain::kCompleted)
        return drained.error.within("zeroing may still run");
      zeroing_unproven_.compare_exchange_strong(unproven, 0);  // zeroing that became unproven meanwhile stays so
    }
    const DeviceAddress end = address + size;
    for (Piece piece = next_piece(address, end); piece.mapping != nullptr; piece = next_piece(piece.end(), end)) {
      if (piece.mapping->gone) continue;
      const CUresult result = twice([&] { return driver_.cuMemUnmap(piece.address, piece.size); });
      if (result == CUDA_SUCCESS) {
        piece.mapping->gone = true;
        continue;
      }
      Error error{
          .code = Code::kDevice, .what = "no unmapping", .origin = Origin::kDevice};  // stays if there is no memory
      for (Piece undone = next_piece(address, piece.address); undone.mapping != nullptr;
           undone = next_piece(undone.end(), piece.address)) {
        if (!put_back(undone.address, *undone.mapping)) error.state_changed = true;
      }
      (void)try_catch([&] {
        const bool changed = error.state_changed;
        error = cuda_error(driver_, result,
                           fmt::format("unmapping {} bytes at {:#x} on {}", piece.size, piece.address, kind_));
        error.state_changed = changed;
        return ok();
      });
      return error;
    }
    for (Piece piece = next_piece(address, end); piece.mapping != nullptr; piece = next_piece(piece.end(), end)) {
      const MutexLock lock(mutex_);
      const auto handle = handles_.find(piece.mapping->id);
      if (--handle->second.mappings == 0 && handle->second.released) handles_.erase(handle);
      mapped_.erase(piece.address);
    }
    return ok();
  }

  Result<StreamId> do_create_stream() override {
    TORPOR_CUDA_CURRENT();
    return streams_.create();
  }

  Status do_destroy_stream(StreamId id) override {
    TORPOR_CUDA_CURRENT();
    return streams_.destroy(id);
  }

  Status do_copy_async(StreamId id, Direction direction, std::span<const Copy> wanted, CopyBy by) override {
    TORPOR_CUDA_CURRENT();
    const CUstream stream = streams_.find(id);
    if (stream == nullptr) return unknown_id("stream", static_cast<uint64_t>(id));
    return copies_.begin(stream, direction, wanted, by);
  }

  // If a copy may still run after a failed wait, its stream stays, and end_all() reports it.
  Status do_copy_within(std::span<const InnerCopy> copies) override {
    TORPOR_CUDA_CURRENT();
    TORPOR_ASSIGN_OR_RETURN(const StreamId id, streams_.create());
    const CUstream stream = streams_.find(id);
    Status done;
    for (size_t i = 0; i < copies.size() && done; ++i) {
      const InnerCopy& copy = copies[i];
      if (const CUresult result = driver_.cuMemcpyDtoDAsync(copy.to, copy.from, copy.bytes, stream);
          result != CUDA_SUCCESS) {
        done = cuda_error(driver_, result, fmt::format("copying {} bytes within {}", copy.bytes, kind_));
      }
    }
    if (const DrainResult drained = streams_.drain(id); done && drained.drain != Drain::kCompleted)
      done = drained.error;
    if (Status destroyed = streams_.destroy(id); done) done = std::move(destroyed);
    return done;
  }

  Result<EventId> do_record(StreamId id) override {
    TORPOR_CUDA_CURRENT();
    return streams_.record(id);
  }

  DrainResult do_wait(EventId id) override { return streams_.wait(id); }

  DrainResult do_drain(StreamId id) override { return streams_.drain(id); }

  Status do_synchronize() override {
    TORPOR_CUDA_CURRENT();
    TORPOR_CUDA_TRY(driver_.cuCtxSynchronize(), "waiting for all work on {}", kind_);
    return ok();
  }

  Status do_pin_host(std::span<std::byte> host) override {
    TORPOR_CUDA_CURRENT();
    return copies_.pin(host);
  }

  Status do_unpin_host(std::span<std::byte> host) override {
    TORPOR_CUDA_CURRENT();
    return copies_.unpin(host);
  }

 private:
  struct Handle {
    CUmemGenericAllocationHandle handle = 0;
    uint64_t mappings = 0;
    bool released = false;
    bool fresh = true;  // never written by torpor: its bytes may be another process's
  };
  struct Mapped {
    PhysicalId id{};
    uint64_t size = 0;
    Access access = Access::kNone;
    bool gone = false;  // a failed call unmapped it and could not map it again
  };
  struct Piece {
    DeviceAddress address = 0;
    uint64_t size = 0;
    Mapped* mapping = nullptr;  // only the caller works on it
    DeviceAddress end() const { return address + size; }
  };
  // Return the first mapping in the range; if there is none, `mapping` is null.
  Piece next_piece(DeviceAddress from, DeviceAddress to) {
    const MutexLock lock(mutex_);
    const auto at = mapped_.lower_bound(from);
    if (at == mapped_.end() || at->first >= to) return {};
    return {at->first, at->second.size, &at->second};
  }

  Handle handle_of(PhysicalId id) {
    const MutexLock lock(mutex_);
    return handles_.at(id);
  }

  // Map memory again that this call or an earlier one unmapped. False: it cannot be used any more.
  bool put_back(DeviceAddress address, Mapped& mapping) {
    const Handle handle = handle_of(mapping.id);
    if (handle.released || driver_.cuMemMap(address, mapping.size, 0, handle.handle, 0) != CUDA_SUCCESS) return false;
    mapping.gone = false;
    return grant(address, mapping.size, mapping.access).has_value();
  }

  Status grant(DeviceAddress address, uint64_t size, Access access) {
    CUmemAccessDesc description{};
    description.location = properties_.location;
    description.flags =
        access == Access::kReadWrite ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    TORPOR_CUDA_TRY(driver_.cuMemSetAccess(address, size, &description, 1), "setting access to {} bytes at {:#x} on {}",
                    size, address, kind_);
    return ok();
  }

  Status zero_fresh(DeviceAddress address, uint64_t size) {
    const auto proven = [this](CUresult result) -> Status {
      if (result == CUDA_SUCCESS) return ok();
      if (streams_.empty(zeroing_).drain != Drain::kCompleted) zeroing_unproven_ = ++last_id_;
      return cuda_error(driver_, result, fmt::format("zeroing memory of {}", kind_));
    };
    std::vector<std::pair<DeviceAddress, Mapped>> fresh;
    {
      const MutexLock lock(mutex_);
      for (auto at = mapped_.find(address); at != mapped_.end() && at->first < address + size; ++at) {
        if (handles_.at(at->second.id).fresh) fresh.emplace_back(*at);
      }
    }
    if (fresh.empty()) return ok();
    for (const auto& [at, mapping] : fresh)
      TORPOR_RETURN_IF_ERROR(proven(driver_.cuMemsetD8Async(at, 0, mapping.size, zeroing_)));
    TORPOR_RETURN_IF_ERROR(proven(driver_.cuStreamSynchronize(zeroing_)));
    const MutexLock lock(mutex_);
    for (const auto& [at, mapping] : fresh) handles_.at(mapping.id).fresh = false;
    return ok();
  }

  const CudaDriver& driver_;
  const CUdevice device_;
  const CUcontext context_;  // retained
  const std::string kind_;
  HostCopies copies_;
  CudaStreams streams_;
  CUmemAllocationProp properties_{};
  uint64_t granularity_ = 0;
  uint64_t capacity_ = 0;
  std::optional<int> host_numa_node_;
  CUstream zeroing_ = nullptr;
  // Not 0: zeroing may still run; unmap nothing until it is proven over. Each such zeroing has its own number.
  std::atomic<uint64_t> zeroing_unproven_ = 0;
  std::atomic<uint64_t> last_id_ = 0;
  Mutex mutex_;  // never held while the driver is called
  // DeviceMemory lets only one call at a time work on an entry of these two.
  std::map<PhysicalId, Handle> handles_ TORPOR_GUARDED_BY(mutex_);
  std::map<DeviceAddress, Mapped> mapped_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace

bool built_with_cuda() { return true; }

Result<std::unique_ptr<DeviceMemory>> make_cuda_device(CudaDeviceOptions options, CudaDeviceInfo* info) {
  TORPOR_ASSIGN_OR_RETURN(const CudaDriver* const driver, cuda_driver());
  return make_cuda_device(*driver, options, info);
}

Result<std::unique_ptr<DeviceMemory>> make_cuda_device(const CudaDriver& driver, CudaDeviceOptions options,
                                                       CudaDeviceInfo* info) {
  int devices = 0;
  if (const CUresult result = driver.cuDeviceGetCount(&devices); result != CUDA_SUCCESS)
    return cuda_error(driver, result, "counting GPUs");
  if (options.ordinal < 0 || options.ordinal >= devices) {
    return Error{.code = Code::kUnsupported,
                 .what = fmt::format("there is no GPU {}, the driver shows {}", options.ordinal, devices),
                 .next_step = "see nvidia-smi and CUDA_VISIBLE_DEVICES",
                 .origin = Origin::kDevice};
  }
  CUdevice device = 0;
  if (const CUresult result = driver.cuDeviceGet(&device, options.ordinal); result != CUDA_SUCCESS)
    return cuda_error(driver, result, fmt::format("opening GPU {}", options.ordinal));
  CUcontext context = nullptr;
  if (const CUresult result = driver.cuDevicePrimaryCtxRetain(&context, device); result != CUDA_SUCCESS)
    return cuda_error(driver, result, fmt::format("taking the context of GPU {}", options.ordinal));
  auto made = std::make_unique<CudaDevice>(driver, device, context, options);
  CudaDeviceInfo found;
  TORPOR_RETURN_IF_ERROR(made->start(options, found));
  if (info != nullptr) *info = std::move(found);
  return std::unique_ptr<DeviceMemory>(std::move(made));
}

}  // namespace torpor
