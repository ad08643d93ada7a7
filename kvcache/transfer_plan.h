// SPDX-License-Identifier: Apache-2.0
// TransferPlan: the moves that the scheduler orders, the same bytes for each rank. TransferReport: the result on one
// rank. Values; flat arrays, so that a plan of a hundred blocks costs a few allocations.
//
// Both are sent between processes. decode() trusts nothing: it checks sizes, numbers and names before it allocates
// memory for them (kCorruption), and an accepted message encodes to the same bytes again. The worker checks what only a
// rank can know, such as the number of slots.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/value.h"
#include "kvcache/block_locations.h"
#include "offload/outcome.h"
#include "offload/transfer_priority.h"

namespace torpor {

// A block that a rank's durable store had at the start. Lists of them are grouped by segment, the oldest first.
struct RecoveredBlock {
  BlockKey key;
  int64_t segment = 0;
};

// The scheduler's slot for a recovered block; -1: not needed.
struct AdoptedBlock {
  BlockKey key;
  Slot slot = -1;
};

enum class PlanKind : uint8_t {
  kPut,   // device blocks `from` into slots `to` of `store`
  kGet,   // slots `from` of `store` into device blocks `to`
  kMove,  // slots `from` of `store` into slots `to` of `other`; on disk also within the store
  kFind,  // look up keys in the remote store; `from` and `to` mean nothing
  kSkip,  // a kGet that was cancelled: no byte moves, and each block ends as kCancelled
};
std::string_view name(PlanKind kind);  // "put", "get", "move", "find", "skip"

// A planned job is committed: on every rank it ends with an outcome for each of its blocks.
struct PlannedJob {
  uint64_t id = 0;  // never reused
  PlanKind kind = PlanKind::kPut;
  StoreId store = StoreId::kHost;
  StoreId other = StoreId::kHost;  // kMove: target; else the same as `store`
  TransferPriority priority = TransferPriority::kOffload;
  uint32_t first = 0;  // its blocks are [first, first + count) of `from` and `to`
  uint32_t count = 0;
  // Return whether a request waits for the job.
  bool of_load() const { return kind == PlanKind::kGet || kind == PlanKind::kSkip; }
  StoreId target() const { return kind == PlanKind::kMove ? other : store; }
  // Return whether the job has keys: to store beside the bytes, or to look up. `keys` has them job after job.
  bool keyed() const {
    if (kind == PlanKind::kSkip) return false;
    const bool reads_remote = (kind == PlanKind::kGet || kind == PlanKind::kMove) && store == StoreId::kRemote;
    return reads_remote || (kind != PlanKind::kGet && target() != StoreId::kHost);
  }
  friend bool operator==(const PlannedJob&, const PlannedJob&) = default;
};

// A request's load is over on a rank when all jobs that name the request have ended there.
struct PlannedLoad {
  std::string request;
  uint64_t job = 0;
  friend bool operator==(const PlannedLoad&, const PlannedLoad&) = default;
};

struct TransferPlan {
  uint64_t number = 0;           // 1, 2, …: a rank runs each once, even if it is sent twice
  std::vector<Dropped> dropped;  // to be forgotten before the jobs
  std::vector<PlannedJob> jobs;  // their blocks follow each other in `from` and `to`
  std::vector<int32_t> from;
  std::vector<int32_t> to;
  std::vector<BlockKey> keys;
  std::vector<PlannedLoad> loading;

  bool empty() const { return dropped.empty() && jobs.empty(); }  // it need not be sent
  void clear();                                                   // keeps its memory
  // Add a job. The caller appends its blocks to `from` and `to`, and to `keys` if it is keyed().
  PlannedJob& add(uint64_t id, PlanKind kind, StoreId store, TransferPriority priority);
  Bytes encode() const;
  static Result<TransferPlan> decode(std::span<const uint8_t> bytes);
  friend bool operator==(const TransferPlan&, const TransferPlan&) = default;
};

struct JobReport {
  uint64_t id = 0;
  // The outcomes of its blocks are [first, first + count) of `outcomes`; count 0: all were transferred.
  uint32_t first = 0;
  uint32_t count = 0;
  Code code = Code::kInternal;  // error of the first block that failed
  std::string cause;            // text of that error
  friend bool operator==(const JobReport&, const JobReport&) = default;
};

struct StoreReport {  // totals since the worker began
  StoreId store = StoreId::kHost;
  bool accepting = true;  // false: its medium failed, nothing is put for a while
  uint64_t put_bytes = 0;
  uint64_t got_bytes = 0;
  uint64_t write_errors = 0;
  uint64_t read_errors = 0;
  friend bool operator==(const StoreReport&, const StoreReport&) = default;
};

struct TransferReport {
  int32_t rank = 0;
  std::vector<JobReport> jobs;
  std::vector<BlockOutcome> outcomes;
  std::vector<StoreReport> stores;

  bool empty() const { return jobs.empty() && stores.empty(); }
  Bytes encode() const;
  static Result<TransferReport> decode(std::span<const uint8_t> bytes);
  friend bool operator==(const TransferReport&, const TransferReport&) = default;
};

inline constexpr size_t kMostCauseBytes = 512;

}  // namespace torpor
