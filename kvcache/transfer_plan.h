// SPDX-License-Identifier: Apache-2.0
// TransferPlan: what the scheduler tells all ranks to move, the same bytes for each of them; TransferReport: what
// became of it on one rank. Flat arrays, so that a plan of a hundred blocks costs a few allocations.
//
// Both cross processes. decode() believes nothing: sizes, numbers and names are checked before memory is taken for them
// (kCorruption), and what it accepts encodes to the same bytes. What only a rank can know (how many slots a store has)
// the worker checks.
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

// A block that a rank's durable store had at the start. Those of one segment follow each other, the oldest segment
// first.
struct RecoveredBlock {
  BlockKey key;
  int64_t segment = 0;
};

// The slot under which the scheduler knows a recovered block from now on; -1: nobody needs it.
struct AdoptedBlock {
  BlockKey key;
  Slot slot = -1;
};

enum class PlanKind : uint8_t {
  kPut,   // device blocks `from` into slots `to` of `store`
  kGet,   // slots `from` of `store` into device blocks `to`
  kMove,  // slots `from` of `store` into slots `to` of `other`; on disk also into others of its own
  kFind,  // whether the remote store has the blocks of these keys; `from` and `to` mean nothing
};
std::string_view name(PlanKind kind);  // "put", "get", "move", "find"

// A job in a plan is committed: it ends with an outcome for each of its blocks, on every rank.
struct PlannedJob {
  uint64_t id = 0;  // never used for another one
  PlanKind kind = PlanKind::kPut;
  StoreId store = StoreId::kHost;
  StoreId other = StoreId::kHost;  // kMove only; else as `store`
  TransferPriority priority = TransferPriority::kOffload;
  uint32_t first = 0;  // its blocks: [first, first + count) of `from` and `to`
  uint32_t count = 0;
  StoreId target() const { return kind == PlanKind::kMove ? other : store; }
  // Its blocks' keys are written beside their bytes, or are what the remote store is asked for; jobs have theirs in
  // `keys`, one behind the other.
  bool keyed() const { return kind == PlanKind::kGet ? store == StoreId::kRemote : target() != StoreId::kHost; }
  friend bool operator==(const PlannedJob&, const PlannedJob&) = default;
};

// The request's load is over on a rank when all jobs that are named with it are.
struct PlannedLoad {
  std::string request;
  uint64_t job = 0;
  friend bool operator==(const PlannedLoad&, const PlannedLoad&) = default;
};

struct TransferPlan {
  uint64_t number = 0;           // 1, 2, …: a rank runs each once, also if it is sent again
  std::vector<Dropped> dropped;  // before the jobs
  std::vector<PlannedJob> jobs;  // of which the blocks follow each other
  std::vector<int32_t> from;
  std::vector<int32_t> to;
  std::vector<BlockKey> keys;
  std::vector<PlannedLoad> loading;

  bool empty() const { return dropped.empty() && jobs.empty(); }  // then it need not be sent
  void clear();                                                   // but for its memory
  // Adds a job whose blocks the caller adds to from, to and, if it is keyed(), keys.
  PlannedJob& add(uint64_t id, PlanKind kind, StoreId store, TransferPriority priority);
  Bytes encode() const;
  static Result<TransferPlan> decode(std::span<const uint8_t> bytes);
  friend bool operator==(const TransferPlan&, const TransferPlan&) = default;
};

struct JobReport {
  uint64_t id = 0;
  uint32_t first = 0;  // its blocks' outcomes: [first, first + count) of `outcomes`; none: all are transferred
  uint32_t count = 0;
  Code code = Code::kInternal;  // of the first block that failed
  std::string cause;            // and what was wrong there
  friend bool operator==(const JobReport&, const JobReport&) = default;
};

struct StoreReport {  // since the worker began
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
