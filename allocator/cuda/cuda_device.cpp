#include "allocator/cuda/cuda_device.h"

#include <atomic>
#include <map>
#include <optional>

#include <fmt/format.h>

#include "allocator/cuda/driver.h"
#include "allocator/cuda/gather.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/units.h"

namespace torpor {
namespace {

// Errors of earlier work that any call may report, done or not; the context is lost with them.
bool is_sticky(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED: return true;
    default: return false;
  }
}

// What takes down has no alternative, and a driver that is short of something for a moment may do it the next time. Not
// after a sticky error: the call may have done its work, and what it took down must not be taken down again.
template <class Call>
CUresult twice(const Call& call) {
  const CUresult result = call();
  return result == CUDA_SUCCESS || is_sticky(result) ? result : call();
}

// Makes a context current for the time of a call.
class Current {
 public:
  Current(const CudaDriver& driver, CUcontext context)
      : driver_(driver), result_(twice([&] { return driver.cuCtxPushCurrent(context); })) {}
  ~Current() {
    CUcontext popped = nullptr;
    if (result_ == CUDA_SUCCESS) (void)twice([&] { return driver_.cuCtxPopCurrent(&popped); });
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  CUresult result() const { return result_; }

 private:
  const CudaDriver& driver_;
  const CUresult result_;
};

Error unknown(std::string_view what, uint64_t id) {
  return Error{
      .code = Code::kInvalidArgument, .what = fmt::format("{} {} does not exist", what, id), .origin = Origin::kDevice};
}

// Runs a driver call in the device's context; returns its error from the enclosing function.
#define TORPOR_CUDA_TRY(call, ...)                                            \
  do {                                                                        \
    if (const CUresult torpor_result = (call); torpor_result != CUDA_SUCCESS) \
      return cuda_error(driver_, torpor_result, fmt::format(__VA_ARGS__));    \
  } while (false)
#define TORPOR_CUDA_CURRENT()                      \
  const Current torpor_current(driver_, context_); \
  TORPOR_CUDA_TRY(torpor_current.result(), "making the context of {} current", kind_)

class CudaDevice final : public DeviceMemory {
 public:
  CudaDevice(const CudaDriver& driver, CUdevice device, CUcontext context, const CudaDeviceOptions& options)
      : driver_(driver),
        device_(device),
        context_(context),
        kind_(fmt::format("cuda:{}", options.ordinal)),
        pin_step_bytes_(options.pin_step_bytes) {}

