// SPDX-License-Identifier: Apache-2.0
// OperationContext: what the operations on one engine share, and what one leaves for the next. It belongs to the
// operation in progress.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/deferred_blocks.h"
#include "engine/engine_checkpoints.h"
#include "engine/engine_parts.h"

namespace torpor {

// What a sleep, or several, leave for the wake after them.
struct SleepInForce {
  std::vector<std::string> tags{};  // whose memory is away
  bool preserved = false;           // the requests are kept
  bool derived_released = false;    // EngineHooks::rebuild_derived() is due
  std::vector<WorkerSnapshot> workers{};
  std::vector<std::string> without_content{};  // tags that will come back empty
  // By need, the saved KV blocks that a post-copy wake brings back behind the engine.
  std::vector<int32_t> deferrable_blocks{};
  std::vector<uint64_t> writes{};      // of each rank's weights, when the engine fell asleep (writes_of_weights)
  std::vector<std::string> weights{};  // by rank, the digest of those that the kept KV is of; empty: it is not known
  // The checkpoint that this sleep, or this wake on hold, is of.
  std::optional<EngineCheckpoints::Generation> checkpoint{};
  Metadata metadata{};  // of that checkpoint
};

struct OperationContext {
  explicit OperationContext(const EngineParts& parts) : engine(parts), checkpoints(parts), deferred(parts) {}

  const EngineParts& engine;
  EngineCheckpoints checkpoints;
  DeferredBlocks deferred;
  SleepInForce asleep{};
  // The last wake over weights that were written was told what becomes of KV: the next one will be, too.
  bool old_kv_is_said = false;
  bool took_checkpoint = false;  // in a wake, for good or to throw it away
  bool wake_is_held = false;     // a restored checkpoint waits for its front end
};

}  // namespace torpor
