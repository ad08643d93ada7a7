// SPDX-License-Identifier: Apache-2.0
// ReleaseGate: releases the memory of saved chunks while other chunks are copied.
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
  // These chunks are saved: release the memory that is not needed any more. An error ends the sleep.
  virtual Status on_saved(std::span<const ChunkPlan> chunks) = 0;
  // Return the size of a job, in bytes. The chunks of one job are saved together.
  virtual uint64_t job_bytes() const = 0;
};

}  // namespace torpor
