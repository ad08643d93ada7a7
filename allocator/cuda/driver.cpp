// SPDX-License-Identifier: Apache-2.0
#include "allocator/cuda/driver.h"

#include <dlfcn.h>

#include <fmt/core.h>

namespace torpor {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

Error missing(std::string what, std::string next_step) {
  return Error{.code = Code::kUnsupported,
               .what = std::move(what),
               .next_step = std::move(next_step),
               .origin = Origin::kDevice};
}

PFN_cuGetProcAddress_v11030 look_up_function = nullptr;  // set once the library is loaded

void* look_up(const char* name, int version) {
  void* found = nullptr;
  if (look_up_function == nullptr ||
      look_up_function(name, &found, version, CU_GET_PROC_ADDRESS_DEFAULT) != CUDA_SUCCESS)
    return nullptr;
  return found;
}

Result<CudaDriver> load() {
  // Never closed: its threads outlive every user of it.
  void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return missing(
        fmt::format("there is no NVIDIA driver here: {}", ::dlerror()),
        "install the driver; in a container, start it with the GPU given to it (--gpus, NVIDIA Container Toolkit)");
  }
  // Use the driver's own look-up, with the oldest signature that suffices; newer drivers keep it.
  look_up_function = reinterpret_cast<PFN_cuGetProcAddress_v11030>(::dlsym(library, "cuGetProcAddress"));
  if (look_up_function == nullptr)
    return missing(fmt::format("{} has no cuGetProcAddress", kLibrary), "install a driver for CUDA 11.4 or newer");
  CudaDriver driver;
  const auto find = [](const char* name, int version, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(look_up(name, version));
    return function != nullptr;
  };
#define TORPOR_CUDA_FIND(function, version)       \
  if (!find(#function, version, driver.function)) \
    return missing(fmt::format("the NVIDIA driver has no {}", #function), "install a driver for CUDA 11.4 or newer");
  TORPOR_CUDA_FUNCTIONS(TORPOR_CUDA_FIND)
#undef TORPOR_CUDA_FIND
#define TORPOR_CUDA_TRY(function, version) find(#function, version, driver.function);
  TORPOR_CUDA_OPTIONAL_FUNCTIONS(TORPOR_CUDA_TRY)
#undef TORPOR_CUDA_TRY
  if (const CUresult result = driver.cuInit(0); result != CUDA_SUCCESS) {
    Error error = cuda_error(driver, result, "starting the NVIDIA driver");
    error.code = Code::kUnsupported;
    error.next_step = "see whether nvidia-smi works here";
    return error;
  }
  int devices = 0;
  if (driver.cuDeviceGetCount(&devices) != CUDA_SUCCESS || devices == 0) {
    return missing("the NVIDIA driver finds no GPU", "see whether nvidia-smi shows one, and CUDA_VISIBLE_DEVICES");
  }
  return driver;
}

}  // namespace

Result<const CudaDriver*> cuda_driver() {
  static const Result<CudaDriver> loaded = load();
  if (!loaded) return loaded.error();
  return &*loaded;
}

void* cuda_function(const char* name, int version) { return cuda_driver() ? look_up(name, version) : nullptr; }

Error cuda_error(const CudaDriver& driver, CUresult result, std::string_view doing) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "an unknown error";
  if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "no description";
  if (result == CUDA_ERROR_DEINITIALIZED) {  // the driver cannot name it any more
    name = "CUDA_ERROR_DEINITIALIZED";
    text = "the driver has shut down, the process is ending";
  }
  Error error{.code = Code::kDevice,
              .what = fmt::format("{}: {} ({}, {})", doing, text, name, static_cast<int>(result)),
              .next_step = "see the driver's log (dmesg, Xid)",
              .origin = Origin::kDevice,
              .native = static_cast<int64_t>(result)};
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    error.code = Code::kResourceExhausted;
    error.next_step = "free device memory and call again";
  } else if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) {
    error.code = Code::kUnavailable;
    error.next_step = "call again when no CUDA graph is being captured";
  }
  return error;
}

}  // namespace torpor
