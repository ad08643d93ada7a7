// SPDX-License-Identifier: Apache-2.0
#include "allocator/cuda/streams.h"

#include <fmt/core.h>

#include "allocator/cuda/context.h"

namespace torpor {

bool CudaStreams::end_all() {
  std::map<EventId, Event> events;
  std::map<StreamId, CUstream> streams;
  std::vector<CUevent> leftover;
  {
    const MutexLock lock(mutex_);
    events.swap(events_);
    streams.swap(streams_);
    leftover.swap(leftover_events_);
  }
  for (const CUevent event : leftover) (void)twice([&] { return driver_.cuEventDestroy(event); });
  for (const auto& [id, event] : events) (void)twice([&] { return driver_.cuEventDestroy(event.event); });
  bool idle = true;
  for (const auto& [id, stream] : streams) idle = end(stream) == CUDA_SUCCESS && idle;
  return idle;
}

Result<StreamId> CudaStreams::create() {
  std::map<StreamId, CUstream> made;
  const auto id = static_cast<StreamId>(++last_id_);
  CUstream& stream = made[id];
  TORPOR_CUDA_TRY(driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "creating a stream on {}", kind_);
  const MutexLock lock(mutex_);
  streams_.merge(made);
  return id;
}

Status CudaStreams::destroy(StreamId id) {
  const CUstream stream = find(id);
  if (stream == nullptr) return unknown_id("stream", static_cast<uint64_t>(id));
  TORPOR_CUDA_TRY(end(stream), "ending a stream of {}", kind_);
  const MutexLock lock(mutex_);
  streams_.erase(id);
  return ok();
}

Result<EventId> CudaStreams::record(StreamId id) {
  const CUstream stream = find(id);
  if (stream == nullptr) return unknown_id("stream", static_cast<uint64_t>(id));
  std::map<EventId, Event> made;
  const auto event_id = static_cast<EventId>(++last_id_);
  CUevent& event = made[event_id].event;
  made[event_id].stream = stream;
  TORPOR_CUDA_TRY(driver_.cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
                  "creating an event on {}", kind_);
  if (const CUresult result = driver_.cuEventRecord(event, stream); result != CUDA_SUCCESS) {
    discard(event);
    return cuda_error(driver_, result, fmt::format("recording an event on {}", kind_));
  }
  const MutexLock lock(mutex_);
  events_.merge(made);
  return event_id;
}

DrainResult CudaStreams::wait(EventId id) {
  Event waited;
  {
    const MutexLock lock(mutex_);
    const auto found = events_.find(id);
    if (found == events_.end()) return {Drain::kDrainedWithError, unknown_id("event", static_cast<uint64_t>(id))};
    waited = found->second;
    events_.erase(found);
  }
  const Current current(driver_, context_);
  const CUresult result =
      current.result() == CUDA_SUCCESS ? driver_.cuEventSynchronize(waited.event) : current.result();
  DrainResult drained;
  if (result != CUDA_SUCCESS) {
    drained = empty(waited.stream);
    if (drained.drain == Drain::kCompleted) drained.drain = Drain::kDrainedWithError;
    drained.error = cuda_error(driver_, result, fmt::format("waiting for copies on {}", kind_));
  }
  discard(waited.event);
  return drained;
}

DrainResult CudaStreams::drain(StreamId id) {
  const CUstream stream = find(id);
  if (stream == nullptr) return {Drain::kDrainedWithError, unknown_id("stream", static_cast<uint64_t>(id))};
  return empty(stream);
}

DrainResult CudaStreams::empty(CUstream stream) {
  const Current current(driver_, context_);
  const CUresult result =
      current.result() == CUDA_SUCCESS ? twice([&] { return driver_.cuStreamSynchronize(stream); }) : current.result();
  if (result == CUDA_SUCCESS) return {};
  return {Drain::kUnproven, cuda_error(driver_, result, fmt::format("waiting for a stream of {}", kind_))};
}

void CudaStreams::discard(CUevent event) {
  const CUresult result = twice([&] { return driver_.cuEventDestroy(event); });
  if (result == CUDA_SUCCESS || is_sticky(result)) return;
  const MutexLock lock(mutex_);
  leftover_events_.push_back(event);
}

CUresult CudaStreams::end(CUstream stream) {
  const CUresult result = twice([&] { return driver_.cuStreamSynchronize(stream); });
  return result == CUDA_SUCCESS ? twice([&] { return driver_.cuStreamDestroy(stream); }) : result;
}

CUstream CudaStreams::find(StreamId id) {
  const MutexLock lock(mutex_);
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : found->second;
}

}  // namespace torpor
