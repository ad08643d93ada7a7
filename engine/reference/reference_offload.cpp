// SPDX-License-Identifier: Apache-2.0
// Offloading in an engine: what the hooks of a scheduler do with OffloadScheduler, and the step of each rank with its
// OffloadWorker.
#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/units.h"
#include "engine/reference/reference_engine.h"
#include "offload/host_store.h"
#include "offload/segment_store.h"

namespace torpor::reference {
namespace {

constexpr int32_t kSegments = 8;
constexpr uint64_t kMostSegmentBytes = 64 * kMiB;

}  // namespace

Status ReferenceEngine::build_offload() {
  const TierOptions& tiers = options_.tiers;
  if (tiers.host_blocks == 0 && tiers.disk_blocks == 0) return ok();
  const uint64_t bytes = ranks_[0].memory->kv_layout().bytes_per_block();
  OffloadWorkerOptions with{.host_slots = tiers.host_blocks};
  if (tiers.disk_blocks > 0) {
    const auto most = static_cast<int32_t>(kMostSegmentBytes / align_up(bytes, kPage));
    with.segment_slots = std::clamp(tiers.disk_blocks / kSegments, 1, std::max(most, 1));
    with.disk_segments = std::max(2, (tiers.disk_blocks + with.segment_slots - 1) / with.segment_slots + 1);
  }
  PlacementOptions placement = tiers.placement;
  placement.host = tiers.host_blocks > 0;
  placement.disk = tiers.disk_blocks > 0;
  placement_ = make_placement(placement);
  TORPOR_ASSIGN_OR_RETURN(offload_, OffloadScheduler::create({.index = {.host_slots = with.host_slots,
                                                                        .disk_segments = with.disk_segments,
                                                                        .segment_slots = with.segment_slots,
                                                                        .device_blocks = options_.num_blocks},
                                                              .queue = tiers.offload,
                                                              .ranks = static_cast<int32_t>(ranks_.size()),
                                                              .block_tokens = block_tokens(),
                                                              .mode = tiers.mode,
                                                              .counted_keys = tiers.counted_keys},
                                                             *pool_, *placement_, clock_, port_));
  TORPOR_ASSIGN_OR_RETURN(const KeySpace space, key_space());
  std::vector<std::vector<RecoveredBlock>> found;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    RankMemory& memory = *ranks_[rank].memory;
    std::shared_ptr<HostStore> host;
    std::unique_ptr<SlotStore> disk;
    if (placement.host) {
      TORPOR_ASSIGN_OR_RETURN(
          host,
          memory.make_host_store({.slots = with.host_slots, .slot_bytes = bytes, .codec = options_.host_compression}));
    }
    if (placement.disk) {
      SegmentStoreOptions options{
          .rank = static_cast<int32_t>(rank), .record_bytes = bytes, .slots_per_segment = with.segment_slots};
      options.budget_bytes =
          static_cast<uint64_t>(with.disk_segments + 1) * SegmentStore::most_bytes_of_segment(options);
      TORPOR_ASSIGN_OR_RETURN(disk, SegmentStore::open(file_system_, tiers.disk_directory + "/store", options, clock_));
    }
    with.rank = static_cast<int32_t>(rank);
    TORPOR_ASSIGN_OR_RETURN(
        std::unique_ptr<OffloadWorker> worker,
        OffloadWorker::create(with, memory.kv_layout(), memory.transfers(), std::move(host), std::move(disk)));
    worker->open_space(offload_->space(), space.digest());
    TORPOR_ASSIGN_OR_RETURN(std::vector<RecoveredBlock> recovered, worker->recover(offload_->space()));
    found.push_back(std::move(recovered));
    workers_.push_back(std::move(worker));
  }
  const std::vector<AdoptedBlock> adopted = offload_->adopt(found);
  for (const auto& worker : workers_) worker->adopt(adopted);
  return ok();
}

// Return the namespace of the weights as they were loaded. After load_weights() it has no name (forget_stored).
Result<KeySpace> ReferenceEngine::key_space() {
  TORPOR_ASSIGN_OR_RETURN(const Fingerprint fields, fingerprint());
  KeySpace space{.weights = digest_of(std::as_bytes(std::span(&options_.weights_seed, 1))),
                 .hashing = "BlockIdentity, XXH3-128 and SHA-256",
                 .ranks = static_cast<int32_t>(ranks_.size())};
  for (const auto& [name, value] : fields) {
    if (name != kNumBlocksField) space.layout += fmt::format("{}: {}\n", name, value);
  }
  return space;
}

// After a change of weights: stored blocks are not found any more, also not after a restart.
Status ReferenceEngine::forget_stored() {
  if (!offload_) return ok();
  TORPOR_RETURN_IF_ERROR(offload_->reset());
  const Digest space{random_seal_id()};
  for (const auto& worker : workers_) worker->open_space(offload_->space(), space);
  return ok();
}

void ReferenceEngine::offer(const Request& request, size_t first) {
  std::vector<BlockKey> keys;
  std::vector<int32_t> blocks;
  for (size_t i = first; i < request.full.size(); ++i) {
    keys.push_back(key_of(request.full[i].identity(), offload_->space()));
    blocks.push_back(request.full[i].id());
  }
  OffloadOffer offer{.keys = keys, .blocks = blocks, .after_step = static_cast<uint64_t>(counts_.steps)};
  if (first > 0) offer.parent = key_of(request.full[first - 1].identity(), offload_->space()).hash;
  offer.priority = -request.asked.priority;
  offloads_.push_back(offload_->offer(offer));
}