  ~CudaDevice() override {
    {
      const Current current(driver_, context_);
      for (const auto& [id, event] : events_) leftover_events_.push_back(event.event);
      for (const CUevent event : leftover_events_) (void)twice([&] { return driver_.cuEventDestroy(event); });
      bool idle = true;
      for (const auto& [id, stream] : streams_) idle = end(stream) == CUDA_SUCCESS && idle;
      if (zeroing_ != nullptr) (void)end(zeroing_);
      if (module_ != nullptr && idle) (void)twice([&] { return driver_.cuModuleUnload(module_); });
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
    info.batched_copies = driver_.cuMemcpyBatchAsync != nullptr;
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
    const auto has = [&](CUdevice_attribute attribute, bool wanted, std::string_view what) {
      int there = 0;
      if (!wanted) return false;
      if (driver_.cuDeviceGetAttribute(&there, attribute, device_) == CUDA_SUCCESS && there != 0) return true;
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
    int node = -1;  // what a machine without NUMA, or a driver older than CUDA 12.2, leaves
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
    if (options.gather_below_bytes > 0) {
      if (const Status loaded = load_gather(options, info); !loaded) {
        info.notes.push_back(
            fmt::format("{} copies small pieces by its copy engines: {}", kind_, loaded.error().to_string()));
        log().warn("{}", info.notes.back());
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
    TORPOR_TRY(grant(address, size, access));
    if (access == Access::kReadWrite) {
      if (Status zeroed = zero_fresh(address, size); !zeroed) {
        if (zeroing_unproven_ == 0)
          (void)grant(address, size, Access::kNone);  // whoever goes on regardless finds no access
        return zeroed;
      }
    }
    const MutexLock lock(mutex_);
    for (auto at = mapped_.find(address); at != mapped_.end() && at->first < address + size; ++at)
      at->second.access = access;
    return ok();
  }

  // Each mapping by itself: the driver promises no more.
  Status do_unmap(DeviceAddress address, uint64_t size) override {
    TORPOR_CUDA_CURRENT();
    if (uint64_t unproven = zeroing_unproven_; unproven != 0) {
      if (const DrainResult drained = empty(zeroing_); drained.drain != Drain::kCompleted)
        return drained.error.within("zeroing may still run");
      zeroing_unproven_.compare_exchange_strong(unproven, 0);  // what became unproven meanwhile stays so
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
          .code = Code::kDevice, .what = "no unmapping", .origin = Origin::kDevice};  // where no words can be had
      for (Piece undone = next_piece(address, piece.address); undone.mapping != nullptr;
           undone = next_piece(undone.end(), piece.address)) {
        if (!put_back(undone.address, *undone.mapping)) error.state_changed = true;
      }
      (void)catching([&] {
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
    std::map<StreamId, CUstream> made;
    const auto id = static_cast<StreamId>(++last_id_);
    CUstream& stream = made[id];
    TORPOR_CUDA_TRY(driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "creating a stream on {}", kind_);
    const MutexLock lock(mutex_);
    streams_.merge(made);
    return id;
  }

  Status do_destroy_stream(StreamId id) override {
    TORPOR_CUDA_CURRENT();
    const CUstream stream = stream_of(id);
    if (stream == nullptr) return unknown("stream", static_cast<uint64_t>(id));
    TORPOR_CUDA_TRY(end(stream), "ending a stream of {}", kind_);
    const MutexLock lock(mutex_);
    streams_.erase(id);
    return ok();
  }

  Status do_copy_async(StreamId id, Direction direction, std::span<const Copy> wanted) override {
    TORPOR_CUDA_CURRENT();
    const CUstream stream = stream_of(id);
    if (stream == nullptr) return unknown("stream", static_cast<uint64_t>(id));
    const std::vector<Copy> copies = divided(wanted);
    if (gathers(copies)) return gather(stream, direction, copies);
    if (copies.size() > 1 && driver_.cuMemcpyBatchAsync != nullptr) return copy_batch(stream, direction, copies);
    for (const Copy& copy : copies) {
      TORPOR_CUDA_TRY(direction == Direction::kDeviceToHost
                          ? driver_.cuMemcpyDtoHAsync(copy.host, copy.device, copy.bytes, stream)
                          : driver_.cuMemcpyHtoDAsync(copy.device, copy.host, copy.bytes, stream),
                      "copying {} bytes at {:#x} on {}", copy.bytes, copy.device, kind_);
    }
    return ok();
  }

  Result<EventId> do_record(StreamId id) override {
    TORPOR_CUDA_CURRENT();
    const CUstream stream = stream_of(id);
    if (stream == nullptr) return unknown("stream", static_cast<uint64_t>(id));
    std::map<EventId, Event> made;
    const auto event_id = static_cast<EventId>(++last_id_);
    CUevent& event = made[event_id].event;
    made[event_id].stream = stream;
    TORPOR_CUDA_TRY(driver_.cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
                    "creating an event on {}", kind_);
    if (const CUresult result = driver_.cuEventRecord(event, stream); result != CUDA_SUCCESS) {
      discard(event);
      return cuda_error(driver_, result, fmt::format("recording an event on {}", kind_));
    }
    const MutexLock lock(mutex_);
    events_.merge(made);
    return event_id;
  }

  DrainResult do_wait(EventId id) override {
    Event waited;
    {
      const MutexLock lock(mutex_);
      const auto found = events_.find(id);
      if (found == events_.end()) return {Drain::kDrainedWithError, unknown("event", static_cast<uint64_t>(id))};
      waited = found->second;
      events_.erase(found);
    }
    const Current current(driver_, context_);
    const CUresult result =
        current.result() == CUDA_SUCCESS ? driver_.cuEventSynchronize(waited.event) : current.result();
    DrainResult drained;
    if (result != CUDA_SUCCESS) {
      drained = empty(waited.stream);
      if (drained.drain == Drain::kCompleted) drained.drain = Drain::kDrainedWithError;
      drained.error = cuda_error(driver_, result, fmt::format("waiting for copies on {}", kind_));
    }
    discard(waited.event);
    return drained;
  }

  DrainResult do_drain(StreamId id) override {
    const CUstream stream = stream_of(id);
    if (stream == nullptr) return {Drain::kDrainedWithError, unknown("stream", static_cast<uint64_t>(id))};
    return empty(stream);
  }

  Status do_synchronize() override {
    TORPOR_CUDA_CURRENT();
    TORPOR_CUDA_TRY(driver_.cuCtxSynchronize(), "waiting for all work on {}", kind_);
    return ok();
  }

  Status do_pin_host(std::span<std::byte> host) override {
    TORPOR_CUDA_CURRENT();
    for (uint64_t at = 0; at < host.size(); at += pin_step_bytes_) {
      const uint64_t bytes = std::min<uint64_t>(pin_step_bytes_, host.size() - at);
      std::map<std::byte*, uint64_t> made{{host.data() + at, bytes}};
      const CUresult result = driver_.cuMemHostRegister(host.data() + at, bytes,
                                                        CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
      if (result == CUDA_SUCCESS) {
        const MutexLock lock(mutex_);
        pinned_.merge(made);
        continue;
      }
      Error error = cuda_error(driver_, result, fmt::format("pinning {} bytes of host memory", bytes));
      error.state_changed = !unpin(host);
      return error;
    }
    return ok();
  }

  Status do_unpin_host(std::span<std::byte> host) override {
    TORPOR_CUDA_CURRENT();
    return unpin(host);
  }

 private:
  struct Handle {
    CUmemGenericAllocationHandle handle = 0;
    uint64_t mappings = 0;
    bool released = false;
    bool fresh = true;  // never written by us: its bytes may be anybody's
  };
  struct Mapped {
    PhysicalId id{};
    uint64_t size = 0;
    Access access = Access::kNone;
    bool gone = false;  // unmapped by a call that failed and could not map it again
  };
  struct Piece {
    DeviceAddress address = 0;
    uint64_t size = 0;
    Mapped* mapping = nullptr;  // the caller alone is at work on it
    DeviceAddress end() const { return address + size; }
  };
  struct Event {
    CUevent event = nullptr;
    CUstream stream = nullptr;
  };

  // The first mapping in the range; none: `mapping` is null.
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

  // Maps memory again that this call, or one before, unmapped. False: it is as good as gone.
  bool put_back(DeviceAddress address, Mapped& mapping) {
    const Handle handle = handle_of(mapping.id);
    if (handle.released || driver_.cuMemMap(address, mapping.size, 0, handle.handle, 0) != CUDA_SUCCESS) return false;
    mapping.gone = false;
    return grant(address, mapping.size, mapping.access).has_value();
  }

  // Whether a stream is proven to be empty now.
  DrainResult empty(CUstream stream) {
    const Current current(driver_, context_);
    const CUresult result = current.result() == CUDA_SUCCESS
                                ? twice([&] { return driver_.cuStreamSynchronize(stream); })
                                : current.result();
    if (result == CUDA_SUCCESS) return {};
    return {Drain::kUnproven, cuda_error(driver_, result, fmt::format("waiting for a stream of {}", kind_))};
  }

  void discard(CUevent event) {
    const CUresult result = twice([&] { return driver_.cuEventDestroy(event); });
    if (result == CUDA_SUCCESS || is_sticky(result)) return;
    const MutexLock lock(mutex_);
    leftover_events_.push_back(event);
  }

  // A stream that is not proven to be empty stays: what it runs goes on.
  CUresult end(CUstream stream) {
    const CUresult result = twice([&] { return driver_.cuStreamSynchronize(stream); });
    return result == CUDA_SUCCESS ? twice([&] { return driver_.cuStreamDestroy(stream); }) : result;
  }

  Status grant(DeviceAddress address, uint64_t size, Access access) {
    CUmemAccessDesc description{};
    description.location = properties_.location;
    description.flags = access == Access::kReadWrite ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                        : access == Access::kRead    ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                                     : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    TORPOR_CUDA_TRY(driver_.cuMemSetAccess(address, size, &description, 1), "setting access to {} bytes at {:#x} on {}",
                    size, address, kind_);
    return ok();
  }

  Status zero_fresh(DeviceAddress address, uint64_t size) {
    const auto proven = [this](CUresult result) -> Status {
      if (result == CUDA_SUCCESS) return ok();
      if (empty(zeroing_).drain != Drain::kCompleted) zeroing_unproven_ = ++last_id_;
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
    for (const auto& [at, mapping] : fresh) TORPOR_TRY(proven(driver_.cuMemsetD8Async(at, 0, mapping.size, zeroing_)));
    TORPOR_TRY(proven(driver_.cuStreamSynchronize(zeroing_)));
    const MutexLock lock(mutex_);
    for (const auto& [at, mapping] : fresh) handles_.at(mapping.id).fresh = false;
    return ok();
  }

  Status copy_batch(CUstream stream, Direction direction, std::span<const Copy> copies) {
    std::vector<CUdeviceptr> device;
    std::vector<CUdeviceptr> host;
    std::vector<size_t> sizes;
    for (const Copy& copy : copies) {
      device.push_back(copy.device);
      host.push_back(reinterpret_cast<CUdeviceptr>(copy.host));
      sizes.push_back(copy.bytes);
    }
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    size_t of_all = 0;
    size_t failed = 0;
    const bool down = direction == Direction::kDeviceToHost;
    TORPOR_CUDA_TRY(driver_.cuMemcpyBatchAsync(down ? host.data() : device.data(), down ? device.data() : host.data(),
                                               sizes.data(), sizes.size(), &attributes, &of_all, 1, &failed, stream),
                    "copying {} pieces on {}", copies.size(), kind_);
    return ok();
  }

  // Leaves module_ null where the kernel is not to be had.
  Status load_gather(const CudaDeviceOptions& options, CudaDeviceInfo& info) {
    const auto missing = [](std::string what) {
      return Error{.code = Code::kUnsupported, .what = std::move(what), .origin = Origin::kDevice};
    };
    const std::span<const std::byte> image = options.gather_image.empty() ? cuda::gather_image() : options.gather_image;
    if (image.empty()) return missing("this build has no kernel, nvcc was not found");
    if (info.driver_version < cuda::kGatherDriver) return missing("the driver is older than CUDA 12.1");
    int same_address = 0;
    TORPOR_CUDA_TRY(driver_.cuDeviceGetAttribute(&same_address,
                                                 CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device_),
                    "asking {} how it reaches host memory", kind_);
    if (same_address == 0) return missing("its kernels cannot use the addresses of host memory");
    CUmodule module = nullptr;
    TORPOR_CUDA_TRY(driver_.cuModuleLoadData(&module, image.data()), "loading a kernel on {}", kind_);
    if (const CUresult result = driver_.cuModuleGetFunction(&gather_, module, cuda::kGatherName);
        result != CUDA_SUCCESS) {
      (void)twice([&] { return driver_.cuModuleUnload(module); });
      return cuda_error(driver_, result, fmt::format("finding a kernel on {}", kind_));
    }
    module_ = module;
    gather_below_bytes_ = options.gather_below_bytes;
    info.gathers = true;
    return ok();
  }

  // The driver refuses a copy whose host memory lies in two registrations, or partly in one (seen with
  // cudaMemcpyBatchAsync, sgl-project/sglang pull request 36798): each result lies in one, or in none.
  std::vector<Copy> divided(std::span<const Copy> copies) {
    std::vector<Copy> pieces;
    pieces.reserve(copies.size());
    const MutexLock lock(mutex_);
    for (Copy rest : copies) {
      while (rest.bytes > 0) {
        const auto next = pinned_.upper_bound(rest.host);
        uint64_t undivided = next == pinned_.end() ? rest.bytes : static_cast<uint64_t>(next->first - rest.host);
        if (next != pinned_.begin()) {
          const auto& [base, size] = *std::prev(next);
          if (rest.host < base + size) undivided = static_cast<uint64_t>(base + size - rest.host);
        }
        Copy piece = rest;
        piece.bytes = std::min(rest.bytes, undivided);
        pieces.push_back(piece);
        rest.device += piece.bytes;
        rest.host += piece.bytes;
        rest.bytes -= piece.bytes;
      }
    }
    return pieces;
  }

  bool gathers(std::span<const Copy> copies) {
    if (module_ == nullptr || copies.size() < 2) return false;
    uint64_t bytes = 0;
    const MutexLock lock(mutex_);
    for (const Copy& copy : copies) {
      bytes += copy.bytes;
      auto pinned = pinned_.upper_bound(copy.host);
      if (pinned == pinned_.begin() || (--pinned)->first + pinned->second < copy.host + copy.bytes) return false;
    }
    return bytes / copies.size() < gather_below_bytes_;
  }

  Status gather(CUstream stream, Direction direction, std::span<const Copy> copies) {
    cuda::GatherArguments arguments;
    void* parameters[] = {&arguments};  // copied by the launch
    for (size_t begun = 0; begun < copies.size(); begun += arguments.count) {
      arguments.count = std::min<uint64_t>(cuda::kGatherPieces, copies.size() - begun);
      for (uint64_t i = 0; i < arguments.count; ++i) {
        const Copy& copy = copies[begun + i];
        const auto host = reinterpret_cast<uint64_t>(copy.host);
        arguments.pieces[i] = direction == Direction::kDeviceToHost ? cuda::GatherPiece{host, copy.device, copy.bytes}
                                                                    : cuda::GatherPiece{copy.device, host, copy.bytes};
      }
      TORPOR_CUDA_TRY(driver_.cuLaunchKernel(gather_, static_cast<unsigned>(arguments.count), 1, 1,
                                             cuda::kGatherThreads, 1, 1, 0, stream, parameters, nullptr),
                      "copying {} pieces by a kernel on {}", arguments.count, kind_);
    }
    return ok();
  }

  // What is still registered of `host`; a failure leaves the rest to the next call.
  Status unpin(std::span<std::byte> host) {
    Status first;
    std::vector<std::byte*> registered;
    {
      const MutexLock lock(mutex_);
      for (auto at = pinned_.lower_bound(host.data()); at != pinned_.end() && at->first < host.data() + host.size();
           ++at)
        registered.push_back(at->first);
    }
    for (std::byte* const base : registered) {
      const CUresult result = twice([&] { return driver_.cuMemHostUnregister(base); });
      if (result == CUDA_SUCCESS) {
        const MutexLock lock(mutex_);
        pinned_.erase(base);
      } else if (first) {
        first = cuda_error(driver_, result, "unpinning host memory");
      }
    }
    return first;
  }

  CUstream stream_of(StreamId id) {
    const MutexLock lock(mutex_);
    const auto found = streams_.find(id);
    return found == streams_.end() ? nullptr : found->second;
  }

  const CudaDriver& driver_;
  const CUdevice device_;
  const CUcontext context_;  // retained
  const std::string kind_;
  const uint64_t pin_step_bytes_;
  CUmemAllocationProp properties_{};
  uint64_t granularity_ = 0;
  uint64_t capacity_ = 0;
  std::optional<int> host_numa_node_;
  CUmodule module_ = nullptr;  // with the kernel that gathers; null: there is none
  CUfunction gather_ = nullptr;
  uint64_t gather_below_bytes_ = 0;
  CUstream zeroing_ = nullptr;
  // Not 0: it may still run, and nothing is unmapped until it is proven not to. A new number each time.
  std::atomic<uint64_t> zeroing_unproven_ = 0;
  std::atomic<uint64_t> last_id_ = 0;
  Mutex mutex_;  // never held while the driver is called
  // DeviceMemory lets one call at a time at an entry of these two.
  std::map<PhysicalId, Handle> handles_ TORPOR_GUARDED_BY(mutex_);
  std::map<DeviceAddress, Mapped> mapped_ TORPOR_GUARDED_BY(mutex_);
  std::map<StreamId, CUstream> streams_ TORPOR_GUARDED_BY(mutex_);
  std::map<EventId, Event> events_ TORPOR_GUARDED_BY(mutex_);
  // Each registration of host memory, with its size.
  std::map<std::byte*, uint64_t> pinned_ TORPOR_GUARDED_BY(mutex_);
  // That the driver would not destroy; the end of the device tries again.
  std::vector<CUevent> leftover_events_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace

bool built_with_cuda() { return true; }

Result<std::unique_ptr<DeviceMemory>> make_cuda_device(CudaDeviceOptions options, CudaDeviceInfo* info) {
  TORPOR_ASSIGN(const CudaDriver* const driver, cuda_driver());
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
  TORPOR_TRY(made->start(options, found));
  if (info != nullptr) *info = std::move(found);
  return std::unique_ptr<DeviceMemory>(std::move(made));
}

}  // namespace torpor
