// SPDX-License-Identifier: Apache-2.0
// CudaStreams: a device's streams and events by number, and what is known of their work: done, done with an error, or
// not proven to be over (I3).
//
// Threads: any. The device's context must be current in every call but wait(), drain() and empty().
#pragma once

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "allocator/cuda/driver.h"
#include "allocator/device_memory.h"
#include "base/mutex.h"

namespace torpor {

class CudaStreams {
 public:
  CudaStreams(const CudaDriver& driver, CUcontext context, std::string kind)
      : driver_(driver), context_(context), kind_(std::move(kind)) {}

  // End all streams and events, with the device. False: something may still run.
  bool end_all();
  Result<StreamId> create();
  Status destroy(StreamId id);
  CUstream find(StreamId id);  // null: there is none
  Result<EventId> record(StreamId id);
  DrainResult wait(EventId id);  // ends the event
  DrainResult drain(StreamId id);
  // Wait until a stream is empty. kUnproven: it may still have work.
  DrainResult empty(CUstream stream);
  // Destroy a stream. If it is not proven to be empty it stays, because its work goes on.
  CUresult end(CUstream stream);

 private:
  struct Event {
    CUevent event = nullptr;
    CUstream stream = nullptr;
  };
  void discard(CUevent event);

  const CudaDriver& driver_;
  const CUcontext context_;
  const std::string kind_;
  std::atomic<uint64_t> last_id_ = 0;
  Mutex mutex_;  // never held while the driver is called
  std::map<StreamId, CUstream> streams_ TORPOR_GUARDED_BY(mutex_);
  std::map<EventId, Event> events_ TORPOR_GUARDED_BY(mutex_);
  // Events that the driver would not destroy; end_all() tries again.
  std::vector<CUevent> leftover_events_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
