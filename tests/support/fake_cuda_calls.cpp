// SPDX-License-Identifier: Apache-2.0
// The functions of the fake driver's table: what each refuses, and how it changes FakeCuda's model of a machine.
#include <algorithm>
#include <cstring>

#include <sched.h>

#include <fmt/core.h>

#include "allocator/cuda/gather.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/fake_cuda_handles.h"

namespace torpor::test {
namespace {

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device + 1)); }
int device_of(CUcontext context) { return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1; }

}  // namespace

// The functions of the driver's table.
struct FakeCalls {
  using Work = FakeCuda::Work;

  // Enter `function` under the lock. Return an injected failure, if one is due. `fake`: the active FakeCuda.
#define FAKE_ENTER(...)                    \
  FakeCuda& fake = *FakeCuda::active_;     \
  fake.pass_gate(__func__);                \
  const std::lock_guard lock(fake.mutex_); \
  if (const CUresult failed = fake.enter(__func__ __VA_OPT__(, ) __VA_ARGS__); failed != CUDA_SUCCESS) return failed
  // The same for a call that waits or changes memory: unsafe beside a capture.
#define FAKE_ENTER_UNSAFE() \
  FAKE_ENTER();             \
  if (const CUresult refused = fake.beside_captures(); refused != CUDA_SUCCESS) return refused

