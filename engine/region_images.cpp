// SPDX-License-Identifier: Apache-2.0
#include "engine/region_images.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/units.h"
#include "engine/rank_restorer.h"
#include "engine/renumbered_tier.h"
#include "engine/swap_pages.h"
#include "engine/tags.h"
#include "engine/write_behind.h"

namespace torpor {
namespace {

uint64_t bytes_of(const std::vector<SavedChunk>& chunks) {
  uint64_t bytes = 0;
  for (const SavedChunk& chunk : chunks) bytes += chunk.bytes;
  return bytes;
}

}  // namespace

RegionImages::RegionImages(Parts parts)
    : parts_(std::move(parts)), index_(parts_.device, parts_.allocator, parts_.arena, parts_.retain_kv_bytes) {}

uint64_t RegionImages::Image::bytes() const { return bytes_of(chunks); }

Status RegionImages::set_kv_layout(std::string tag, KvLayout layout) {
  TORPOR_TRY(layout.validate());
  // Every piece must lie inside a region of the tag, so that a block number from a file can never reach elsewhere.
  const std::vector<RegionInfo> regions = parts_.allocator.regions_of(tag);
  // Blocks lie at equal distances, so those between the first and the last are inside where both are in one region.
  for (const KvTensor& tensor : layout.tensors) {
    for (uint64_t layer = 0; layer < tensor.layers; ++layer) {
      const uint64_t begin = tensor.address + layer * tensor.layer_stride;
      const uint64_t end = begin + (layout.num_blocks - 1) * tensor.block_stride + tensor.block_bytes;
      const bool inside = std::any_of(regions.begin(), regions.end(), [&](const RegionInfo& region) {
        return begin >= region.address && end <= region.address + region.size_bytes;
      });
      if (!inside) {
        return Error{.code = Code::kInvalidArgument,
                     .what = fmt::format("the KV layout puts {} blocks at {:#x} to {:#x}, outside the regions of {}",
                                         layout.num_blocks, begin, end, tag),
                     .next_step = "give the layout that the engine allocated"};
      }
    }
  }
  forget_blocks();
  kv_tag_ = std::move(tag);
  kv_layout_ = layout.merged();
  return ok();
}

void RegionImages::note_write(std::string_view tag) {
  forget_clean(tag);
  index_.note_write(tag);
}

void RegionImages::describe(orders::Describe::Reply& reply) {
  for (const auto& [tag, state] : parts_.allocator.states()) {
    if (state == RegionState::kAttached && tag != kv_tag_ && index_.notice_write(tag)) forget_clean(tag);
  }
  index_.describe(reply);
  reply.bytes_per_block = kv_layout_.bytes_per_block();
  reply.num_blocks = kv_layout_.num_blocks;
}

void RegionImages::forget_clean(std::string_view tag) {
  if (tag == kv_tag_) {
    forget_blocks();
    index_.set_host_store({});  // whose stamps do not tell of this
  }
  if (const auto found = images_.find(tag); found != images_.end() && found->second.kept) images_.erase(found);
}

void RegionImages::invalidate_digest(std::string_view tag) {
  forget_clean(tag);
  index_.invalidate_digest(tag);
}

// --- the way down ---

Result<ChunkKey> RegionImages::key_of(int32_t block) const {
  if (block < 0 || static_cast<uint32_t>(block) >= kv_layout_.num_blocks) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("KV block {} does not exist, there are {}", block, kv_layout_.num_blocks),
                 .next_step = "start the engine as the one that slept was started"};
  }
  return ChunkKey{.kind = ChunkKind::kKvBlock, .tag = kv_tag_, .index = static_cast<uint64_t>(block)};
}

Result<ChunkPlan> RegionImages::plan_of(int32_t block) const {
  TORPOR_ASSIGN(ChunkKey key, key_of(block));
  ChunkPlan plan{.key = std::move(key), .pieces = {}};
  for (const KvPiece& piece : kv_layout_.pieces_of(static_cast<uint32_t>(block)))
    plan.pieces.push_back({piece.address, piece.bytes});
  return plan;
}

Result<std::vector<ChunkPlan>> RegionImages::plans_of(const std::string& tag,
                                                      const std::vector<int32_t>& blocks) const {
  std::vector<ChunkPlan> plans;
  if (tag == kv_tag_) {
    for (const int32_t block : blocks) {
      TORPOR_ASSIGN(ChunkPlan plan, plan_of(block));
      plans.push_back(std::move(plan));
    }
    return plans;
  }
  for (const RegionInfo& region : parts_.allocator.regions_of(tag)) {
    for (uint64_t offset = 0; offset < region.size_bytes; offset += kRegionChunk) {
      ChunkPlan plan{
          .key = {.kind = ChunkKind::kRegion, .tag = tag, .region = region.name, .index = offset / kRegionChunk}};
      plan.pieces.push_back({region.address + offset, std::min(kRegionChunk, region.size_bytes - offset)});
      plans.push_back(std::move(plan));
    }
  }
  return plans;
}

