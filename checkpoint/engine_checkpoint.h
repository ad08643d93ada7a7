// SPDX-License-Identifier: Apache-2.0
// EngineCheckpoint and SchedulerCheckpoint: everything of a sleeping engine except the bytes of its memory.
//
// Values only; the structs of the interruptible-inference design. checkpoint/state_sections.h turns them into the
// sections of a checkpoint.
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

// The field of how many KV blocks an engine has. It need not be equal: scheduler_state/block_numbers.h.
inline constexpr std::string_view kNumBlocksField = "kv_num_blocks";

// kIncompatible names every field that differs, with both values.
Status compare_fingerprints(const Fingerprint& checkpoint, const Fingerprint& engine);

// The same of an engine that takes over requests with their tokens and their KV, and nothing else: fields that only
// decide how an engine computes and schedules may differ, such as its release and its sizes.
Status compare_portable(const Fingerprint& checkpoint, const Fingerprint& engine);

struct SchedulerCheckpoint {
  SchedulerSnapshot scheduler;
  KvSnapshot kv;
  std::vector<WorkerSnapshot> workers;  // by rank
  friend bool operator==(const SchedulerCheckpoint&, const SchedulerCheckpoint&) = default;

  // Each part, and between the parts: tables name known requests, computed tokens lie within a request's blocks, rows
  // name known or finished requests. kCorruption with the first contradiction.
  Status validate() const;
};

// One named section of a checkpoint before it is stored.
struct Section {
  std::string name;
  Bytes bytes;
  bool required = true;  // a reader that does not know it must refuse; otherwise it carries it along
  friend bool operator==(const Section&, const Section&) = default;
};

struct EngineCheckpoint {
  Fingerprint fingerprint;
  SchedulerCheckpoint state;
  Value outputs;                 // the front end's part: what was already delivered of each request
  Metadata metadata;             // what a user attached
  std::vector<Section> carried;  // sections of a newer writer that are not required: kept as they are
  friend bool operator==(const EngineCheckpoint&, const EngineCheckpoint&) = default;
};

}  // namespace torpor
