// SPDX-License-Identifier: Apache-2.0
// OperationContext: what the operations on one engine share, and what one leaves for the next.
//
// Owner: SleepController. The operation in progress alone uses it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/deferred_blocks.h"
#include "engine/engine_checkpoints.h"
#include "engine/engine_parts.h"

namespace torpor {

// One or several sleeps leave this for the wake after them.
struct SleepInForce {
  std::vector<std::string> tags{};  // whose memory is away
  bool preserved = false;           // the requests are kept
  bool derived_released = false;    // EngineHooks::rebuild_derived() is due
  std::vector<WorkerSnapshot> workers{};
  std::vector<std::string> without_content{};  // tags that will come back empty
  // By need, the saved KV blocks that a post-copy wake brings back behind the engine.
  std::vector<int32_t> deferrable_blocks{};
  std::vector<uint64_t> weights_writes{};      // by rank, when the engine fell asleep (writes_of_weights)
  std::vector<std::string> weights_digests{};  // by rank, of the weights that the kept KV is of; empty: not known
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
  // The last wake over weights that were written had `old_kv`: expect it of the next one.
  bool wakes_name_old_kv = false;
  bool took_checkpoint = false;  // in a wake, for good or to throw it away
  bool wake_is_held = false;     // a restored checkpoint waits for its front end
};

}  // namespace torpor
