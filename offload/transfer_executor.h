// TransferExecutor: the one way in which bytes leave device memory and come back.
//
// A chunk is copied to host memory, its completion is proven by an event, its digest is taken (in the same pass where
// the device can, else from the host copy), and it is put into a tier; on the way back the digest of the host copy must
// be right before a byte goes up. A batch of chunks is one list of copies with one event; if that fails, its chunks are
// tried one by one, so that one marks no other (I5).
//
// A transfer ends in one of three ways (Drain in allocator/device_memory.h). After kUnproven this executor keeps its
// staging memory for ever and refuses further work: quarantined() says so, and nothing may be unmapped.
//
// Threads: as many batches at once as it has workers; more callers wait for one. Want of memory fails the batch, and no
// copy is left running by it.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "allocator/device_memory.h"
#include "allocator/host_arena.h"
#include "base/mutex.h"
#include "base/status.h"
#include "offload/chunk.h"
#include "offload/tier.h"

namespace torpor {

struct TransferExecutorOptions {
  int threads = 0;  // batches at once; 0: as many as the machine has cores, at most 8
};

// One chunk on its way, and what became of it.
struct ChunkTransfer {
  const ChunkPlan* plan = nullptr;
  SavedChunk saved;  // save() fills it, restore() needs it
  Status status;
  bool unproven = false;  // its copy may still be running: never reuse either side
};

class TransferExecutor {
 public:
  // `device` and `arena` outlive the result.
  static Result<std::unique_ptr<TransferExecutor>> create(DeviceMemory& device, HostArena& arena,
                                                          TransferExecutorOptions options = {});
  ~TransferExecutor();

  // Each returns when nothing of the batch is running any more, or after kUnproven.
  void save(std::span<ChunkTransfer> batch, Tier& target);  // device -> tier
  // Tier -> device. kCorruption: the digest is wrong and no byte of that chunk went up.
  void restore(std::span<ChunkTransfer> batch, Tier& source);
  void digest(std::span<ChunkTransfer> batch);  // of what is in device memory now; into saved.digest

  int threads() const { return static_cast<int>(workers_.size()); }
  bool quarantined() const { return quarantined_; }
  Status usable() const;  // kDevice once quarantined
  // Gives staging memory that no batch uses back to the arena.
  void release_staging();

 private:
  struct Worker;
  struct Borrowed;
  TransferExecutor(DeviceMemory& device, HostArena& arena, std::vector<std::unique_ptr<Worker>> workers);
  void save_now(Worker& worker, std::span<ChunkTransfer> batch, Tier& target);
  void restore_now(Worker& worker, std::span<ChunkTransfer> batch, Tier& source);
  void digest_now(Worker& worker, std::span<ChunkTransfer> batch);
  Status copy(Worker& worker, Direction direction, std::span<const ChunkPlan* const> plans,
              std::span<const std::span<std::byte>> host, std::vector<Digest>* digests, bool& unproven);
  void copy_each(Worker& worker, Direction direction, std::span<ChunkTransfer> batch,
                 std::span<const std::span<std::byte>> host);
  // Staging for the chunks of `batch`, each at a multiple of 4096.
  Result<std::vector<std::span<std::byte>>> stage(Worker& worker, std::span<const ChunkTransfer> batch);

  DeviceMemory& device_;
  HostArena& arena_;
  const std::vector<std::unique_ptr<Worker>> workers_;
  Mutex mutex_;
  CondVar returned_;
  std::vector<Worker*> idle_ TORPOR_GUARDED_BY(mutex_);
  // Of copies that may still be running: never freed.
  std::vector<std::vector<StreamingDigest>>* const unproven_digests_ TORPOR_PT_GUARDED_BY(mutex_);
  std::atomic<bool> quarantined_ = false;
};

}  // namespace torpor
