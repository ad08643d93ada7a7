// SPDX-License-Identifier: Apache-2.0
// ReferenceEngine: a small continuous-batching engine on torpor's own block pool, offloading and values: chunked
// prefill, prefix caching, asynchronous loads, priorities, preemption, greedy, seeded and unseeded sampling, parallel
// samples. Its model is a ByteModel.
//
// It may have several worker ranks. Each rank has a device, weights, KV and stores of its own, and the next token
// depends on the KV of all ranks.
//
// The simulation compares its tokens, and it is the example for integrating another engine: reference_engine.cpp
// serves, reference_offload.cpp is all code for offloading, reference_hooks.cpp all code for a sleep.
//
// Owner: tests and tools. Threads: one, except for the transfers. Failure: errors are values.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/engine_hooks.h"
#include "engine/rank_memory.h"
#include "engine/reference/byte_model.h"
#include "engine/reference/scattered_regions.h"
#include "kvcache/block_pool.h"
#include "kvcache/offload_scheduler.h"
#include "kvcache/offload_worker.h"
#include "kvcache/slot_table.h"

namespace torpor::reference {

struct TierOptions {
  int32_t host_blocks = 0;  // 0: there is no such store
  int32_t disk_blocks = 0;
  std::string disk_directory;  // segments lie below it, in "store"
  OffloadMode mode = OffloadMode::kEager;
  bool loads = true;  // off: stored blocks are never looked up
  PlacementOptions placement;
  int64_t counted_keys = 0;
  OffloadQueueOptions offload;
};

struct ReferenceOptions {
  ByteModelShape model;
  uint64_t weight_bytes = 16'384;
  uint64_t weights_seed = 1;
  int32_t num_blocks = 64;
  int32_t token_budget = 16;  // tokens in one step, of all requests together
  int32_t max_running = 8;
  bool by_priority = false;  // off: first come, first served
  bool kv_of_step = false;   // equal tokens get other KV in another step
  TierOptions tiers;
  size_t regions_per_tag = kRegionsPerTag;          // of every tag but the KV cache
  size_t spare_kv_regions = 1;                      // of the KV cache, in addition to one for each layer
  std::vector<std::string> step_tags{kRuntimeTag};  // tags beside weights and KV cache; each step writes them
  int transfer_threads = 1;
  bool transfers_have_threads = true;       // off: the thread that waits for copies makes them
  std::optional<uint64_t> retain_kv_bytes;  // as in RankMemoryOptions
  Codec host_compression = Codec::kNone;    // as in RankMemoryOptions; also for blocks in host memory
  uint64_t deferred_job_bytes = 64ull << 20;
  bool deferred_thread = true;
};

enum class Sampling : uint8_t { kGreedy, kSeeded, kUnseeded };

struct ReferenceRequest {
  std::string id;
  std::vector<int32_t> prompt;  // at least one token
  int32_t max_tokens = 1;
  int32_t priority = 0;  // lower first, as in vLLM
  Sampling sampling = Sampling::kGreedy;
  int64_t seed = 0;   // for kSeeded
  uint64_t salt = 0;  // blocks are shared only between equal salts
};

struct ReferenceOutput {
  std::string id;
  int32_t token = 0;
  bool finished = false;
};

struct ReferenceCounts {
  int64_t steps = 0;
  int64_t computed_tokens = 0;
  int64_t hit_tokens = 0;        // of prompts, found in the device
  int64_t onboarded_tokens = 0;  // loaded
  int64_t preemptions = 0;
};

class ReferenceEngine final : public EngineHooks {
 public:
  // `file_system` and `clock` outlive the engine.
  static Result<std::unique_ptr<ReferenceEngine>> create(std::unique_ptr<DeviceMemory> device, FileSystem& file_system,
                                                         const Clock& clock, ReferenceOptions options,
                                                         EventPort port = {});
  // Make an engine with a rank for each of `devices`. kInvalidArgument: there are none.
  static Result<std::unique_ptr<ReferenceEngine>> create(std::vector<std::unique_ptr<DeviceMemory>> devices,
                                                         FileSystem& file_system, const Clock& clock,
                                                         ReferenceOptions options, EventPort port = {});
  ~ReferenceEngine() override;

