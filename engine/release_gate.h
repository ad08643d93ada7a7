// SPDX-License-Identifier: Apache-2.0
// ReleaseGate: is told which chunks are saved, so that their memory can go while others are copied.
//
// Owner: one order to a rank. Threads: one calls it.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "offload/chunk.h"

namespace torpor {

class ReleaseGate {
 public:
  virtual ~ReleaseGate() = default;
  // These chunks are saved: release what is not needed any more. An error ends the sleep.
  virtual Status on_saved(std::span<const ChunkPlan> chunks) = 0;
  // Return the bytes of a job: its chunks are saved together.
  virtual uint64_t job_bytes() const = 0;
};

}  // namespace torpor