void RegionImages::forget_saved(const std::vector<std::string>& tags) {
  for (const std::string& tag : tags) {
    const auto found = images_.find(tag);
    if (found == images_.end() || found->second.kept) continue;
    if (tag == kv_tag_) retain(found->second);
    images_.erase(found);
  }
}

void RegionImages::on_detached(const std::vector<std::string>& tags, std::set<std::string, std::less<>> away) {
  away_.merge(away);
  for (const std::string& tag : tags) {
    const auto found = images_.find(tag);
    if (found != images_.end()) found->second.kept = found->second.clean = false;
    if (tag != kv_tag_) continue;
    index_.release_retained();
    index_.checkpoints().keep_only(found == images_.end() ? std::span<const SavedChunk>() : found->second.chunks);
  }
  pages_gone_ = false;
}

void RegionImages::on_moved(const std::string& directory) {
  for (auto& [tag, image] : images_) {
    if (image.host == nullptr) image.directory = directory;
  }
}

// --- the way up ---

Result<const RankSummary*> RegionImages::own_summary(const Checkpoint& checkpoint) const {
  if (const RankSummary* const own = checkpoint.manifest().find_rank(parts_.rank)) return own;
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("the checkpoint has nothing of rank {}", parts_.rank),
               .next_step = "start the engine with as many ranks as the one that slept"};
}

Status RegionImages::restore_image(Image& image, RankRestorer& restorer) {
  TORPOR_ASSIGN(std::vector<ChunkPlan> plans, plans_for(image.chunks));
  if (image.host == nullptr) {
    TORPOR_ASSIGN(std::unique_ptr<DiskTier> opened, open_image(image));
    const std::shared_ptr<DiskTier> tier = std::move(opened);
    restorer.keep(tier);
    return restorer.copy(image.chunks, std::move(plans), *tier);
  }
  const std::span<const SavedChunk> chunks = image.chunks;
  const size_t in_host = std::min(image.in_host, chunks.size());
  std::vector<ChunkPlan> spilled(std::make_move_iterator(plans.begin() + static_cast<std::ptrdiff_t>(in_host)),
                                 std::make_move_iterator(plans.end()));
  plans.resize(in_host);
  TORPOR_TRY(restorer.copy(chunks.first(in_host), std::move(plans), *image.host));
  return restore_spilled(image, chunks.subspan(in_host), std::move(spilled), restorer);
}

Status RegionImages::restore_spilled(Image& image, std::span<const SavedChunk> chunks, std::vector<ChunkPlan> plans,
                                     RankRestorer& restorer) {
  if (image.spilled == nullptr) return ok();
  image.staging = {};
  return restorer.copy_in_turn(chunks, std::move(plans), *image.spilled, parts_.spill_staging_bytes);
}

Result<std::unique_ptr<DiskTier>> RegionImages::open_image(const Image& image) const {
  TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(parts_.file_system, image.directory, parts_.key));
  TORPOR_ASSIGN(const RankSummary* const own, own_summary(checkpoint));
  return checkpoint.open_rank(*own, nullptr, FileIo::kCached);
}

// With a channel the regions come page by page, as the other engine releases them.
Result<std::unique_ptr<RestoreGate>> RegionImages::gate_of(const std::vector<std::string>& tags,
                                                           SwapChannel* channel) const {
  if (channel == nullptr) return std::make_unique<MappedRegions>(parts_.allocator, tags, parts_.own_threads);
  auto pages = std::make_unique<PageTaker>(parts_.allocator, tags, *channel, static_cast<size_t>(parts_.rank));
  TORPOR_TRY(pages->begin());
  return pages;
}

Result<orders::Restore::Reply> RegionImages::restore(const orders::Restore& order) {
  const std::vector<std::string>& tags = order.tags;
  orders::Restore::Reply reply;
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  std::optional<Late> late;
  std::unique_ptr<SwapChannel> room;
  if (!order.room.empty()) {
    TORPOR_ASSIGN(room, SwapChannel::open(order.room));
  }
  TORPOR_ASSIGN(const std::unique_ptr<RestoreGate> gate, gate_of(asleep_of(tags), room.get()));
  RankRestorer restorer(parts_.transfers, *gate);
  for (const std::string& tag : tags) {
    const auto found = images_.find(tag);
    Image* const image = found == images_.end() ? nullptr : &found->second;
    // A tag that never went, as where a detach was undone, has its content.
    const auto state = states.find(tag);
    const bool went =
        state != states.end() && state->second != RegionState::kAttached && state->second != RegionState::kSaving;
    if (image == nullptr && is_scratch(tag)) continue;
    if (image == nullptr && tag != kv_tag_ && went) index_.note_missing(tag);
    if ((image == nullptr && went) || index_.missing(tag)) reply.without_content.push_back(tag);
    if (image == nullptr) continue;
    reply.bytes += image->bytes();
    if (tag != kv_tag_ || order.late.empty()) {
      TORPOR_TRY(restore_image(*image, restorer));
    } else {
      TORPOR_ASSIGN(late, restore_early(*image, order.late, restorer));
    }
  }
  TORPOR_TRY(restorer.wait());
  if (late) reply.late_bytes = begin_late(std::move(*late));
  reply.bytes -= reply.late_bytes;
  return reply;
}

