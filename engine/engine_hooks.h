// SPDX-License-Identifier: Apache-2.0
// EngineHooks: what an inference engine does for the controller. Implementations: vLLM's adapter through the Python
// bindings, the reference engine, and the small engine of the tests.
//
// Threads: the controller calls the hooks one at a time, from the thread that called it; a swap within a process alone
// calls call_ranks() from one more. An operation holds only the lock that keeps other operations out;
// SleepController::fingerprint() and ledgers() hold none. So a hook must not call sleep(), wake_up() or checkpoint();
// it may call state() and is_sleeping(). Hooks translate between the engine's objects and values. They do not decide,
// copy device memory, or write files.
//
// Failure: a hook that throws has failed. The hooks that undo (resume, rebuild_derived, forget_restored) are also
// called if what they undo failed half-way or was never begun; then they do no harm.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/engine_checkpoint.h"

namespace torpor {

struct FailedRequest {  // a request that could not be restored; the others were
  std::string id;
  std::string error;
};

// The values that identify the contents of KV blocks.
struct KvContents {
  std::vector<int32_t> blocks;
  std::vector<uint64_t> versions;  // of each block
  uint64_t steps = 0;
};

// The state at one moment.
struct Moment {
  KvContents kv;  // of all blocks in the state
  // Returns all that capture() would have returned at that moment. Call it once; on any thread, also while the engine
  // runs.
  std::function<Result<CapturedState>()> read;
};

// How blocks ended that the engine holds back.
struct ArrivedBlocks {
  std::vector<int32_t> arrived{};   // the content is there
  std::vector<int32_t> lost{};      // the content will never be there; nothing writes into the block
  std::vector<int32_t> skipped{};   // as lost, but because the engine skipped them
  std::vector<int32_t> unproven{};  // a copy may still write into them: they must never be used again
};

// The KV blocks that an engine can be without for a while, so that it runs before they are back.
enum class HoldsBack : uint8_t {
  kNothing,
  kCached,  // cached blocks that no request has
  kAll,     // also blocks of requests, but not of those that run first
};

class EngineHooks {
 public:
  virtual ~EngineHooks() = default;

  // Return the names of features in use whose state cannot be preserved. Called before anything is changed.
  virtual Result<std::vector<std::string>> unsupported() = 0;
  // Return the number of requests that have not ended.
  virtual Result<int64_t> unfinished_requests() = 0;

  // Return when no step is running. From then on the engine takes no step, not even an empty one, until resume().
  // kTimeout: a step still ran after `timeout_seconds`; the engine serves on.
  virtual Status quiesce(std::optional<double> timeout_seconds) = 0;
  // Let the engine take steps again.
  virtual Status resume() = 0;

  // Return all state except memory, as values. `fingerprint` is without the weights; the controller adds them.
  virtual Result<CapturedState> capture() = 0;
  // The same for an engine that is to go on at once: slow work is left to Moment::read.
  virtual Result<Moment> capture_moment() {
    TORPOR_ASSIGN_OR_RETURN(CapturedState captured, capture());
    Moment moment{.kv = {.steps = captured.kv.steps}};
    for (const KvBlock& block : captured.kv.blocks) {
      moment.kv.blocks.push_back(block.id);
      moment.kv.versions.push_back(block.version);
    }
    const auto state = std::make_shared<CapturedState>(std::move(captured));
    moment.read = [state]() -> Result<CapturedState> { return std::move(*state); };
    return moment;
  }
  // Return all that must be equal for tokens to be equal, without the weights.
  virtual Result<Fingerprint> fingerprint() = 0;
  // Return the KvBlock::version of each block that restore() has put back, and KvSnapshot::steps, as capture() would
  // now. By default there are none; then the next checkpoint reads these blocks once.
  virtual Result<KvContents> kv_contents() { return KvContents{}; }

  // Return for each block the host-store slot that has its current content on every rank; -1 if none has. Return an
  // empty list if there is no host store. With `keep` these slots stay unchanged until release_host_slots().
  virtual Result<std::vector<int32_t>> host_slots(const std::vector<int32_t>& /*blocks*/, bool /*keep*/) {
    return std::vector<int32_t>{};
  }
  virtual Status release_host_slots() { return ok(); }

  // Drop all requests, for a sleep without preserve_state, and clear the prefix cache. `mode`: "abort" or "recompute".
  virtual Status drop_requests(const std::string& mode) = 0;
  // Forget the hashes of these blocks: their bytes are not saved.
  virtual Status drop_prefix(const std::vector<int32_t>& blocks) = 0;
  // The weights have changed, and running requests go on with the KV of the old ones. From now on no other request may
  // find KV that was computed before, in any tier, nor KV that these requests compute on top of it. May be called
  // again.
  virtual Status retire_prefix() = 0;

  // Called just before memory is released: drop what was derived from it and lies outside the regions (packed copies of
  // weights).
  virtual Status release_derived() = 0;
  // Called when memory is back: make that again.
  virtual Status rebuild_derived() = 0;

  // Called in the same process: put back what may have changed during the sleep (random generators).
  virtual Status reconnect(const std::vector<WorkerSnapshot>& workers) = 0;
  // Called in a new, empty engine: rebuild requests, queues, block pool, batches and samplers from values. Return the
  // requests that could not be restored.
  virtual Result<std::vector<FailedRequest>> restore(const EngineCheckpoint& checkpoint) = 0;
  // Undo restore().
  virtual Status forget_restored() = 0;

  // Return which blocks this engine can hold back. With kNothing every wake brings back all blocks first.
  virtual HoldsBack holds_back() { return HoldsBack::kNothing; }
  // Hold these blocks, all of which have a hash, from the next resume() until release_blocks() names them: no step
  // reads or writes them, no other request gets them, and they are not stored.
  virtual Status hold_blocks(const std::vector<int32_t>& /*blocks*/) { return ok(); }
  // These blocks have ended. Compute requests again that have a block without content, and return their ids. The same
  // blocks may be named again, and so may blocks that are not held.
  virtual Result<std::vector<std::string>> release_blocks(const ArrivedBlocks& /*blocks*/) {
    return std::vector<std::string>{};
  }

  // Send an order (engine/rank_orders.h) to the memory of every worker rank, and return the replies, by rank.
  virtual Result<std::vector<Bytes>> call_ranks(const Bytes& order) = 0;
};

}  // namespace torpor
