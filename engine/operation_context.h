// SPDX-License-Identifier: Apache-2.0
// OperationContext: what the operations on one engine share, and what each leaves for the next.
//
// Owner: SleepController. Only the operation in progress uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/deferred_blocks.h"
#include "engine/engine_checkpoints.h"
#include "engine/engine_parts.h"

namespace torpor {

// The state that one or several sleeps leave for the wake after them.
struct SleepInForce {
  std::vector<std::string> tags{};  // whose memory is released
  bool preserved = false;           // the state of the requests is preserved
  bool derived_released = false;    // EngineHooks::rebuild_derived() must be called
  std::vector<WorkerSnapshot> workers{};
  std::vector<std::string> without_content{};  // tags that will come back without content
  // The saved KV blocks that a post-copy wake may defer, the most needed first.
  std::vector<int32_t> deferrable_blocks{};
  std::vector<uint64_t> weights_writes{};      // by rank, when the engine fell asleep (writes_of_weights())
  std::vector<std::string> weights_digests{};  // by rank, of the weights that computed the saved KV; empty: not known
  // The checkpoint of this sleep, or of a wake that is held.
  std::optional<EngineCheckpoints::Generation> checkpoint{};
  std::unique_ptr<File> checkpoint_lock{};  // of the checkpoint of this sleep: nobody removes it
  Metadata metadata{};                      // of that checkpoint
};

struct OperationContext {
  explicit OperationContext(const EngineParts& parts) : engine(parts), checkpoints(parts), deferred(parts) {}

  const EngineParts& engine;
  EngineCheckpoints checkpoints;
  DeferredBlocks deferred;
  SleepInForce asleep{};
  // The last wake after a write of the weights was given `old_kv`; so the next one is expected to be, too.
  bool wakes_name_old_kv = false;
  bool took_checkpoint = false;  // a wake has taken a checkpoint over, to go on from it or to discard it
  bool wake_is_held = false;     // a restored checkpoint waits for end_hold()
};

}  // namespace torpor
