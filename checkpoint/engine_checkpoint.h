// EngineCheckpoint and SchedulerCheckpoint: everything of a sleeping engine except the bytes of its memory.
//
// Values only; the structs of the interruptible-inference design. encode/decode turn them into the sections of a
// checkpoint: Cereal through a bounded archive, so a hostile or damaged section is an error, never a large allocation.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/value.h"
#include "kvcache/kv_snapshot.h"
#include "scheduler_state/scheduler_snapshot.h"

namespace torpor {

// Names and values that must be equal for tokens to be equal.
using Fingerprint = std::map<std::string, std::string>;

// kIncompatible names every field that differs, with both values.
Status compare_fingerprints(const Fingerprint& checkpoint, const Fingerprint& engine);

struct SchedulerCheckpoint {
  SchedulerSnapshot scheduler;
  KvSnapshot kv;
  std::vector<WorkerSnapshot> workers;  // by rank
  friend bool operator==(const SchedulerCheckpoint&, const SchedulerCheckpoint&) = default;

  // Each part, and between the parts: tables name known requests, computed tokens lie within a request's blocks, rows
  // name known or finished requests. kCorruption with the first contradiction.
  Status validate() const;
};

struct EngineCheckpoint {
  Fingerprint fingerprint;
  SchedulerCheckpoint state;
  Value outputs;  // the front end's part: what was already delivered of each request
  friend bool operator==(const EngineCheckpoint&, const EngineCheckpoint&) = default;
};

// One named section of a checkpoint before it is stored.
struct Section {
  std::string name;  // "fingerprint", "requests", "queues", "blocks", "prefix_index", "workers", "outputs"
  Bytes bytes;
  friend bool operator==(const Section&, const Section&) = default;
};

std::vector<Section> encode(const EngineCheckpoint& checkpoint);
// The reverse. kCorruption for a section that is missing, damaged or has bytes left over. Does not call validate().
Result<EngineCheckpoint> decode(std::span<const Section> sections);

}  // namespace torpor