  // Add a request. `samples` > 1: add as many requests "ID/0", "ID/1", … that share the prompt's blocks and differ in
  // their seed. kInvalidArgument: the prompt can never fit, or the id is known.
  Status add(const ReferenceRequest& request, int32_t samples = 1);
  bool abort(const std::string& id);  // false: the id is unknown
  // Load other weights. If KV is kept, the caller informs the controller, or loads them during a sleep.
  void load_weights(uint64_t seed);
  // Run one forward pass over as many tokens as the budget allows, and return its outputs. It does nothing while frozen
  // or idle. An output with the token -1 belongs to no request: bytes of the engine's memory have changed, and its id
  // says where.
  std::vector<ReferenceOutput> step();
  bool idle() const { return requests_.empty(); }
  bool frozen() const { return frozen_; }

  // Take a step of offloading (reference_offload.cpp): run the plan that is due, let bytes move (without threads of
  // their own one batch on each rank), and take results. Return false if nothing ended.
  bool step_offload();
  std::vector<TransferHandle>& offloads() { return offloads_; }  // not ended yet, oldest first

  ReferenceCounts counts() const { return counts_; }
  std::optional<int64_t> steps_before_restore_;
  size_t ranks() const { return ranks_.size(); }
  RankMemory& memory(size_t rank = 0) { return *ranks_[rank].memory; }
  BlockPool& pool() { return *pool_; }
  const SlotTable& slots() const { return slots_; }
  OffloadScheduler* offload() { return offload_.get(); }  // null: there are no stores
  OffloadWorker& worker(size_t rank) { return *workers_[rank]; }

  // EngineHooks (reference_hooks.cpp)
  Result<std::vector<std::string>> unsupported() override;
  Result<int64_t> unfinished_requests() override { return static_cast<int64_t>(requests_.size()); }
  Status quiesce(std::optional<double> timeout_seconds) override;
  Status resume() override;
  Result<CapturedState> capture() override;
  Result<KvContents> kv_contents() override;
  Result<std::vector<int32_t>> host_slots(const std::vector<int32_t>& blocks, bool keep) override;
  Status release_host_slots() override;
  Result<Fingerprint> fingerprint() override;
  Status drop_requests(const std::string& mode) override;
  Status drop_prefix(const std::vector<int32_t>& blocks) override;
  Status retire_prefix() override;
  Status release_derived() override;
  Status rebuild_derived() override;
  Status reconnect(const std::vector<WorkerSnapshot>& workers) override;
  Result<std::vector<FailedRequest>> restore(const EngineCheckpoint& checkpoint) override;
  Status forget_restored() override;
  HoldsBack holds_back() override { return HoldsBack::kAll; }
  Status hold_blocks(const std::vector<int32_t>& blocks) override;
  Result<std::vector<std::string>> release_blocks(const ArrivedBlocks& blocks) override;
  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override;

 private:
  static constexpr uint64_t kFreshGenerator = 42;
  struct Request {
    ReferenceRequest asked;
    std::vector<int32_t> tokens;  // prompt and output
    int32_t computed = 0;         // tokens whose KV is in the blocks
    std::vector<BlockRef> full;   // registered blocks; `partial` comes after them
    std::optional<MutableBlock> partial;
    uint32_t offload = 0;               // its number in the OffloadScheduler
    std::vector<MutableBlock> loading;  // after the full ones
    TransferHandle load;
    int64_t loaded_tokens = 0;
    bool computes = false;   // a load failed: compute what is missing
    uint64_t generator = 0;  // for a seeded request
    int32_t preemptions = 0;
    uint64_t arrival = 0;
    uint32_t slot = UINT32_MAX;
    int32_t output_tokens() const { return static_cast<int32_t>(tokens.size() - asked.prompt.size()); }
    int32_t length() const { return static_cast<int32_t>(tokens.size()); }
    std::vector<int32_t> table() const;
  };
  struct Rank {
    std::unique_ptr<RankMemory> memory;
    std::unique_ptr<ByteModel> model;
    std::vector<StepRegions> beside{};  // in the order of options_.step_tags
  };
  struct Scheduled {
    Request* request = nullptr;
    int32_t tokens = 0;
    std::vector<MutableBlock> fresh;  // blocks for tokens that do not fit into the partial one
  };

