// SPDX-License-Identifier: Apache-2.0
// DeferredCopies: the KV blocks of a wake whose engine runs already. They are copied up behind it, in the order of
// need, a job at a time with the next one waiting; each block is checked, and has an end of its own. What an engine
// waits for comes next, and what it can do without does not come at all.
//
// On a thread of its own, or, without one, as far as wait() asks for, so that a run can be repeated. Owner:
// RankRestorer. Threads: the owner's, and its own.
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
  kArrived,   // its content is there, verified
  kSkipped,   // nobody wants it any more; nothing writes into the block
  kLost,      // it could not be read, or was damaged; nothing writes into the block any more
  kUnproven,  // a copy may still write into it: it must never be used again
};
struct DeferredArrival {
  int32_t block = -1;
  BlockArrival how = BlockArrival::kLost;
};

enum class DeferredWait : uint8_t {
  kNone,
  kSome,  // for the next ones, if there are any to come
  kAll,
};

class DeferredCopies {
 public:
  struct Part {  // one job; all chunks are KV blocks
    RecordStore* tier = nullptr;
    std::vector<SavedChunk> chunks;
    std::vector<ChunkPlan> plans;  // of each
    bool alone = false;            // staging memory is short: no other job of these beside it
  };

  // Transfers and tiers outlive it.
  DeferredCopies(TransferEngine& transfers, std::vector<Part> parts, bool own_thread);
  ~DeferredCopies();  // what is not begun is lost, and nothing of it runs any more

  void prefer(std::span<const int32_t> blocks) noexcept;  // they come next, with what is in the same jobs
  void skip(std::span<const int32_t> blocks) noexcept;    // those not begun end here; the others are about to
  void wait(DeferredWait wait, size_t seen);
  // Those that have ended, in that order, from the `seen`-th on.
  std::vector<DeferredArrival> from(size_t seen) const;
  std::string why() const;  // the first of them was lost; empty: none was
  size_t total() const { return total_; }
  bool finished() const;
  void cancel() noexcept;  // what is not begun is lost

 private:
  struct Progress {  // of a part
    bool begun = false;
    bool preferred = false;
    std::vector<uint8_t> ended{};  // of each chunk
  };
  struct Begun {
    size_t part = 0;
    JobId id{};
    std::vector<size_t> chunks{};  // of the part
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
  std::unordered_map<int32_t, Place> places_;  // of each block
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Progress> progress_ TORPOR_GUARDED_BY(mutex_);  // of each part
  std::vector<DeferredArrival> ended_ TORPOR_GUARDED_BY(mutex_);
  std::string why_ TORPOR_GUARDED_BY(mutex_);
  bool cancelled_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace torpor
