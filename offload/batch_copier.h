// SPDX-License-Identifier: Apache-2.0
// BatchCopier: the tools of one thread of a lane: a stream of the device, and staging memory for two batches. The
// copies of one batch run while the thread writes the batch before it, or reads and checks the next one.
//
// Save (device to store): copy, prove the copy by an event, take the digest, put the bytes into the store. The
// device takes the digest in the pass of the copy if it can; else the host copy is hashed. Restore (store to device):
// read, check the digest, and only then copy. For a store in memory the device takes the digest in the pass of the copy
// if it can; a wrong digest fails the chunk. Move (store to store): check the digest in the memory of the source, then
// put the bytes into the target.
//
// The chunks of a batch are one list of copies with one event. If that fails, the chunks are copied one by one, so that
// a failed chunk marks no other (I5).
//
// Threads: one at a time. Failure: if memory runs out, the batch fails and none of its copies is left running. After a
// copy that is not proven finished, `quarantined` is true, staging memory and digests are kept until the process ends,
// and nothing more is copied.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "allocator/device_memory.h"
#include "allocator/host_arena.h"
#include "base/status.h"
#include "offload/transfer_job.h"

namespace torpor {

Error quarantined_error();

// Return a copy of `error`; without its texts if there is no memory for them.
Status copied(const Error& error) noexcept;

class BatchCopier {
 public:
  // The arguments outlive the result. The copier sets `quarantined` after a copy that is not proven finished.
  static Result<std::unique_ptr<BatchCopier>> create(DeviceMemory& device, HostArena& arena,
                                                     std::atomic<bool>& quarantined);
  ~BatchCopier();

  // Begin a batch: read and check its bytes (kRestore, kMove), wait for Job::after, and give the copies to the device.
  // Return false if there is no staging memory while another batch is under way: call finish() and try again.
  // Precondition: under_way() < 2. `batch` stays valid until it is finished. Throws nothing.
  bool begin(const Job& job, std::span<ChunkTransfer> batch);
  // Wait for the oldest batch, put its bytes into the store (kSave, kMove), and set outcome and status of its chunks.
  // Return how its copies ended. Precondition: under_way() > 0. Throws nothing.
  DrainResult finish();
  int under_way() const { return static_cast<int>(begun_ - finished_); }
  void release_staging();  // precondition: under_way() == 0
  // Keep `kept` as staging memory for the two batches: a batch that fits never fails because the arena is full. Empty
  // spans: keep none. Precondition: under_way() == 0
  void keep_staging(std::array<HostArena::Span, 2> kept);
  uint64_t kept_staging() const;  // bytes, for each of the two batches

 private:
  struct StagingSlot;
  using StagingSlots = std::array<StagingSlot, 2>;
  BatchCopier(DeviceMemory& device, HostArena& arena, std::atomic<bool>& quarantined, StreamId stream,
              std::unique_ptr<StagingSlots> slots);
  Status usable() const;
  Status stage(StagingSlot& place);
  Status prepare(StagingSlot& place);
  static void take_places(StagingSlot& place);
  static void read(StagingSlot& place);
  bool digested_on_the_way(const StagingSlot& place) const;
  Status check(const StagingSlot& place, size_t i) const;  // size, and digest if it is due now
  void list_copies(StagingSlot& place);
  void enqueue(StagingSlot& place, std::span<const Copy> copies);
  DrainResult prove(StagingSlot& place);
  void copy_alone(StagingSlot& place, size_t member, DrainResult& worst);
  DrainResult end_copies(StagingSlot& place);
  static void put(StagingSlot& place);
  static void find(StagingSlot& place);

  DeviceMemory& device_;
  HostArena& arena_;
  std::atomic<bool>& quarantined_;
  const StreamId stream_;
  std::unique_ptr<StagingSlots> slots_;
  uint64_t begun_ = 0;
  uint64_t finished_ = 0;
};

}  // namespace torpor
