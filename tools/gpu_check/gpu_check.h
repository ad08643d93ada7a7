// SPDX-License-Identifier: Apache-2.0
// Checks and figures of torpor on a machine with an NVIDIA GPU, over a table of the driver's functions.
//
// Owner: the caller, who keeps the table. Threads: one run at a time. Failure: a check that fails is a row, and the
// others run; only a GPU that cannot be used at all throws.
#pragma once

#include <functional>

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
  double seconds = 300;  // when they are used up no check begins, and a check that runs begins no other round
};

// Called with the machine, then with each row when it is known.
using OnRow = std::function<void(const nlohmann::ordered_json&)>;

// Return one object: the machine, then a row for each check with "verdict" ("passed", "failed" or "not here") and its
// figures. Rates are GB/s, medians.
nlohmann::ordered_json run(const CudaDriver& driver, const ExtraFunctions& extra, const Options& options,
                           const OnRow& on_row = {});

}  // namespace torpor::gpu_check