  ReferenceEngine(FileSystem& file_system, const Clock& clock, ReferenceOptions options, EventPort port);
  Status build(std::vector<std::unique_ptr<DeviceMemory>> devices);
  uint64_t steps() const { return 1 + static_cast<uint64_t>(counts_.steps); }
  Result<Rank> make_rank(int32_t rank, std::unique_ptr<DeviceMemory> device);
  Status build_offload();
  Result<KeySpace> key_space();
  bool begin_load(Request& request, std::span<const BlockIdentity> chain);
  bool take_reports();
  void end_loads();
  void end_load(Request& request, const EndedLoad& load);
  void offer(const Request& request, size_t first);
  void run_plan();
  Status drain_offload();
  Status forget_stored();
  std::vector<Scheduled> schedule();
  std::optional<std::vector<MutableBlock>> allocate_for(const Request& request, int32_t tokens);
  bool comes_before(const Request& a, const Request& b) const;
  bool take_prefix(Request& request);
  void preempt(Request& request, std::vector<Scheduled>& scheduled, int32_t& budget);
  void compute(Scheduled& scheduled);
  int32_t sample(Request& request);
  Status exchange_asleep();
  bool prepared() const;
  void publish_step(const std::vector<Scheduled>& scheduled, int64_t began);
  void release(Request& request);
  bool waits_for_blocks(const Request& request) const;
  bool finds_deferred_blocks(const Request& request) const;
  std::vector<std::string> lose(const std::set<int32_t>& gone);
  void queue(Request& request);
  void finish(const std::string& id);
  std::vector<BlockIdentity> chain_of(const Request& request) const;
  int32_t block_tokens() const { return options_.model.block_tokens; }

  FileSystem& file_system_;
  const Clock& clock_;
  const ReferenceOptions options_;
  const EventPort port_;
  SlotTable slots_;
  BlockPoolInfo published_blocks_;
  std::vector<Rank> ranks_;
  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<Placement> placement_;
  std::unique_ptr<OffloadScheduler> offload_;
  std::vector<std::unique_ptr<OffloadWorker>> workers_;  // by rank
  const TransferPlan* plan_ = nullptr;                   // the last plan, if some rank has not begun it
  std::vector<TransferHandle> offloads_;
  // By request number: blocks of requests that were aborted while they were loaded.
  struct Orphans {
    std::vector<MutableBlock> blocks;
    uint32_t slot = UINT32_MAX;
  };
  std::map<uint32_t, Orphans> orphans_;
  // Blocks whose content was not there when the engine began to run again (reference_deferred.cpp). No request gets
  // them before all have ended. deferred_ids_ has the numbers of those that have not.
  std::vector<BlockRef> deferred_;
  std::set<int32_t> deferred_ids_;
  int32_t unproven_deferred_ = 0;

  std::map<std::string, std::unique_ptr<Request>> requests_;
  std::vector<Request*> running_;         // row order
  std::deque<Request*> waiting_;          // front first
  std::vector<Request*> loading_;         // waiting for their blocks
  uint64_t generator_ = kFreshGenerator;  // shared by unseeded requests
  uint64_t arrivals_ = 0;
  bool frozen_ = false;
  ReferenceCounts counts_;
};

}  // namespace torpor::reference
