// What a machine with an NVIDIA GPU can show of torpor: checks and figures, over a table of the driver's functions.
#pragma once

#include <nlohmann/json.hpp>

#include "allocator/cuda/driver.h"

namespace torpor::gpu_check {

// Functions that only these checks need; all null: what needs them is skipped.
struct ExtraFunctions {
  PFN_cuMemHostAlloc_v2020 host_alloc = nullptr;
  PFN_cuMemFreeHost_v2000 free_host = nullptr;
  PFN_cuMemcpyDtoDAsync_v3020 copy_on_device = nullptr;
  PFN_cuStreamBeginCapture_v10010 begin_capture = nullptr;
  PFN_cuStreamEndCapture_v10000 end_capture = nullptr;
  PFN_cuGraphInstantiateWithFlags_v11040 instantiate = nullptr;
  PFN_cuGraphLaunch_v10000 launch = nullptr;
  PFN_cuGraphExecDestroy_v10000 destroy_executable = nullptr;
  PFN_cuGraphDestroy_v10000 destroy_graph = nullptr;
};

struct Options {
  int device = 0;
  uint64_t bytes = uint64_t{8} << 30;         // moved in each throughput check
  uint64_t cycle_bytes = uint64_t{32} << 30;  // asleep and awake in each of the cycles
  int cycles = 1000;
  int graph_cycles = 20;
  int rounds = 5;
};

// One object: the machine, then a row for each check with "passed" and its figures. Rates are GB/s, medians.
nlohmann::ordered_json run(const CudaDriver& driver, const ExtraFunctions& extra, const Options& options);

}  // namespace torpor::gpu_check
