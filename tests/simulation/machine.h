// SPDX-License-Identifier: Apache-2.0
// Machine: the devices and files of a simulated run. Their faults are inputs of the run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocator/host_device.h"
#include "console/reference_run.h"
#include "tests/simulation/scenario.h"
#include "tests/support/faulty_device.h"
#include "tests/support/faulty_file_system.h"

namespace torpor::test {

class Machine {
 public:
  enum Input : uint64_t { kNone, kUnproven, kDevice, kFile };
  explicit Machine(const Scenario& scenario) : scenario_(scenario) {}
  console::RunHost host(const std::string& directory) {
    return {.files = files_,
            .directory = directory,
            .devices = [this](int ranks) { return devices(ranks); },
            .other = [this](uint64_t a, uint64_t b) { become(a, b); }};
  }
  bool fired() { return device_->fired() || files_.plan.fired(); }

 private:
  Result<std::vector<std::unique_ptr<DeviceMemory>>> devices(int ranks) {
    std::vector<std::unique_ptr<DeviceMemory>> made;
    for (int rank = 0; rank < ranks; ++rank) {
      TORPOR_ASSIGN_OR_RETURN(auto memory, make_host_device({.defer_copies = scenario_.late_copies,
                                                             .shuffle_seed = scenario_.shuffle_seed}));
      auto device = std::make_unique<FaultyDevice>(std::move(memory));
      device_ = device.get();  // faults hit the last rank
      made.push_back(std::move(device));
    }
    return made;
  }
  void become(uint64_t fault, uint64_t how) {
    const bool for_ever = (how & 1) != 0;
    if (fault == kUnproven) device_->drain_as(Drain::kUnproven);
    if (fault == kDevice) device_->fail_at(how >> 1, for_ever);
    if (fault == kFile) files_.plan.set(Fault::kError, how >> 33, static_cast<int>(how >> 1 & UINT32_MAX), for_ever);
    if (fault != kNone) return;
    device_->fail_at(0);
    device_->drain_as(Drain::kCompleted);
    files_.plan.clear();
  }
  const Scenario& scenario_;
  FaultyFileSystem files_;
  FaultyDevice* device_ = nullptr;
};

}  // namespace torpor::test
