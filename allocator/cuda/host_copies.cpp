#include "allocator/cuda/host_copies.h"

#include <algorithm>

#include <fmt/core.h>

#include "allocator/cuda/context.h"
#include "allocator/cuda/gather.h"

namespace torpor {

void HostCopies::unload() {
  if (module_ != nullptr) (void)twice([&] { return driver_.cuModuleUnload(module_); });
  module_ = nullptr;
}

Status HostCopies::begin(CUstream stream, Direction direction, std::span<const Copy> wanted) {
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

Status HostCopies::pin(std::span<std::byte> host) {
  for (uint64_t at = 0; at < host.size(); at += pin_step_bytes_) {
    const uint64_t bytes = std::min<uint64_t>(pin_step_bytes_, host.size() - at);
    std::map<std::byte*, uint64_t> made{{host.data() + at, bytes}};
    const CUresult result =
        driver_.cuMemHostRegister(host.data() + at, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
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

Status HostCopies::copy_batch(CUstream stream, Direction direction, std::span<const Copy> copies) {
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

Status HostCopies::load_gather(CUdevice device, int driver_version, std::span<const std::byte> wanted,
                               uint64_t below_bytes) {
  const auto missing = [](std::string what) {
    return Error{.code = Code::kUnsupported, .what = std::move(what), .origin = Origin::kDevice};
  };
  const std::span<const std::byte> image = wanted.empty() ? cuda::gather_image() : wanted;
  if (image.empty()) return missing("this build has no kernel, nvcc was not found");
  if (driver_version < cuda::kGatherDriver) return missing("the driver is older than CUDA 12.1");
  int same_address = 0;
  TORPOR_CUDA_TRY(
      driver_.cuDeviceGetAttribute(&same_address, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device),
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
  gather_below_bytes_ = below_bytes;
  return ok();
}

// The driver refuses a copy whose host memory lies in two registrations, or partly in one (seen with
// cudaMemcpyBatchAsync, sgl-project/sglang pull request 36798): each result lies in one, or in none.
std::vector<Copy> HostCopies::divided(std::span<const Copy> copies) {
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

bool HostCopies::gathers(std::span<const Copy> copies) {
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

Status HostCopies::gather(CUstream stream, Direction direction, std::span<const Copy> copies) {
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
    TORPOR_CUDA_TRY(driver_.cuLaunchKernel(gather_, static_cast<unsigned>(arguments.count), 1, 1, cuda::kGatherThreads,
                                           1, 1, 0, stream, parameters, nullptr),
                    "copying {} pieces by a kernel on {}", arguments.count, kind_);
  }
  return ok();
}

Status HostCopies::unpin(std::span<std::byte> host) {
  Status first;
  std::vector<std::byte*> registered;
  {
    const MutexLock lock(mutex_);
    for (auto at = pinned_.lower_bound(host.data()); at != pinned_.end() && at->first < host.data() + host.size(); ++at)
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

}  // namespace torpor