// ---- loads

bool ReferenceEngine::begin_load(Request& request, std::span<const BlockIdentity> chain) {
  std::vector<BlockKey> keys;
  for (const BlockIdentity& identity : chain) keys.push_back(key_of(identity, offload_->space()));
  const size_t have = request.full.size();
  const int32_t found = offload_->match(request.offload, keys, have);
  std::vector<int32_t> blocks;
  if (Result<std::vector<MutableBlock>> fresh = pool_->allocate(found)) {  // else it is computed, or waits
    for (size_t i = 0; i < fresh->size(); ++i) {
      (void)begin_filling((*fresh)[i], chain[have + i]);
      blocks.push_back((*fresh)[i].id());
    }
    request.loading = std::move(*fresh);
  }
  request.load = offload_->allocated(request.offload, blocks);
  if (!blocks.empty()) {
    (void)slots_.stage(request.slot, found);
    (void)slots_.onboard(request.slot, static_cast<int32_t>(have + blocks.size()));
  }
  return !blocks.empty();
}

void ReferenceEngine::end_load(Request& request, const EndedLoad& load) {
  std::vector<int32_t> blocks;
  for (size_t i = 0; i < request.loading.size(); ++i) {
    MutableBlock& block = request.loading[i];
    if (load.unproven) continue;  // a copy may still write into the block: its pool never uses it again
    (void)block.compute_done();
    if (i != blocks.size() || i >= static_cast<size_t>(load.good_blocks)) continue;
    Result<BlockRef> registered = block.register_block();
    if (!registered) continue;
    blocks.push_back(registered->id());
    request.full.push_back(std::move(*registered));
  }
  offload_->loaded(request.offload, blocks);
  request.computes = blocks.size() < request.loading.size();
  if (request.computes) (void)slots_.onboard_failed(request.slot);
  request.loading.clear();
  request.computed = static_cast<int32_t>(request.full.size()) * block_tokens();
  request.loaded_tokens = static_cast<int64_t>(blocks.size()) * block_tokens();
  counts_.onboarded_tokens += request.loaded_tokens;
}

void ReferenceEngine::end_loads() {
  for (const EndedLoad& load : offload_->take_loads()) {
    const auto waiting = std::find_if(loading_.begin(), loading_.end(),
                                      [&](const Request* each) { return each->offload == load.request; });
    if (waiting != loading_.end()) {
      Request& request = **waiting;
      loading_.erase(waiting);
      end_load(request, load);
      queue(request);
      continue;
    }
    const auto orphans = orphans_.find(load.request);  // of an aborted request
    if (orphans == orphans_.end()) continue;
    for (MutableBlock& block : orphans->second.blocks) {
      if (!load.unproven) (void)block.compute_done();
    }
    (void)slots_.end(orphans->second.slot);
    orphans_.erase(orphans);
  }
}

// ---- a step

bool ReferenceEngine::take_reports() {
  bool any = false;
  for (const auto& worker : workers_) {
    const TransferReport report = worker->poll();
    if (report.empty()) continue;
    any = true;
    if (const Status applied = offload_->apply(report); !applied) log().error("{}", applied.error());
  }
  end_loads();
  std::erase_if(offloads_, [](const TransferHandle& handle) { return handle.status() == TransferStatus::kDone; });
  return any;
}

// Run the last plan on all ranks; a rank that has begun it ignores it. A rank without memory for it has done nothing,
// so the plan stays the last one and is run again.
void ReferenceEngine::run_plan() {
  if (plan_ == nullptr) return;
  bool all = true;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Status begun = workers_[rank]->run(*plan_);
    if (!begun && begun.error().code == Code::kResourceExhausted) all = false;
    if (!begun) log().error("rank {}: {}", rank, begun.error());
  }
  if (all) plan_ = nullptr;
}

bool ReferenceEngine::step_offload() {
  if (!offload_ || frozen_ || !deferred_.empty()) return false;  // a block without content is stored nowhere
  offload_->acknowledge(static_cast<uint64_t>(counts_.steps));
  if (plan_ == nullptr) {
    const TransferPlan& plan = offload_->plan_step();
    if (!plan.empty()) plan_ = &plan;
  }
  bool any = plan_ != nullptr;
  run_plan();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (options_.transfers_have_threads) {
      workers_[rank]->wait();  // so that a run can be repeated
    } else {
      any = ranks_[rank].memory->transfers().pump() || any;
    }
  }
  return take_reports() || any;
}

// Wait until nothing is under way: no request waits for a load, and no copy holds a block. Queued blocks stay queued.
Status ReferenceEngine::drain_offload() {
  run_plan();
  if (plan_ != nullptr)
    return Error{.code = Code::kResourceExhausted,
                 .what = "there is no memory to begin transfers that were planned",
                 .next_step = "free host memory and call again"};
  for (Request* request : loading_) request->load.cancel();  // if it is not committed
  offload_->sweep();
  for (const auto& worker : workers_) worker->wait();
  (void)take_reports();
  return ok();
}

}  // namespace torpor::reference
