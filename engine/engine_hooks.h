// SPDX-License-Identifier: Apache-2.0
// EngineHooks: what an inference engine does for the controller. Implementations: vLLM's adapter through the Python
// bindings, and the small engine of the tests.
//
// The controller calls them from the thread that called it, one at a time, holding only the lock that keeps a second
// operation out: a hook must not call sleep(), wake_up() or checkpoint(); state() and is_sleeping() it may. Hooks
// translate between the engine's objects and values; they do not decide, copy device memory, or write files.
//
// A hook may throw: it counts as failed then. What undoes (resume, rebuild_derived, forget_restored) is also called
// where what it undoes failed half-way or was never begun, and does no harm then.
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

struct FailedRequest {  // one that alone could not be restored
  std::string id;
  std::string error;
};

// What tells the contents of KV blocks apart.
struct KvContents {
  std::vector<int32_t> blocks;
  std::vector<uint64_t> versions;  // of each
  uint64_t steps = 0;
};

// The state of one moment.
struct Moment {
  KvContents kv;  // of all blocks in it
  // All that capture() would have returned then: once, on any thread, while the engine goes on.
  std::function<Result<SchedulerCheckpoint>()> read;
};

// What became of blocks that an engine holds back: their content is there, or it is not and never will be; of the last
// ones, a copy may still write into them, so that they must never be used again.
struct ArrivedBlocks {
  std::vector<int32_t> arrived{};
  std::vector<int32_t> lost{};
  std::vector<int32_t> skipped{};  // as lost ones, but by a wish of the engine
  std::vector<int32_t> unproven{};
};

// Which KV blocks an engine can do without at first, so that it runs before they are back.
enum class HoldsBack : uint8_t {
  kNothing,
  kCached,  // those that no request has
  kAll,     // those of requests too, but for the ones that run first
};

class EngineHooks {
 public:
  virtual ~EngineHooks() = default;

  // Features in use whose state cannot be preserved, by name. Asked before anything is touched.
  virtual Result<std::vector<std::string>> unsupported() = 0;
  virtual Result<int64_t> unfinished_requests() = 0;

  // Returns when no step is running; from then on the engine takes no step, not even an empty one, until resume().
  // kTimeout: not within `timeout_seconds`; the engine serves on.
  virtual Status quiesce(std::optional<double> timeout_seconds) = 0;
  virtual Status resume() = 0;

  // All state but memory, as values. `fingerprint` leaves the weights out; the controller adds them.
  virtual Result<SchedulerCheckpoint> capture() = 0;
  // The same of an engine that is to go on at once: what of it takes long is left to Moment::read.
  virtual Result<Moment> capture_moment() {
    TORPOR_ASSIGN_OR_RETURN(SchedulerCheckpoint captured, capture());
    Moment moment{.kv = {.steps = captured.kv.steps}};
    for (const KvBlock& block : captured.kv.blocks) {
      moment.kv.blocks.push_back(block.id);
      moment.kv.versions.push_back(block.version);
    }
    const auto state = std::make_shared<SchedulerCheckpoint>(std::move(captured));
    moment.read = [state]() -> Result<SchedulerCheckpoint> { return std::move(*state); };
    return moment;
  }
  virtual Result<Fingerprint> fingerprint() = 0;
  // Of the KV that restore() has put back, what capture() would say of it now: KvBlock::version of each block, and
  // KvSnapshot::steps. None by default: then the next checkpoint reads it once.
  virtual Result<KvContents> kv_contents() { return KvContents{}; }

  // Of each of these KV blocks, the slot of a host store that has the bytes of its present content on every rank; -1:
  // none has. Empty: there is no such store. With `keep` they stay as they are until release_host_slots().
  virtual Result<std::vector<int32_t>> host_slots(const std::vector<int32_t>& /*blocks*/, bool /*keep*/) {
    return std::vector<int32_t>{};
  }
  virtual Status release_host_slots() { return ok(); }

  // Sleep without preserve_state: what becomes of the requests; "abort" or "recompute". Clears the prefix cache.
  virtual Status drop_requests(const std::string& mode) = 0;
  // Forgets the hashes of these blocks: their bytes are not kept.
  virtual Status drop_prefix(const std::vector<int32_t>& blocks) = 0;
  // The weights are others now, and running requests keep the KV that they have: from now on no other request may find
  // KV that was computed so far, in any tier, nor what these requests compute on top of it. May be called again.
  virtual Status retire_prefix() = 0;

  // Just before memory goes: drop what was derived from it outside the regions (packed copies of weights).
  virtual Status release_derived() = 0;
  // Memory is back: make that again.
  virtual Status rebuild_derived() = 0;

  // The same objects live on: put back what may have moved meanwhile (generators).
  virtual Status reconnect(const std::vector<WorkerSnapshot>& workers) = 0;
  // A new, empty engine: rebuild requests, queues, block pool, batches and samplers from values.
  virtual Result<std::vector<FailedRequest>> restore(const EngineCheckpoint& checkpoint) = 0;
  // Undoes restore().
  virtual Status forget_restored() = 0;

  // Of an engine that holds nothing back every wake brings back all first.
  virtual HoldsBack holds_back() { return HoldsBack::kNothing; }
  // From the next resume() on, until release_blocks() has named a block: no step reads or writes it, nobody else gets
  // it, nothing of it is stored. All of them have a hash.
  virtual Status hold_blocks(const std::vector<int32_t>& /*blocks*/) { return ok(); }
  // Some of them have ended. Requests that have one without content are computed again; their ids. May be called again
  // with the same ones, and with ones that are not held.
  virtual Result<std::vector<std::string>> release_blocks(const ArrivedBlocks& /*blocks*/) {
    return std::vector<std::string>{};
  }

  // Sends an order to the memory of every worker rank (engine/rank_orders.h) and returns their replies, by rank.
  virtual Result<std::vector<Bytes>> call_ranks(const Bytes& order) = 0;
};

}  // namespace torpor
