#include "kvcache/tiered_blocks.h"

#include <cstring>

#include <fmt/format.h>

namespace torpor {
namespace {

// Makes an allocated block hold what `identity` says, ready to be written.
Status prepare(MutableBlock& block, const BlockIdentity& identity) {
  TORPOR_TRY(block.initialize(identity.parent, identity.salt, identity.group));
  TORPOR_TRY(block.add_tokens(identity.tokens));
  return block.schedule_compute();
}

}  // namespace

BlockName name_of(const WeakBlock& block, const BlockIdentity& identity) { return {block.id(), block.generation(), identity.hash()}; }

// --- HostBlocks ----------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<HostBlocks>> HostBlocks::create(HostArena& arena, BlockPoolOptions options, uint64_t bytes_per_block, EventSink* sink) {
  if (bytes_per_block == 0) return Error{.code = Code::kInvalidArgument, .what = "bytes_per_block is 0", .next_step = "give the size of a block over all layers"};
  std::unique_ptr<HostBlocks> blocks(new HostBlocks());
  const int32_t count = options.num_blocks;
  TORPOR_ASSIGN(blocks->pool_, BlockPool::create(std::move(options), sink));
  TORPOR_ASSIGN(blocks->memory_, arena.allocate(static_cast<uint64_t>(count) * bytes_per_block));
  blocks->bytes_per_block_ = bytes_per_block;
  blocks->digests_.resize(static_cast<size_t>(count));
  return blocks;
}

Result<std::span<std::byte>> HostBlocks::place(SavedChunk& chunk) {
  chunk.offset = chunk.key.index * bytes_per_block_;
  chunk.stored_bytes = chunk.bytes;
  chunk.codec = Codec::kNone;
  const std::span<std::byte> bytes = view(chunk);
  if (bytes.empty()) return Error{.code = Code::kInternal, .what = fmt::format("{} is not a slot of host memory", chunk.key.to_string())};
  return bytes;
}

Status HostBlocks::put(SavedChunk& chunk, std::span<const std::byte> bytes) {
  TORPOR_ASSIGN(const std::span<std::byte> slot, place(chunk));
  std::memcpy(slot.data(), bytes.data(), bytes.size());
  return ok();
}

std::span<std::byte> HostBlocks::view(const SavedChunk& chunk) {
  if (chunk.key.index >= digests_.size() || chunk.bytes != bytes_per_block_) return {};
  return memory_.bytes().subspan(chunk.key.index * bytes_per_block_, bytes_per_block_);
}

Status HostBlocks::get(const SavedChunk& chunk, std::span<std::byte> bytes) {
  const std::span<std::byte> slot = view(chunk);
  if (slot.size() != bytes.size()) return Error{.code = Code::kInternal, .what = fmt::format("{} is not a slot of host memory", chunk.key.to_string())};
  std::memcpy(bytes.data(), slot.data(), bytes.size());
  return ok();
}

// --- TieredBlocks --------------------------------------------------------------------------------------------------------

// One block between the tiers: the source is kept, the target is owned and Inflight.
struct TieredBlocks::Move {
  size_t index = 0;  // in the caller's list
  BlockRef source;
  MutableBlock target;
  ChunkPlan plan;
};

ChunkPlan TieredBlocks::plan(int32_t device_slot, int32_t host_slot) const {
  ChunkPlan plan{.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = static_cast<uint64_t>(host_slot)}};
  for (const KvPiece& piece : layout_.pieces_of(static_cast<uint32_t>(device_slot))) plan.pieces.push_back({piece.address, piece.bytes});
  return plan;
}

bool TieredBlocks::present(const Digest& key) const { return host_.pool().contains(key); }

double TieredBlocks::fill() const {
  const BlockPoolInfo info = host_.pool().info();
  const double used = info.cached + info.shared + info.owned + info.quarantined;
  return used / host_.pool().num_blocks();
}

bool TieredBlocks::upgrade(const BlockName& block) {
  std::optional<BlockRef> kept = device_.weak(block.id, block.generation).upgrade();
  if (!kept) return false;
  const std::lock_guard lock(mutex_);
  kept_.insert_or_assign({block.id, block.generation}, std::move(*kept));
  return true;
}

