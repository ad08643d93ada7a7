// SPDX-License-Identifier: Apache-2.0
// BatchCopier: what one thread of a lane works with: a stream of the device, and two places in staging memory, so that
// the copies of one batch run while the batch before is written, and the next is read and checked.
//
// Down: copied, proven by an event, digest taken (in the same pass where the device can, else of the host copy), put
// into the store. Up: read, its digest checked, and only then copied; out of memory the digest is taken in the pass of
// the copy where the device can, and a wrong one fails the chunk. A batch of chunks is one list of copies with one
// event; if that fails, its chunks are tried one by one, so that one marks no other (I5). Between stores: the digest is
// checked in the memory of the one, and from there put into the other.
//
// Threads: one at a time. Failure: want of memory fails the batch, and no copy is left running by it. After a copy
// that is not proven over, `quarantined` is true, staging memory and digests are kept for ever, and nothing more is
// copied.
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

// The same error without its words where there is no memory for them.
Status copied(const Error& error) noexcept;

class BatchCopier {
 public:
  // All outlive the result.
  static Result<std::unique_ptr<BatchCopier>> create(DeviceMemory& device, HostArena& arena,
                                                     std::atomic<bool>& quarantined);
  ~BatchCopier();

  // Reads and checks where that is the way, and gives the copies to the device. Precondition: under_way() < 2. False:
  // there is no staging memory while another batch is under way; finish() that and call again. `batch` stays until it
  // is finished. Throws nothing.
  bool begin(const Job& job, std::span<ChunkTransfer> batch);
  // Waits for the oldest batch, stores it where that is the way, and fills outcome and status of its chunks. How its
  // copies ended. Throws nothing.
  DrainResult finish();
  int under_way() const { return static_cast<int>(begun_ - finished_); }
  void release_staging();  // precondition: under_way() == 0
  // Staging memory for the two batches, which stays: what has room there never fails for want of it. Empty: none does.
  // Precondition: under_way() == 0
  void keep_staging(std::array<HostArena::Span, 2> kept);
  uint64_t kept_staging() const;  // of each

 private:
  struct Place;
  using BlockLocations = std::array<Place, 2>;
  BatchCopier(DeviceMemory& device, HostArena& arena, std::atomic<bool>& quarantined, StreamId stream,
              std::unique_ptr<BlockLocations> places);
  Status usable() const;
  Status stage(Place& place);
  Status prepare(Place& place);
  static void take_places(Place& place);
  static void read(Place& place);
  bool digested_on_the_way(const Place& place) const;
  Status check(const Place& place, size_t i) const;  // of what goes up: its size, and its digest where that is due now
  void list_copies(Place& place);
  void enqueue(Place& place, std::span<const Copy> copies);
  DrainResult prove(Place& place);
  void copy_alone(Place& place, size_t member, DrainResult& worst);
  DrainResult end_copies(Place& place);
  static void put(Place& place);
  static void find(Place& place);

  DeviceMemory& device_;
  HostArena& arena_;
  std::atomic<bool>& quarantined_;
  const StreamId stream_;
  std::unique_ptr<BlockLocations> places_;
  uint64_t begun_ = 0;
  uint64_t finished_ = 0;
};

}  // namespace torpor
