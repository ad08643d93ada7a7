// TransferExecutor: the one way in which bytes leave device memory and come back.
//
// A chunk is copied to host memory, its completion is proven by an event, its digest is taken from the host copy, and it
// is put into a tier; on the way back the digest of the host copy must be right before a byte goes up. Several workers,
// each with its own stream and one staging buffer. The offload pipeline (policies, batches, cancellation) will sit on
// top of this class; it adds no second copy path.
//
// A transfer ends in one of three ways (Drain in allocator/device_memory.h). After kUnproven this executor keeps its
// staging memory for ever and refuses further work: quarantined() says so, and nothing may be unmapped.
//
// Threads: one operation at a time; it uses several threads inside.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "allocator/device_memory.h"
#include "allocator/host_arena.h"
#include "base/status.h"
#include "offload/chunk.h"
#include "offload/tier.h"

namespace torpor {

struct TransferExecutorOptions {
  int threads = 0;  // 0: as many as the machine has cores, at most 8
};

class TransferExecutor {
 public:
  // `device` and `arena` outlive the result.
  static Result<std::unique_ptr<TransferExecutor>> create(DeviceMemory& device, HostArena& arena, TransferExecutorOptions options = {});
  ~TransferExecutor();

  // Copies every chunk into `target` and finishes it. All or nothing: after an error the tier's content is void.
  Result<std::vector<SavedChunk>> save(std::span<const ChunkPlan> plans, Tier& target);
  // Copies every chunk of `saved` (same keys, same order as `plans`) up. kCorruption names the first chunk whose digest
  // is wrong; the device's bytes are void then.
  Status restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans, Tier& source);
  // Digests of what is in device memory now.
  Result<std::vector<Digest>> digests(std::span<const ChunkPlan> plans);

  bool quarantined() const { return quarantined_; }
  Status usable() const;  // kDevice once quarantined

 private:
  struct Worker;
  TransferExecutor(DeviceMemory& device, HostArena& arena, std::vector<std::unique_ptr<Worker>> workers);
  // Runs work(worker, index) for each index below count on all workers; the first error ends it.
  Status for_each_chunk(uint64_t count, uint64_t staging_bytes, const std::function<Status(Worker&, uint64_t)>& work);
  Status copy(Worker& worker, Direction direction, const ChunkPlan& plan, std::span<std::byte> host);

  DeviceMemory& device_;
  HostArena& arena_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<bool> quarantined_ = false;
};

}  // namespace torpor