void TieredBlocks::transfer(std::span<const BlockName> blocks, std::span<BlockOutcome> outcomes) {
  std::vector<Move> moves;
  std::vector<ChunkPlan> plans;
  for (size_t i = 0; i < blocks.size(); ++i) {
    BlockRef source;
    {
      const std::lock_guard lock(mutex_);
      auto kept = kept_.extract({blocks[i].id, blocks[i].generation});
      source = std::move(kept.mapped());
    }
    if (host_.pool().contains(source.identity())) {
      outcomes[i] = BlockOutcome::kPresent;
      continue;
    }
    Result<std::vector<MutableBlock>> target = host_.pool().allocate(1);
    if (!target || !prepare((*target)[0], source.identity())) {
      outcomes[i] = BlockOutcome::kNoRoom;
      continue;
    }
    ChunkPlan copy = plan(source.id(), (*target)[0].id());
    plans.push_back(copy);
    moves.push_back({i, std::move(source), std::move((*target)[0]), std::move(copy)});
  }
  const std::lock_guard copying(copying_);
  const Result<std::vector<SavedChunk>> saved = executor_.save(plans, host_);
  for (size_t m = 0; m < moves.size(); ++m) {
    // A batch that failed is tried block by block: one bad block marks no other (I5).
    outcomes[moves[m].index] = saved ? settle(moves[m], (*saved)[m]) : save_one(moves[m]);
  }
}

BlockOutcome TieredBlocks::save_one(Move& move) {
  if (!executor_.quarantined()) {
    const Result<std::vector<SavedChunk>> saved = executor_.save({&move.plan, 1}, host_);
    if (saved) return settle(move, saved->front());
  }
  if (executor_.quarantined()) {  // the target stays Inflight, which its pool never uses again
    move.source.never_let_go();
    const std::lock_guard lock(mutex_);
    ++info_.quarantined;
    return BlockOutcome::kUnproven;
  }
  (void)move.target.compute_done();  // nothing is running: the slot may be used again
  return BlockOutcome::kFailed;
}

BlockOutcome TieredBlocks::settle(Move& move, const SavedChunk& saved) {
  host_.digests_[static_cast<size_t>(move.target.id())] = saved.digest;
  if (!move.target.compute_done() || !move.target.register_block()) return BlockOutcome::kFailed;
  return BlockOutcome::kTransferred;
}

Result<std::vector<BlockRef>> TieredBlocks::onboard(std::span<const BlockIdentity> chain) {
  const std::vector<BlockRef> sources = host_.pool().match(chain);
  TORPOR_ASSIGN(std::vector<MutableBlock> targets, device_.allocate(static_cast<int32_t>(sources.size())));
  std::vector<ChunkPlan> plans;
  std::vector<SavedChunk> chunks;
  for (size_t i = 0; i < sources.size(); ++i) {
    TORPOR_TRY(prepare(targets[i], sources[i].identity()));
    plans.push_back(plan(targets[i].id(), sources[i].id()));
    const uint64_t bytes = plans.back().bytes();
    chunks.push_back({.key = plans.back().key,
                      .bytes = bytes,
                      .digest = host_.digests_[static_cast<size_t>(sources[i].id())],
                      .offset = static_cast<uint64_t>(sources[i].id()) * bytes,
                      .stored_bytes = bytes});
  }
  std::vector<BlockRef> up;
  const std::lock_guard copying(copying_);
  const bool all = executor_.restore(chunks, plans, host_).has_value();
  for (size_t i = 0; i < sources.size(); ++i) {
    // After a failure block by block, as far as the run reaches. A target that cannot be proven stays Inflight.
    if (!all) {
      if (executor_.quarantined()) break;
      const Status one = executor_.restore({&chunks[i], 1}, {&plans[i], 1}, host_);
      if (!one && one.error().code == Code::kCorruption) {
        host_.pool().discard(sources[i]);
        const std::lock_guard lock(mutex_);
        ++info_.damaged;
      }
      if (!one) {
        for (size_t rest = i; rest < sources.size() && !executor_.quarantined(); ++rest) (void)targets[rest].compute_done();
        break;
      }
    }
    TORPOR_TRY(targets[i].compute_done());
    TORPOR_ASSIGN(BlockRef registered, targets[i].register_block());
    up.push_back(std::move(registered));
  }
  const std::lock_guard lock(mutex_);
  info_.onboarded += up.size();
  return up;
}

TieredBlocksInfo TieredBlocks::info() const {
  const std::lock_guard lock(mutex_);
  return info_;
}

}  // namespace torpor
