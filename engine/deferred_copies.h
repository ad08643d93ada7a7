// SPDX-License-Identifier: Apache-2.0
// DeferredCopies: copies the KV blocks of a post-copy wake while the engine already runs, in the order of need. One job
// runs and the next one is queued. Each block is verified, and ends by itself. Blocks that the engine waits for come
// next; blocks that it skips are not copied.
//
// Owner: RankRestorer. Threads: the owner's, and one of its own. Without one, wait() makes the copies, in an order that
// is the same in each run.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "offload/record_store.h"
#include "offload/transfer_engine.h"

namespace torpor {

enum class BlockArrival : uint8_t {
  kArrived,   // the content is there, verified
  kSkipped,   // the engine does not want it any more; nothing writes into the block
  kLost,      // it could not be read, or was damaged; nothing writes into the block any more
  kUnproven,  // a copy may still write into it: the block must never be used again
};
struct DeferredArrival {
  int32_t block = -1;
  BlockArrival how = BlockArrival::kLost;
};

enum class DeferredWait : uint8_t {
  kNone,
  kSome,  // until some more have ended, if any are left
  kAll,
};

class DeferredCopies {
 public:
  struct Part {  // one job; all its chunks are KV blocks
    RecordStore* tier = nullptr;
    std::vector<SavedChunk> chunks;
    std::vector<ChunkPlan> plans;  // of each chunk
    bool alone = false;            // staging memory is short: no other job runs beside it
  };

  // `transfers` and the tiers outlive this object.
  DeferredCopies(TransferEngine& transfers, std::vector<Part> parts, bool own_thread);
  ~DeferredCopies();  // blocks whose copy has not begun are lost; waits for the others

  // Copy these blocks next, with the others of their jobs.
  void prefer(std::span<const int32_t> blocks) noexcept;
  // Do not copy these blocks. Those not begun end now as kSkipped; the others end by themselves.
  void skip(std::span<const int32_t> blocks) noexcept;
  // Wait for blocks that ended beyond the first `seen`.
  void wait(DeferredWait wait, size_t seen);
  // Return the blocks that have ended, in the order of their ends, from position `seen` on.
  std::vector<DeferredArrival> from(size_t seen) const;
  std::string why() const;  // why the first lost block was lost; empty: none was
  size_t total() const { return total_; }
  void cancel() noexcept;  // blocks whose copy has not begun are lost

 private:
  struct Progress {  // of a part
    bool begun = false;
    bool preferred = false;
    std::vector<uint8_t> ended{};  // of each chunk
  };
  struct Begun {
    size_t part = 0;
    JobId id{};
    std::vector<size_t> chunks{};  // positions in the part
  };
  struct Place {
    size_t part = 0;
    size_t chunk = 0;
  };

  void run() noexcept;
  bool pace() noexcept;
  std::optional<size_t> next() noexcept;
  std::optional<Begun> begin(size_t part) noexcept;
  void end(const Begun& begun) noexcept;
  void lost(size_t part, const Error& why) noexcept;
  void end_chunk(Place place, BlockArrival how) noexcept TORPOR_REQUIRES(mutex_);

  TransferEngine& transfers_;
  const std::vector<Part> parts_;
  size_t total_ = 0;
  std::unordered_map<int32_t, Place> places_;  // by block number
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Progress> progress_ TORPOR_GUARDED_BY(mutex_);  // of each part
  std::vector<DeferredArrival> ended_ TORPOR_GUARDED_BY(mutex_);
  std::string why_ TORPOR_GUARDED_BY(mutex_);
  bool cancelled_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace torpor
