// SPDX-License-Identifier: Apache-2.0
#include "allocator/cuda/host_copies.h"

#include <algorithm>

#include <sys/mman.h>

#include <fmt/core.h>

#include "allocator/cuda/context.h"
#include "allocator/cuda/gather.h"

namespace torpor {

void HostCopies::unload() {
  if (module_ != nullptr) (void)twice([&] { return driver_.cuModuleUnload(module_); });
  module_ = nullptr;
}

Result<bool> HostCopies::find_batches(CUdevice device) {
  int same = 0;
  TORPOR_CUDA_TRY(
      driver_.cuDeviceGetAttribute(&same, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device),
      "asking {} how it reaches host memory", kind_);
  same_addresses_ = same != 0;
  return same_addresses_ && driver_.cuMemcpyBatchAsync != nullptr;
}

// A batch uses the host's addresses, which are illegal if the device has others (sgl-project/sglang issue 40232). No
// document says what a batch does with memory that is not pinned, so such pieces are copied one by one.
Status HostCopies::begin(CUstream stream, Direction direction, std::span<const Copy> wanted, CopyBy by) {
  const Divided pieces = divided(wanted);
  if (by == CopyBy::kFastest && gathers(pieces)) return gather(stream, direction, pieces.copies);
  const bool batches = same_addresses_ && driver_.cuMemcpyBatchAsync != nullptr && pieces.pinned_copies > 1;
  std::vector<Copy> batch;
  for (size_t i = 0; i < pieces.copies.size(); ++i) {
    if (batches && pieces.pinned[i]) {
      batch.push_back(pieces.copies[i]);
    } else {
      TORPOR_RETURN_IF_ERROR(copy_one(stream, direction, pieces.copies[i]));
    }
  }
  return batch.empty() ? ok() : copy_batch(stream, direction, batch);
}

Status HostCopies::copy_one(CUstream stream, Direction direction, const Copy& copy) {
  TORPOR_CUDA_TRY(direction == Direction::kDeviceToHost
                      ? driver_.cuMemcpyDtoHAsync(copy.host, copy.device, copy.bytes, stream)
                      : driver_.cuMemcpyHtoDAsync(copy.device, copy.host, copy.bytes, stream),
                  "copying {} bytes at {:#x} on {}", copy.bytes, copy.device, kind_);
  return ok();
}

Status HostCopies::pin(std::span<std::byte> host) {
  for (uint64_t at = 0; at < host.size(); at += pin_step_bytes_) {
    const uint64_t bytes = std::min<uint64_t>(pin_step_bytes_, host.size() - at);
    std::map<std::byte*, uint64_t> made{{host.data() + at, bytes}};
    // A fork would copy all pinned pages at once.
    (void)::madvise(host.data() + at, bytes, MADV_DONTFORK);
    const CUresult result =
        driver_.cuMemHostRegister(host.data() + at, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (result == CUDA_SUCCESS) {
      const MutexLock lock(mutex_);
      pinned_.merge(made);
      continue;
    }
    (void)::madvise(host.data() + at, bytes, MADV_DOFORK);
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

Status HostCopies::load_gather(int driver_version, std::span<const std::byte> wanted, uint64_t below_bytes) {
  const auto missing = [](std::string what) {
    return Error{.code = Code::kUnsupported, .what = std::move(what), .origin = Origin::kDevice};
  };
  const std::span<const std::byte> image = wanted.empty() ? cuda::gather_image() : wanted;
  if (image.empty()) return missing("this build has no kernel, nvcc was not found");
  if (driver_version < cuda::kGatherDriver) return missing("the driver is older than CUDA 12.1");
  if (!same_addresses_) return missing("its kernels cannot use the addresses of host memory");
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
// cudaMemcpyBatchAsync, sgl-project/sglang pull request 36798). So split copies until each lies in one or in none.
HostCopies::Divided HostCopies::divided(std::span<const Copy> copies) {
  Divided pieces;
  pieces.copies.reserve(copies.size());
  pieces.pinned.reserve(copies.size());
  const MutexLock lock(mutex_);
  for (Copy rest : copies) {
    while (rest.bytes > 0) {
      const auto next = pinned_.upper_bound(rest.host);
      uint64_t undivided = next == pinned_.end() ? rest.bytes : static_cast<uint64_t>(next->first - rest.host);
      bool pinned = false;
      if (next != pinned_.begin()) {
        const auto& [base, size] = *std::prev(next);
        pinned = rest.host < base + size;
        if (pinned) undivided = static_cast<uint64_t>(base + size - rest.host);
      }
      Copy piece = rest;
      piece.bytes = std::min(rest.bytes, undivided);
      pieces.copies.push_back(piece);
      pieces.pinned.push_back(pinned);
      pieces.pinned_copies += pinned ? 1 : 0;
      rest.device += piece.bytes;
      rest.host += piece.bytes;
      rest.bytes -= piece.bytes;
    }
  }
  return pieces;
}

bool HostCopies::gathers(const Divided& pieces) const {
  const size_t count = pieces.copies.size();
  if (module_ == nullptr || count < 2 || pieces.pinned_copies < count) return false;
  uint64_t bytes = 0;
  for (const Copy& copy : pieces.copies) bytes += copy.bytes;
  return bytes / count < gather_below_bytes_;
}

Status HostCopies::gather(CUstream stream, Direction direction, std::span<const Copy> copies) {
  cuda::GatherArguments arguments;
  void* parameters[] = {&arguments};  // the launch copies them
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
      const auto gone = pinned_.find(base);
      (void)::madvise(base, gone->second, MADV_DOFORK);
      pinned_.erase(gone);
    } else if (first) {
      first = cuda_error(driver_, result, "unpinning host memory");
    }
  }
  return first;
}

}  // namespace torpor
