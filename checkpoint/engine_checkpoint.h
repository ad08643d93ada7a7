// SPDX-License-Identifier: Apache-2.0
// CapturedState: what EngineHooks::capture() returns: the state of scheduler, KV bookkeeping and workers, as values,
// without the bytes of memory. EngineCheckpoint: this state with what a checkpoint needs beside it.
// checkpoint/state_sections.h turns it into the sections of a checkpoint.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "base/value.h"
#include "checkpoint/manifest.h"
#include "checkpoint/metadata.h"
#include "scheduler_state/kv_snapshot.h"
#include "scheduler_state/scheduler_snapshot.h"

namespace torpor {

// Field with the engine's number of KV blocks. It may differ: scheduler_state/block_numbers.h.
inline constexpr std::string_view kNumBlocksField = "kv_num_blocks";

// Compare all fields. kIncompatible: the error names every field that differs, with both values.
Status compare_fingerprints(const Fingerprint& checkpoint, const Fingerprint& engine);

// Compare the fields that matter to an engine that takes over only requests, with their tokens and KV. Fields that
// decide how an engine computes and schedules may differ, such as its release and its sizes: it can go on with the
// tokens and the KV, although it would have computed them with other rounding. Errors: as above.
Status compare_portable(const Fingerprint& checkpoint, const Fingerprint& engine);

struct CapturedState {
  SchedulerSnapshot scheduler;
  KvSnapshot kv;
  std::vector<WorkerSnapshot> workers;  // by rank
  friend bool operator==(const CapturedState&, const CapturedState&) = default;

  // Check each part, and the parts against each other: tables name known requests, computed tokens lie within a
  // request's blocks, rows name known or finished requests. kCorruption: the first contradiction.
  Status validate() const;
};

// A named section of a checkpoint before it is stored.
struct Section {
  std::string name;
  Bytes bytes;
  bool required = true;  // a reader that does not know it must refuse the checkpoint; if false, it carries it along
  friend bool operator==(const Section&, const Section&) = default;
};

struct EngineCheckpoint {
  Fingerprint fingerprint;
  CapturedState state;
  Value outputs;                 // the front end's part: the output of each request that was already delivered
  Metadata metadata;             // attached by a user
  std::vector<Section> carried;  // optional sections of a newer writer, unchanged
  friend bool operator==(const EngineCheckpoint&, const EngineCheckpoint&) = default;
};

}  // namespace torpor