  static CUresult cuInit(unsigned int) {
    FAKE_ENTER(false);
    return CUDA_SUCCESS;
  }
  static CUresult cuDriverGetVersion(int* version) {
    FAKE_ENTER(false);
    *version = fake.options_.batched_copies ? 12080 : 12000;
    return CUDA_SUCCESS;
  }
  static CUresult cuGetErrorName(CUresult, const char** text) {
    *text = "FAKE";
    return CUDA_SUCCESS;
  }
  static CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "the fake driver says no";
    return CUDA_SUCCESS;
  }
  static CUresult cuDeviceGetCount(int* count) {
    FAKE_ENTER(false);
    *count = fake.options_.devices;
    return CUDA_SUCCESS;
  }
  static CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    FAKE_ENTER(false);
    if (ordinal < 0 || ordinal >= fake.options_.devices) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  }
  static CUresult cuDeviceGetName(char* name, int length, CUdevice) {
    FAKE_ENTER(false);
    std::snprintf(name, static_cast<size_t>(length), "Fake GPU");
    return CUDA_SUCCESS;
  }
  static CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    FAKE_ENTER(false);
    if (attribute == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID) {
      *value = fake.options_.host_numa_node;
      return CUDA_SUCCESS;
    }
    if (attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) {
      *value = fake.options_.host_pointers ? 1 : 0;
      return CUDA_SUCCESS;
    }
    *value = (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? fake.options_.virtual_memory
                                                                                   : fake.options_.attributes)
                 ? 1
                 : 0;
    return CUDA_SUCCESS;
  }
  static CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    FAKE_ENTER(false);
    ++fake.retained_[device];
    *context = context_of(device);
    return CUDA_SUCCESS;
  }
  static CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    FAKE_ENTER(false);
    if (fake.retained_[device] == 0) {
      fake.misuse("a context is released that nobody holds");
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    --fake.retained_[device];
    return CUDA_SUCCESS;
  }
  static CUresult cuCtxPushCurrent(CUcontext context) {
    FAKE_ENTER(false);
    if (fake.retained_[device_of(context)] == 0) return CUDA_ERROR_INVALID_CONTEXT;
    contexts.push_back(context);
    return CUDA_SUCCESS;
  }
  static CUresult cuCtxPopCurrent(CUcontext* context) {
    FAKE_ENTER(true);
    *context = contexts.back();
    contexts.pop_back();
    return CUDA_SUCCESS;
  }
  static CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    FAKE_ENTER(false);
    std::swap(*mode, capture_mode);
    return CUDA_SUCCESS;
  }
  static CUresult cuCtxSynchronize() {
    FAKE_ENTER();
    if (const CUresult refused = fake.beside_captures(/*whole_context=*/true); refused != CUDA_SUCCESS) return refused;
    for (auto& [id, stream] : fake.streams_) fake.run_until(stream, stream.enqueued);
    return fake.lost_;
  }
  static CUresult cuMemGetInfo(size_t* free, size_t* total) {
    FAKE_ENTER();
    *total = fake.options_.memory_bytes;
    *free = *total - fake.used_.at(static_cast<size_t>(device_of(contexts.back())));
    return CUDA_SUCCESS;
  }
  static CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                                CUmemAllocationGranularity_flags) {
    FAKE_ENTER();
    *granularity = fake.options_.granularity_bytes;
    return CUDA_SUCCESS;
  }
  static CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
    FAKE_ENTER_UNSAFE();
    if (size == 0 || size % fake.options_.granularity_bytes != 0) return CUDA_ERROR_INVALID_VALUE;
    *address = fake.next_address_;
    fake.next_address_ += size + fake.options_.granularity_bytes;
    fake.ranges_.emplace(*address, FakeCuda::Range{size});
    return CUDA_SUCCESS;
  }
  static CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    FAKE_ENTER_UNSAFE();
    const auto range = fake.ranges_.find(address);
    if (range == fake.ranges_.end() || range->second.size != size) return CUDA_ERROR_INVALID_VALUE;
    const auto mapped = fake.mappings_.lower_bound(address);
    if (mapped != fake.mappings_.end() && mapped->first < address + size) return CUDA_ERROR_INVALID_VALUE;
    fake.ranges_.erase(range);
    return CUDA_SUCCESS;
  }
  static CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp* properties,
                              unsigned long long) {
    FAKE_ENTER_UNSAFE();
    if (size == 0 || size % fake.options_.granularity_bytes != 0 || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
      return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.id != device_of(contexts.back()))
      fake.misuse("memory is created in the context of another device");
    const bool rdma = properties->allocFlags.gpuDirectRDMACapable != 0;
    if ((rdma || properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE) && !fake.options_.attributes)
      return CUDA_ERROR_NOT_SUPPORTED;
    fake.charge("cuMemCreate", kFakeCudaPrices.create, /*locks=*/true);
    uint64_t& used = fake.used_.at(static_cast<size_t>(properties->location.id));
    if (size > fake.options_.memory_bytes - used) return CUDA_ERROR_OUT_OF_MEMORY;
    used += size;
    *out = fake.next_id_++;
    fake.physical_.emplace(*out, FakeCuda::Physical{.device = properties->location.id,
                                                    .bytes = std::vector<std::byte>(size, std::byte{0xcd}),
                                                    .rdma = rdma});
    return CUDA_SUCCESS;
  }
  static void collect(FakeCuda& fake, uint64_t id) {
    const auto physical = fake.physical_.find(id);
    if (!physical->second.released || physical->second.maps > 0) return;
    fake.used_.at(static_cast<size_t>(physical->second.device)) -= physical->second.bytes.size();
    fake.physical_.erase(physical);
  }
  static CUresult cuMemRelease(CUmemGenericAllocationHandle id) {
    FAKE_ENTER_UNSAFE();
    const auto physical = fake.physical_.find(id);
    if (physical == fake.physical_.end() || physical->second.released) {
      fake.misuse("physical memory is released twice");
      return CUDA_ERROR_INVALID_VALUE;
    }
    physical->second.released = true;
    collect(fake, id);
    return CUDA_SUCCESS;
  }
  static CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle id,
                           unsigned long long) {
    FAKE_ENTER_UNSAFE();
    const auto physical = fake.physical_.find(id);
    if (physical == fake.physical_.end() || physical->second.released || offset != 0 ||
        size != physical->second.bytes.size())
      return CUDA_ERROR_INVALID_VALUE;
    auto range = fake.ranges_.upper_bound(address);
    if (range == fake.ranges_.begin() || address + size > (--range)->first + range->second.size ||
        address % fake.options_.granularity_bytes != 0)
      return CUDA_ERROR_INVALID_VALUE;
    for (const auto& [at, mapping] : fake.mappings_) {
      if (overlap(at, mapping.size, address, size)) return CUDA_ERROR_INVALID_VALUE;
    }
    fake.charge("cuMemMap", kFakeCudaPrices.map, /*locks=*/true);
    fake.mappings_.emplace(address, FakeCuda::Mapping{.size = size, .handle = id});
    ++physical->second.maps;
    return CUDA_SUCCESS;
  }
  static CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    FAKE_ENTER_UNSAFE();
    const auto mapping = fake.mappings_.find(address);
    if (mapping == fake.mappings_.end() || mapping->second.size != size)
      return CUDA_ERROR_INVALID_VALUE;  // one whole mapping at a time
    if (fake.in_flight(address, size)) fake.misuse(fmt::format("{:#x} is unmapped while work uses it", address));
    fake.charge("cuMemUnmap", kFakeCudaPrices.unmap, /*locks=*/true);
    const uint64_t id = mapping->second.handle;
    fake.mappings_.erase(mapping);
    --fake.physical_.at(id).maps;
    collect(fake, id);
    return CUDA_SUCCESS;
  }
  static CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* description, size_t count) {
    FAKE_ENTER_UNSAFE();
    uint64_t reached = address;
    std::vector<FakeCuda::Mapping*> covered;
    for (auto at = fake.mappings_.find(address);
         at != fake.mappings_.end() && at->first == reached && reached < address + size; ++at) {
      if (fake.physical_.at(at->second.handle).device != description->location.id)
        fake.misuse("access is given to a device that does not own the memory");
      covered.push_back(&at->second);
      reached += at->second.size;
    }
    if (count != 1 || size == 0 || reached != address + size) return CUDA_ERROR_INVALID_VALUE;
    if (description->flags == CU_MEM_ACCESS_FLAGS_PROT_READ) return CUDA_ERROR_INVALID_VALUE;  // seen: NVBit issue 131
    fake.charge("cuMemSetAccess", kFakeCudaPrices.access, /*locks=*/true);
    if (description->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE && fake.in_flight(address, size))
      fake.misuse("access is taken away while work uses the memory");
    for (FakeCuda::Mapping* mapping : covered) mapping->access = description->flags;
    return CUDA_SUCCESS;
  }
  static CUresult cuMemHostRegister(void* host, size_t size, unsigned int) {
    FAKE_ENTER_UNSAFE();
    for (const auto& [base, bytes] : fake.pinned_) {
      if (overlap(number(base), bytes, number(host), size)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    fake.charge("cuMemHostRegister",
                kFakeCudaPrices.pin + static_cast<uint64_t>(static_cast<double>(size) / kFakeCudaPrices.pin_bytes),
                /*locks=*/true);
    if (::sched_getscheduler(0) == SCHED_IDLE)
      fake.misuse("a thread of idle priority holds the driver's lock while it pins memory");
    fake.pinned_.emplace(static_cast<const std::byte*>(host), size);
    return CUDA_SUCCESS;
  }
  static CUresult cuMemHostUnregister(void* host) {
    FAKE_ENTER_UNSAFE();
    const auto pinned = fake.pinned_.find(static_cast<const std::byte*>(host));
    if (pinned == fake.pinned_.end()) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (fake.host_in_flight(pinned->first, pinned->second)) fake.misuse("host memory is unpinned while a copy uses it");
    fake.pinned_.erase(pinned);
    return CUDA_SUCCESS;
  }
  static CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, CUstream stream) {
    FAKE_ENTER();
    return fake.enqueue(number(stream), {.kind = Work::Kind::kSet, .device = address, .bytes = size, .value = value});
  }
  // A copy of memory that is not pinned may wait for its stream.
  static CUresult beside_captures_if_pageable(FakeCuda& fake, const void* host, size_t size) {
    if (fake.is_pinned(static_cast<const std::byte*>(host), size)) return CUDA_SUCCESS;
    return fake.beside_captures();
  }
  static CUresult cuMemcpyDtoHAsync(void* host, CUdeviceptr address, size_t size, CUstream stream) {
    FAKE_ENTER();
    if (const CUresult refused = beside_captures_if_pageable(fake, host, size); refused != CUDA_SUCCESS) return refused;
    return fake.enqueue(
        number(stream),
        {.kind = Work::Kind::kDown, .device = address, .host = static_cast<std::byte*>(host), .bytes = size});
  }
  static CUresult cuMemcpyHtoDAsync(CUdeviceptr address, const void* host, size_t size, CUstream stream) {
    FAKE_ENTER();
    if (const CUresult refused = beside_captures_if_pageable(fake, host, size); refused != CUDA_SUCCESS) return refused;
    return fake.enqueue(number(stream), {.kind = Work::Kind::kUp,
                                         .device = address,
                                         .host = static_cast<std::byte*>(const_cast<void*>(host)),
                                         .bytes = size});
  }
  static CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    FAKE_ENTER();
    return fake.enqueue(number(stream), {.kind = Work::Kind::kWithin, .device = to, .source = from, .bytes = size});
  }
  static CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                     CUmemcpyAttributes* attributes, size_t* starts, size_t kinds, size_t* failed,
                                     CUstream stream) {
    FakeCuda& fake = *FakeCuda::active_;
    fake.pass_gate(__func__);
    const std::lock_guard lock(fake.mutex_);
    const CUresult asked = fake.enter(__func__);
    const bool named = stream != nullptr && kinds == 1 && starts[0] == 0 &&
                       attributes[0].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    if (asked == CUDA_SUCCESS && (!named || count == 0)) return CUDA_ERROR_INVALID_VALUE;
    fake.charge("cuMemcpyBatchAsync", count * kFakeCudaPrices.piece);
    std::vector<Work> works;
    for (size_t i = 0; i < count; ++i) {
      works.push_back(work_of(fake, to[i], from[i], sizes[i]));
      if (asked != CUDA_SUCCESS || fake.is_pinned(works.back().host, sizes[i])) continue;
      *failed = i;
      return CUDA_ERROR_INVALID_VALUE;
    }
    return fake.enqueue_in_any_order(number(stream), std::move(works), asked, failed);
  }
  static Work work_of(const FakeCuda& fake, uint64_t to, uint64_t from, uint64_t bytes) {
    const bool down = !in_ranges(fake, to);
    const uint64_t host = down ? to : from;
    const bool as_device = host >= kDeviceView;
    return {.kind = down ? Work::Kind::kDown : Work::Kind::kUp,
            .device = down ? from : to,
            // NOLINTNEXTLINE(performance-no-int-to-ptr)
            .host = reinterpret_cast<std::byte*>(as_device ? host - kDeviceView : host),
            .bytes = bytes,
            .illegal = as_device == fake.options_.host_pointers};
  }
  static bool in_ranges(const FakeCuda& fake, uint64_t address) {
    auto range = fake.ranges_.upper_bound(address);
    return range != fake.ranges_.begin() && address < (--range)->first + range->second.size;
  }
  static CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    FAKE_ENTER_UNSAFE();
    if (image == nullptr) return CUDA_ERROR_INVALID_IMAGE;
    const uint64_t id = fake.next_id_++;
    fake.modules_.insert(id);
    *module = handle<CUmodule>(id);
    return CUDA_SUCCESS;
  }
  static CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    FAKE_ENTER();
    if (!fake.modules_.contains(number(module))) return CUDA_ERROR_INVALID_HANDLE;
    if (std::string_view(name) != cuda::kGatherName) return CUDA_ERROR_NOT_FOUND;
    *function = handle<CUfunction>(number(module));
    return CUDA_SUCCESS;
  }
  static CUresult cuModuleUnload(CUmodule module) {
    FAKE_ENTER_UNSAFE();
    for (const auto& [id, stream] : fake.streams_) {
      if (std::any_of(stream.queue.begin(), stream.queue.end(), [](const Work& work) { return work.by_kernel; }))
        fake.misuse("a kernel is unloaded while it runs");
    }
    return fake.modules_.erase(number(module)) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  }
  static CUresult cuLaunchKernel(CUfunction function, unsigned int grid, unsigned int grid_y, unsigned int grid_z,
                                 unsigned int threads, unsigned int threads_y, unsigned int threads_z, unsigned int,
                                 CUstream stream, void** parameters, void**) {
    FAKE_ENTER();
    if (!fake.modules_.contains(number(function)) || grid_y * grid_z * threads_y * threads_z != 1 ||
        threads != cuda::kGatherThreads)
      return CUDA_ERROR_INVALID_VALUE;
    const auto& arguments = *static_cast<const cuda::GatherArguments*>(parameters[0]);
    std::vector<Work> works;
    for (uint64_t i = 0; i < std::min<uint64_t>(grid, arguments.count); ++i) {
      Work work = work_of(fake, arguments.pieces[i].to, arguments.pieces[i].from, arguments.pieces[i].bytes);
      work.by_kernel = true;
      if (!fake.is_pinned(work.host, work.bytes)) fake.misuse("a kernel uses host memory that is not pinned");
      works.push_back(work);
    }
    return fake.enqueue_in_any_order(number(stream), std::move(works), CUDA_SUCCESS, nullptr);
  }
  static CUresult cuStreamCreate(CUstream* stream, unsigned int) {
    FAKE_ENTER_UNSAFE();
    const uint64_t id = fake.next_id_++;
    fake.streams_.emplace(id, FakeCuda::Stream{});
    *stream = handle<CUstream>(id);
    return CUDA_SUCCESS;
  }
  static CUresult cuStreamDestroy(CUstream stream) {
    FAKE_ENTER_UNSAFE();
    const auto found = fake.streams_.find(number(stream));
    if (found == fake.streams_.end()) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult captured = fake.use_of_stream(number(stream)); captured != CUDA_SUCCESS) return captured;
    if (!found->second.queue.empty()) fake.misuse("a stream is destroyed with work in it");
    fake.streams_.erase(found);
    return CUDA_SUCCESS;
  }
  static CUresult cuStreamSynchronize(CUstream stream) {
    FAKE_ENTER_UNSAFE();
    if (const CUresult captured = fake.use_of_stream(number(stream)); captured != CUDA_SUCCESS) return captured;
    const auto found = fake.streams_.find(number(stream));
    if (found == fake.streams_.end()) return CUDA_ERROR_INVALID_HANDLE;
    fake.run_until(found->second, found->second.enqueued);
    return fake.lost_;
  }
  static CUresult cuEventCreate(CUevent* event, unsigned int) {
    FAKE_ENTER();
    const uint64_t id = fake.next_id_++;
    fake.events_.emplace(id, FakeCuda::Event{});
    *event = handle<CUevent>(id);
    return CUDA_SUCCESS;
  }
  static CUresult cuEventRecord(CUevent event, CUstream stream) {
    FAKE_ENTER();
    const auto found = fake.events_.find(number(event));
    const auto of = fake.streams_.find(number(stream));
    if (found == fake.events_.end() || of == fake.streams_.end()) return CUDA_ERROR_INVALID_HANDLE;
    const bool captured = std::any_of(fake.captures_.begin(), fake.captures_.end(),
                                      [&](const FakeCuda::Capture& each) { return each.stream == number(stream); });
    found->second = {number(stream), of->second.enqueued, captured};
    return CUDA_SUCCESS;
  }
  static CUresult cuEventSynchronize(CUevent event) {
    FAKE_ENTER_UNSAFE();
    const auto found = fake.events_.find(number(event));
    if (found == fake.events_.end()) return CUDA_ERROR_INVALID_HANDLE;
    if (found->second.captured) {
      (void)fake.use_of_stream(found->second.stream);
      return CUDA_ERROR_CAPTURED_EVENT;
    }
    const auto stream = fake.streams_.find(found->second.stream);
    if (stream != fake.streams_.end()) fake.run_until(stream->second, found->second.count);
    return fake.lost_;
  }
  static CUresult cuEventDestroy(CUevent event) {
    FAKE_ENTER();
    return fake.events_.erase(number(event)) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  }
#undef FAKE_ENTER_UNSAFE
#undef FAKE_ENTER
};

void FakeCuda::fill_table() {
#define FAKE_FILL(function, version) driver_.function = FakeCalls::function;
  TORPOR_CUDA_FUNCTIONS(FAKE_FILL)
  if (options_.batched_copies) {
    TORPOR_CUDA_OPTIONAL_FUNCTIONS(FAKE_FILL)
  }
#undef FAKE_FILL
}

}  // namespace torpor::test