Result<orders::LoadBlocks::Reply> RegionImages::load_blocks(const orders::LoadBlocks& order) {
  TORPOR_ASSIGN(const Checkpoint checkpoint, open_same(order.directory, order.generation, order.id));
  TORPOR_ASSIGN(const RankSummary* const own, own_summary(checkpoint));
  TORPOR_ASSIGN(const RankRefs refs, checkpoint.refs(*own));
  std::vector<SavedChunk> blocks;  // by their numbers here
  std::vector<uint64_t> there;     // of each, its number in the checkpoint
  for (const SavedChunk& chunk : refs.records) {
    const uint64_t number = chunk.key.index;
    if (chunk.key.kind != ChunkKind::kKvBlock || chunk.key.tag != kv_tag_) continue;
    SavedChunk block = chunk;
    if (!order.numbers.empty()) {
      if (number >= order.numbers.size() || order.numbers[number] < 0) continue;  // nobody has it here
      block.key.index = static_cast<uint64_t>(order.numbers[number]);
    }
    blocks.push_back(std::move(block));
    there.push_back(number);
  }
  TORPOR_ASSIGN(std::unique_ptr<Tier> tier, checkpoint.open_rank(*own, nullptr, FileIo::kCached));
  if (!order.numbers.empty()) {
    std::unordered_map<uint64_t, uint64_t> stored;
    for (size_t i = 0; i < blocks.size(); ++i) stored.emplace(blocks[i].key.index, there[i]);
    tier = std::make_unique<RenumberedTier>(std::move(tier), std::move(stored));
  }
  orders::LoadBlocks::Reply reply{.bytes = bytes_of(blocks)};
  TORPOR_TRY(load_all_but_late(blocks, order.late, std::move(tier), reply));
  index_.checkpoints().note_loaded(order.id, blocks, there);
  return reply;
}

// Repeated after an answer that was lost on the way: tags that are attached already stay so.
Status RegionImages::finish(const std::vector<std::string>& tags, bool keep) {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  std::vector<std::string> unfinished;
  for (const std::string& tag : asleep_of(tags)) {
    const auto state = states.find(tag);
    if (state == states.end() || state->second != RegionState::kAttached) unfinished.push_back(tag);
  }
  std::vector<std::string> whole;
  for (const std::string& tag : tags) {
    if (!keep || !parts_.keep_backup || tag == kv_tag_) continue;
    TORPOR_ASSIGN(const bool has_all, is_whole(tag));
    if (has_all) whole.push_back(tag);
  }
  // Writes from here on show against what a tag is without content.
  for (const std::string& tag : tags) {
    if (tag != kv_tag_ && find(tag) == nullptr) index_.look_anew(tag);
  }
  if (!unfinished.empty()) TORPOR_TRY(parts_.allocator.finish_restore(unfinished));
  // From here on nothing fails.
  for (const std::string& tag : tags) {
    if (const auto back = away_.find(tag); back != away_.end()) away_.erase(back);
    const auto found = images_.find(tag);
    if (found == images_.end()) continue;
    if (tag == kv_tag_ && stays_for_late(keep)) continue;
    const bool in_host = found->second.host != nullptr && found->second.spilled == nullptr;
    if (has_tag(whole, tag) && in_host) {
      found->second.kept = true;
      found->second.clean = tag == kWeightsTag;
      found->second.reused_bytes = 0;
      continue;
    }
    if (tag == kv_tag_) keep ? retain(found->second) : index_.checkpoints().clear();
    images_.erase(found);
  }
  return ok();
}

// --- the rest ---

const RegionImages::Image* RegionImages::find(std::string_view tag) const {
  const auto found = images_.find(tag);
  return found == images_.end() ? nullptr : &found->second;
}

RegionImages::Images RegionImages::take(const std::vector<std::string>& tags) noexcept {
  Images taken;
  for (const std::string& tag : tags) taken.insert(images_.extract(tag));
  return taken;
}

void RegionImages::fill(RankLedger& ledger) const {
  for (const auto& [tag, image] : images_) {
    for (size_t i = 0; i < image.chunks.size(); ++i) {
      (image.host != nullptr && i < image.in_host ? ledger.tags[tag].backup_host_bytes
                                                  : ledger.tags[tag].backup_disk_bytes) += image.chunks[i].stored_bytes;
    }
    ledger.tags[tag].reused_bytes += image.reused_bytes;
  }
  if (const uint64_t bytes = index_.retained_bytes(); bytes > 0) ledger.tags[kv_tag_].backup_host_bytes += bytes;
  const OutcomeCounts counts = parts_.transfers.counts();
  for (size_t outcome = 0; outcome < counts.size(); ++outcome) {
    if (counts[outcome] == 0) continue;
    ledger.chunks_by_outcome[std::string(name(static_cast<BlockOutcome>(outcome)))] = counts[outcome];
  }
}

void RegionImages::abandon() noexcept {
  for (auto& [tag, image] : images_) HostTier::abandon(std::move(image.host));
}

}  // namespace torpor
