#include "kvcache/block_routes.h"

#include <algorithm>

#include <fmt/format.h>

namespace torpor {

BlockName name_of(const BlockRef& block) {
  const WeakBlock weak(block);
  return {weak.id(), weak.generation(), block.identity().hash()};
}

ChunkPlan plan_of(const KvLayout& layout, int32_t device_block, const SavedChunk& chunk) {
  ChunkPlan plan{.key = chunk.key};
  for (const KvPiece& piece : layout.pieces_of(static_cast<uint32_t>(device_block)))
    plan.pieces.push_back({piece.address, piece.bytes});
  return plan;
}

RouteIntoStore::RouteIntoStore(std::string_view from, BlockPool& source, BlockTier& target)
    : name_(fmt::format("{} to {}", from, target.kind())), source_(source), target_(target) {}

bool RouteIntoStore::upgrade(const BlockName& block) {
  std::optional<BlockRef> kept = source_.weak(block.id, block.generation).upgrade();
  if (!kept) return false;
  const MutexLock lock(mutex_);
  kept_.emplace_back(block, std::move(*kept));
  return true;
}

BlockRef RouteIntoStore::take_kept(const BlockName& block) {
  const MutexLock lock(mutex_);
  const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const auto& entry) { return entry.first == block; });
  BlockRef kept = std::move(found->second);
  kept_.erase(found);
  return kept;
}

void RouteIntoStore::transfer(std::span<const BlockName> blocks, std::span<BlockOutcome> outcomes) {
  std::vector<Move> moves;
  for (size_t i = 0; i < blocks.size(); ++i) {
    BlockRef source = take_kept(blocks[i]);
    if (!target_.accepting()) {
      outcomes[i] = BlockOutcome::kDegraded;
      continue;
    }
    if (target_.contains(source.identity())) {
      outcomes[i] = BlockOutcome::kPresent;
      continue;
    }
    Result<std::vector<MutableBlock>> slot = target_.pool().allocate(1);
    if (!slot || !begin_filling((*slot)[0], source.identity())) {
      outcomes[i] = BlockOutcome::kNoRoom;
      continue;
    }
    target_.claim((*slot)[0].id(), source.identity());
    moves.push_back({.index = i, .source = std::move(source), .target = std::move((*slot)[0])});
  }
  if (moves.empty()) return;
  copy(moves);
  std::vector<BlockName> registered;
  for (Move& move : moves) outcomes[move.index] = settle(move, registered);
  if (registered_ && !registered.empty()) registered_(std::move(registered));
}

BlockOutcome RouteIntoStore::settle(Move& move, std::vector<BlockName>& registered) {
  if (move.outcome == BlockOutcome::kUnproven) {  // the target stays Inflight, which its pool never uses again
    move.source.never_let_go();
    const MutexLock lock(mutex_);
    ++quarantined_;
    return BlockOutcome::kUnproven;
  }
  if (!move.target.compute_done() || move.outcome != BlockOutcome::kTransferred) return BlockOutcome::kFailed;
  target_.remember(move.target.id(), move.saved.digest);
  const Result<BlockRef> block = move.target.register_block();
  if (!block) return BlockOutcome::kFailed;
  if (registered_) registered.push_back(name_of(*block));
  return BlockOutcome::kTransferred;
}

int64_t RouteIntoStore::quarantined() const {
  const MutexLock lock(mutex_);
  return quarantined_;
}

void DeviceRoute::copy(std::span<Move> moves) {
  std::vector<ChunkPlan> plans;
  for (const Move& move : moves) plans.push_back(plan_of(layout_, move.source.id(), target().chunk(move.target.id())));
  Job job{.kind = JobKind::kSave, .tier = &target(), .urgency = Urgency::kOffload};
  job.chunks.resize(moves.size());
  for (size_t i = 0; i < moves.size(); ++i) job.chunks[i].plan = &plans[i];
  const Result<JobId> id = transfers_.submit(std::move(job));
  if (!id) return;
  JobResult result = transfers_.wait(*id);
  for (size_t i = 0; i < moves.size(); ++i) {
    moves[i].saved = std::move(result.chunks[i].saved);
    moves[i].outcome = result.chunks[i].outcome;
  }
}

void HostRoute::copy(std::span<Move> moves) {
  std::vector<TierPart> parts;
  for (Move& move : moves) {
    const SavedChunk source = host_.chunk(move.source.id());
    move.saved = target().chunk(move.target.id());
    move.saved.digest = source.digest;
    parts.push_back({&move.saved, host_.view(source), ok()});
  }
  target().put(parts);
  for (size_t i = 0; i < moves.size(); ++i) {
    if (parts[i].status) moves[i].outcome = BlockOutcome::kTransferred;
  }
}

}  // namespace torpor
