// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/repair.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include <fmt/core.h>

#include "base/page_buffer.h"
#include "base/units.h"

namespace torpor {
namespace {

Error beyond_repair(std::string what) {
  return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
}

// Return the requests with a block of `bad` in a table, each with its first such block.
std::vector<DroppedRequest> hit_requests(const KvSnapshot& kv, const std::set<int32_t>& bad) {
  std::vector<DroppedRequest> hit;
  std::set<std::string> seen;
  for (const KvGroup& group : kv.groups) {
    for (const KvTable& table : group.tables) {
      const auto block =
          std::find_if(table.blocks.begin(), table.blocks.end(), [&](int32_t id) { return bad.contains(id); });
      if (block != table.blocks.end() && seen.insert(table.request).second)
        hit.push_back({table.request, fmt::format("its KV block {} is damaged", *block)});
    }
  }
  return hit;
}

// Copy the chunks that are kept, one by one.
Result<RankSummary> copy_rank(const Checkpoint& checkpoint, const RankSummary& rank, const RepairPlan& plan,
                              PendingCheckpoint& pending) {
  TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(rank));
  const std::set<uint64_t> bad(plan.dropped_blocks.begin(), plan.dropped_blocks.end());
  const std::set<std::string> gone(plan.dropped_tags.begin(), plan.dropped_tags.end());
  std::unique_ptr<DiskTier> from;  // opened only if there is something to read: the file may be missing
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<RankWriter> to, pending.create_rank(rank.rank));
  std::vector<SavedChunk> copied;
  PageBuffer memory;
  for (SavedChunk chunk : refs.records) {
    if (chunk.key.kind == ChunkKind::kKvBlock ? bad.contains(chunk.key.index) : gone.contains(chunk.key.tag)) continue;
    const std::span<std::byte> room = memory.room(chunk.bytes);
    if (room.size() < chunk.bytes)
      return Error{.code = Code::kResourceExhausted, .what = "no memory", .next_step = "free some"};
    if (from == nullptr) {
      TORPOR_ASSIGN_OR_RETURN(from, checkpoint.open_rank(rank));
    }
    const std::span<std::byte> bytes = room.first(chunk.bytes);
    TORPOR_RETURN_IF_ERROR(from->get_one(chunk, bytes));
    if (digest_of(bytes) != chunk.digest)
      return beyond_repair(fmt::format("{} has changed meanwhile", chunk.key.to_string()));
    RecordPart part{&chunk, bytes, ok()};
    to->put({&part, 1});
    TORPOR_RETURN_IF_ERROR(std::move(part.status));
    copied.push_back(std::move(chunk));
  }
  return to->write_refs(copied);
}

}  // namespace

void drop_request(CapturedState& state, const std::string& id) {
  SchedulerSnapshot& scheduler = state.scheduler;
  std::erase_if(scheduler.requests, [&](const RequestState& request) { return request.id == id; });
  for (auto* queue : {&scheduler.running, &scheduler.waiting, &scheduler.held}) std::erase(*queue, id);
  for (WorkerSnapshot& worker : state.workers) {
    std::erase(worker.rows, id);
    std::erase_if(worker.generators, [&](const auto& generator) { return generator.first == id; });
  }
  KvSnapshot& kv = state.kv;
  std::unordered_map<int32_t, KvBlock*> by_id;
  for (KvBlock& block : kv.blocks) by_id.emplace(block.id, &block);
  for (KvGroup& group : kv.groups) {
    for (const KvTable& table : group.tables) {
      if (table.request != id) continue;
      for (auto block_id = table.blocks.rbegin(); block_id != table.blocks.rend();
           ++block_id) {  // the last blocks are freed first
        const auto block = by_id.find(*block_id);
        if (block != by_id.end() && --block->second->ref_count == 0) kv.free_order.push_back(*block_id);
      }
    }
    std::erase_if(group.tables, [&](const KvTable& table) { return table.request == id; });
  }
  std::erase_if(kv.blocks, [](const KvBlock& block) { return block.ref_count == 0 && block.hash.empty(); });
}

Result<RepairPlan> plan_repair(const Checkpoint& checkpoint, const Verification& found) {
  return try_catch([&]() -> Result<RepairPlan> {
    RepairPlan plan;
    if (!found.bad_ranks.empty())
      return beyond_repair(fmt::format("cannot be repaired: nothing says what rank {} saved", found.bad_ranks[0]));
    Result<EngineCheckpoint> state = checkpoint.read_state();
    if (!state) return state.error().within("cannot be repaired");
    if (const Status valid = state->state.validate(); !valid) return valid.error().within("cannot be repaired");
    plan.state = std::move(*state);
    plan.dropped_blocks = found.bad_blocks;
    const std::set<int32_t> bad(found.bad_blocks.begin(), found.bad_blocks.end());
    plan.dropped_requests = hit_requests(plan.state.state.kv, bad);
    for (const DroppedRequest& dropped : plan.dropped_requests) drop_request(plan.state.state, dropped.id);
    drop_hashes(plan.state.state.kv, plan.dropped_blocks);
    const std::set<std::string> bad_chunks(found.bad_chunks.begin(), found.bad_chunks.end());
    std::set<std::string> tags;
    for (const RankSummary& rank : checkpoint.manifest().ranks) {
      TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(rank));
      for (const SavedChunk& chunk : refs.records) {
        if (chunk.key.kind == ChunkKind::kRegion && bad_chunks.contains(chunk.key.to_string()))
          tags.insert(chunk.key.tag);
      }
    }
    plan.dropped_tags.assign(tags.begin(), tags.end());
    if (const Status valid = plan.state.state.validate(); !valid) return valid.error().within("cannot be repaired");
    return plan;
  });
}

Result<std::string> write_repaired(const Checkpoint& checkpoint, const RepairPlan& plan, CheckpointManager& target) {
  return try_catch([&]() -> Result<std::string> {
    uint64_t expected = 0;
    for (const RankSummary& rank : checkpoint.manifest().ranks) {
      for (const auto& [tag, sums] : rank.tags) expected += sums.bytes + sums.records * kPage;
    }
    TORPOR_ASSIGN_OR_RETURN(PendingCheckpoint pending, target.begin(expected));
    TORPOR_RETURN_IF_ERROR(pending.write_state(plan.state));
    for (const RankSummary& rank : checkpoint.manifest().ranks) {
      TORPOR_ASSIGN_OR_RETURN(RankSummary copied, copy_rank(checkpoint, rank, plan, pending));
      pending.add_rank(std::move(copied));
    }
    pending.set_owner(checkpoint.manifest().owner);
    return pending.commit();
  });
}

}  // namespace torpor
