// Journal: what each step of an engine changed, so that a state that was encoded once need not be encoded again.
//
// A checkpoint's STATE may have a section "journal" beside the base state: records in the order of the steps, each with
// its length and a digest that covers the record and the digest before it, so that none can be lost, repeated or
// exchanged. decode() replays it; the result is validated like any other state.
//
// Threads: none; one owner at a time.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/status.h"
#include "base/value.h"
#include "checkpoint/engine_checkpoint.h"

namespace torpor {

inline constexpr std::string_view kJournalSection = "journal";

struct Queues {
  std::vector<std::string> running;
  std::vector<std::string> waiting;
  std::vector<std::string> held;
  std::vector<std::string> finished;
  friend bool operator==(const Queues&, const Queues&) = default;
};

struct RequestStep {  // of a request that went on
  std::string id;
  RequestStatus status = RequestStatus::kRunning;
  std::vector<int32_t> output_token_ids;  // appended
  Bytes block_hashes;                     // appended
  int32_t num_computed_tokens = 0;
  int32_t num_preemptions = 0;
};

struct TableStep {
  uint32_t group = 0;
  std::string request;
  uint32_t keep = 0;            // how many of the table's blocks stay; 0 for a new one
  std::vector<int32_t> blocks;  // appended after them
  int32_t num_cached_blocks = 0;
  bool removed = false;
};

struct StateStep {
  std::vector<RequestStep> advanced;
  std::vector<RequestState> added;   // at the end of the requests
  std::vector<std::string> removed;  // of the requests
  std::optional<Queues> queues;      // if any changed
  std::vector<TableStep> tables;
  std::vector<KvBlock> blocks;                     // as they are now; with neither reference nor hash: no longer listed
  uint32_t free_taken = 0;                         // from the front of the free order
  std::vector<int32_t> free_appended;              // then at its end
  std::optional<std::vector<int32_t>> free_order;  // the whole instead, where taking and appending does not tell it
  std::vector<Bytes> prefix_removed;
  std::vector<PrefixEntry> prefix_added;                 // at the end
  std::optional<std::vector<PrefixEntry>> prefix_index;  // the whole instead
  std::optional<std::vector<ExtraHashes>> extra_hashes;
  std::optional<std::vector<WorkerSnapshot>> workers;
  std::optional<Value> scheduler_engine;
  std::optional<Value> kv_engine;
};

class Journal {
 public:
  Journal();
  void append(const StateStep& step);
  Section section() const { return {std::string(kJournalSection), bytes_, true}; }
  uint64_t steps() const { return steps_; }

 private:
  Bytes bytes_;
  Digest last_;
  uint64_t steps_ = 0;
};

// What turns `before` into `after`; for adapters that do not keep track themselves, and for tests. Takes time for the
// whole state. kUnsupported: policy or geometry of the pool differ, which no step changes.
Result<StateStep> step_between(const SchedulerCheckpoint& before, const SchedulerCheckpoint& after);

// Applies all records of a journal section. kCorruption names the record; `state` is then of no use.
Status replay_journal(std::span<const std::byte> section, SchedulerCheckpoint& state);

}  // namespace torpor
