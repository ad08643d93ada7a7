#include "offload/chunk_mover.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <fmt/format.h>

#include "base/units.h"

namespace torpor {
namespace {

// Of chunks together. A disk wants many operations at once, memory only enough to be worth a copy.
constexpr uint64_t kBatchBytes = 4 * kMiB;
constexpr uint64_t kDiskBatchBytes = 16 * kMiB;
constexpr int32_t kBatchChunks = 64;

uint64_t batch_bytes(const Tier& tier) { return tier.addressable() ? kBatchBytes : kDiskBatchBytes; }

// The pipeline's blocks are places in a list of chunks.
class ChunkRoute final : public BlockRoute {
 public:
  ChunkRoute(std::string_view name, std::vector<ChunkTransfer>& transfers,
             const std::function<void(std::span<ChunkTransfer>)>& work)
      : name_(name), transfers_(transfers), work_(work) {}
  std::string_view name() const override { return name_; }
  bool present(const Digest&) const override { return false; }
  bool upgrade(const BlockName&) override { return true; }
  // Batches are runs of neighbours: see enqueue in run().
  void transfer(std::span<const BlockName> blocks, std::span<BlockOutcome> outcomes) override {
    const std::span<ChunkTransfer> batch =
        std::span(transfers_).subspan(static_cast<size_t>(blocks[0].id), blocks.size());
    if (failed_) {  // committed, so no longer to be cancelled; not tried any more
      std::fill(outcomes.begin(), outcomes.end(), BlockOutcome::kFailed);
      return;
    }
    const Status worked = catching([&] {
      work_(batch);
      return ok();
    });
    if (!worked) {
      for (ChunkTransfer& transfer : batch) transfer.status = worked;
    }
    for (size_t i = 0; i < batch.size(); ++i) {
      outcomes[i] = batch[i].status     ? BlockOutcome::kTransferred
                    : batch[i].unproven ? BlockOutcome::kUnproven
                                        : BlockOutcome::kFailed;
      if (!batch[i].status) failed_ = true;
    }
  }
  bool failed() const { return failed_; }

 private:
  const std::string_view name_;
  std::vector<ChunkTransfer>& transfers_;
  const std::function<void(std::span<ChunkTransfer>)>& work_;
  std::atomic<bool> failed_ = false;
};

}  // namespace

Status ChunkMover::run(std::string_view name, std::vector<ChunkTransfer>& transfers, uint64_t batch_bytes,
                       const Work& work) {
  TORPOR_TRY(executor_.usable());
  if (transfers.empty()) return ok();
  uint64_t largest = 1;
  for (const ChunkTransfer& transfer : transfers) largest = std::max(largest, transfer.plan->bytes());
  // Small enough that all workers have something to do.
  const auto share = static_cast<uint64_t>(transfers.size()) / static_cast<uint64_t>(executor_.threads());
  const auto batch =
      static_cast<int32_t>(std::clamp<uint64_t>(std::min(batch_bytes / largest, share), 1, kBatchChunks));

  ChunkRoute route(name, transfers, work);
  const OffloadOptions options{.max_batch_size = batch,
                               .min_batch_size = 1,
                               .flush_interval = std::chrono::milliseconds(0),
                               .max_concurrent_transfers = executor_.threads(),
                               .on_deck_batches = executor_.threads(),
                               .queue_blocks = static_cast<int64_t>(transfers.size())};
  TORPOR_ASSIGN(const std::unique_ptr<OffloadPipeline> pipeline,
                OffloadPipeline::create(route, system_clock(), options, {}, sink_));
  std::vector<OffloadHandle> handles;
  for (size_t first = 0; first < transfers.size(); first += static_cast<size_t>(batch)) {
    std::vector<BlockName> blocks;
    for (size_t i = first; i < std::min(transfers.size(), first + static_cast<size_t>(batch)); ++i) {
      BlockName block{.id = static_cast<int32_t>(i)};
      std::memcpy(block.key.bytes.data(), &i, sizeof i);
      blocks.push_back(block);
    }
    handles.push_back(pipeline->enqueue(std::move(blocks)));
  }
  for (OffloadHandle& handle : handles) {
    if (route.failed()) handle.request_cancel();
    handle.wait();
  }
  const OutcomeCounts ended = pipeline->counts();
  for (size_t i = 0; i < ended.size(); ++i) counts_[i] += ended[i];
  for (const ChunkTransfer& transfer : transfers) {
    if (!transfer.status) return transfer.status.error();
  }
  TORPOR_TRY(pipeline->usable());
  if (ended[static_cast<size_t>(BlockOutcome::kTransferred)] != transfers.size()) {
    return Error{.code = Code::kInternal,
                 .what = fmt::format("{}: not all of {} chunks were moved", name, transfers.size())};
  }
  return ok();
}

Result<std::vector<SavedChunk>> ChunkMover::save(std::span<const ChunkPlan> plans, Tier& target) {
  std::vector<ChunkTransfer> transfers(plans.size());
  uint64_t total = 0;
  for (size_t i = 0; i < plans.size(); ++i) {
    transfers[i].plan = &plans[i];
    total += plans[i].bytes();
  }
  TORPOR_TRY(target.prepare(total, plans.size()));
  TORPOR_TRY(run(fmt::format("save to {}", target.kind()), transfers, batch_bytes(target),
                 [&](std::span<ChunkTransfer> batch) { executor_.save(batch, target); }));
  TORPOR_TRY(target.finish());
  std::vector<SavedChunk> saved;
  for (ChunkTransfer& transfer : transfers) saved.push_back(std::move(transfer.saved));
  return saved;
}

Status ChunkMover::restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans, Tier& source) {
  std::vector<ChunkTransfer> transfers(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    if (i >= saved.size() || saved[i].key != plans[i].key || saved[i].bytes != plans[i].bytes()) {
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} was not saved, or with another size", plans[i].key.to_string()),
                   .next_step = "wake it into the engine configuration that saved it"};
    }
    transfers[i] = {.plan = &plans[i], .saved = saved[i], .status = ok()};
  }
  return run(fmt::format("restore from {}", source.kind()), transfers, batch_bytes(source),
             [&](std::span<ChunkTransfer> batch) { executor_.restore(batch, source); });
}

Result<std::vector<Digest>> ChunkMover::digests(std::span<const ChunkPlan> plans) {
  std::vector<ChunkTransfer> transfers(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) transfers[i].plan = &plans[i];
  TORPOR_TRY(run("digest", transfers, kBatchBytes, [&](std::span<ChunkTransfer> batch) { executor_.digest(batch); }));
  std::vector<Digest> digests;
  for (const ChunkTransfer& transfer : transfers) digests.push_back(transfer.saved.digest);
  return digests;
}

}  // namespace torpor
