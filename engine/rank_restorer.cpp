// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_restorer.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <fmt/core.h>

#include "base/units.h"
#include "engine/rank_checkpoint.h"
#include "engine/renumbered_tier.h"
#include "engine/swap_pages.h"
#include "engine/tags.h"

namespace torpor {
namespace {

// Divide chunks into those that are not deferred, and those that are, in the order of `deferred` (block numbers).
std::pair<std::vector<SavedChunk>, std::vector<SavedChunk>> divide(std::span<const SavedChunk> chunks,
                                                                   const std::vector<int32_t>& deferred) {
  std::unordered_map<uint64_t, size_t> places;
  places.reserve(deferred.size());
  for (size_t i = 0; i < deferred.size(); ++i) places.emplace(static_cast<uint64_t>(deferred[i]), i);
  std::pair<std::vector<SavedChunk>, std::vector<SavedChunk>> divided;
  std::vector<std::pair<size_t, size_t>> order;  // (position in `deferred`, chunk)
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto place = places.find(chunks[i].key.index);
    if (place == places.end()) {
      divided.first.push_back(chunks[i]);
    } else {
      order.emplace_back(place->second, i);
    }
  }
  std::sort(order.begin(), order.end());
  for (const auto& [place, i] : order) divided.second.push_back(chunks[i]);
  return divided;
}

}  // namespace

Result<orders::Restore::Reply> RankRestorer::restore(const orders::Restore& order) {
  orders::Restore::Reply reply;
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  std::unique_ptr<SwapChannel> channel;
  if (!order.channel.empty()) {
    TORPOR_ASSIGN_OR_RETURN(channel, SwapChannel::open(order.channel));
  }
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<RestoreGate> gate,
                          gate_of(images_.asleep_of(order.tags), channel.get()));
  ChunkRestorer copier(parts_.blocking_transfers, *gate, locate_in(images_.chunks()));
  Deferred deferred{.of_image = true};
  for (const std::string& tag : order.tags) {
    TagImage* const image = images_.find(tag);
    // A tag that was never detached has its content, as after a detach that was undone.
    const auto state = states.find(tag);
    const bool went =
        state != states.end() && state->second != RegionState::kAttached && state->second != RegionState::kSaving;
    if (image == nullptr && is_scratch(tag)) continue;
    if (image == nullptr && !images_.is_kv(tag) && went) images_.index().note_missing(tag);
    if ((image == nullptr && went) || images_.index().missing(tag)) reply.without_content.push_back(tag);
    if (image == nullptr) continue;
    reply.bytes += image->bytes();
    TORPOR_RETURN_IF_ERROR(
        restore_image(*image, images_.is_kv(tag) ? order.deferred : std::vector<int32_t>(), copier, deferred));
  }
  TORPOR_RETURN_IF_ERROR(copier.wait());
  reply.deferred_bytes = begin_deferred(std::move(deferred));
  reply.bytes -= reply.deferred_bytes;
  return reply;
}

// With a channel, regions come page by page, as the other engine releases them.
Result<std::unique_ptr<RestoreGate>> RankRestorer::gate_of(const std::vector<std::string>& tags,
                                                           SwapChannel* channel) const {
  if (channel == nullptr) return std::make_unique<MappedRegions>(parts_.allocator, tags, parts_.own_threads);
  auto pages = std::make_unique<PageAcquirer>(parts_.allocator, tags, *channel, static_cast<size_t>(parts_.rank));
  TORPOR_RETURN_IF_ERROR(pages->begin());
  return pages;
}

Status RankRestorer::restore_image(TagImage& image, const std::vector<int32_t>& deferred_numbers, ChunkRestorer& copier,
                                   Deferred& deferred) const {
  const std::span<const SavedChunk> all = image.chunks;
  if (image.host == nullptr) {
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<DiskTier> opened, open_chunks(parts_, image.directory));
    const std::shared_ptr<DiskTier> tier = std::move(opened);
    copier.keep(tier);
    if (!deferred_numbers.empty()) deferred.disk = tier;
    return copy({.tier = *tier, .chunks = all}, deferred_numbers, copier, deferred);
  }
  const size_t in_host = std::min(image.in_host, all.size());
  TORPOR_RETURN_IF_ERROR(copy({.tier = *image.host, .chunks = all.first(in_host)}, deferred_numbers, copier, deferred));
  if (image.spilled == nullptr) return ok();
  image.staging = {};
  return copy({.tier = *image.spilled, .chunks = all.subspan(in_host), .in_turn = true}, deferred_numbers, copier,
              deferred);
}

// Begin to copy the chunks that are not deferred; add the others to `deferred`.
Status RankRestorer::copy(const Source& from, const std::vector<int32_t>& deferred_numbers, ChunkRestorer& copier,
                          Deferred& deferred) const {
  std::vector<SavedChunk> first;
  std::vector<SavedChunk> later;
  std::span<const SavedChunk> now = from.chunks;
  if (!deferred_numbers.empty()) {
    std::tie(first, later) = divide(from.chunks, deferred_numbers);
    now = first;
  }
  TORPOR_RETURN_IF_ERROR(from.in_turn ? copier.copy_in_turn(now, from.tier, parts_.spill_staging_bytes)
                                      : copier.copy(now, from.tier));
  return add_deferred(std::move(later), from, deferred);
}

// Divide them into jobs of at most deferred_job_bytes, or of one block.
Status RankRestorer::add_deferred(std::vector<SavedChunk> chunks, const Source& from, Deferred& deferred) const {
  const uint64_t job_bytes = from.in_turn ? parts_.spill_staging_bytes : parts_.deferred_job_bytes;
  for (auto chunk = chunks.begin(); chunk != chunks.end();) {
    DeferredCopies::Part part{.tier = &from.tier, .alone = from.in_turn};
    for (uint64_t bytes = 0; chunk != chunks.end(); ++chunk) {
      bytes += align_up(chunk->bytes, kPage);
      if (!part.chunks.empty() && bytes > job_bytes) break;
      deferred.bytes += chunk->bytes;
      part.chunks.push_back(std::move(*chunk));
    }
    TORPOR_ASSIGN_OR_RETURN(part.plans, images_.chunks().of_saved(part.chunks));
    for (size_t i = 0; i < part.plans.size(); ++i) {
      if (part.chunks[i].bytes == part.plans[i].bytes()) continue;
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} was saved with another size", part.plans[i].key.to_string()),
                   .next_step = "wake it into the engine configuration that saved it"};
    }
    deferred.parts.push_back(std::move(part));
  }
  return ok();
}

Result<orders::Restore::Reply> RankRestorer::load_blocks(const orders::Restore& order) {
  const orders::CheckpointSource& from = *order.checkpoint;
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_same(parts_, from.directory, from.generation, from.id));
  TORPOR_ASSIGN_OR_RETURN(const RankSummary* const own, own_summary(parts_, checkpoint));
  TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(*own));
  std::vector<SavedChunk> blocks;  // by their numbers here
  std::vector<uint64_t> there;     // the number of each in the checkpoint
  orders::Restore::Reply reply;
  for (const SavedChunk& chunk : refs.records) {
    const uint64_t number = chunk.key.index;
    if (chunk.key.kind != ChunkKind::kKvBlock || !images_.is_kv(chunk.key.tag)) continue;
    SavedChunk block = chunk;
    if (!from.numbers.empty()) {
      if (number >= from.numbers.size() || from.numbers[number] < 0) continue;  // it has no number here
      block.key.index = static_cast<uint64_t>(from.numbers[number]);
    }
    reply.bytes += block.bytes;
    blocks.push_back(std::move(block));
    there.push_back(number);
  }
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<RecordStore> opened, checkpoint.open_rank(*own, nullptr, FileIo::kCached));
  if (!from.numbers.empty()) {
    std::unordered_map<uint64_t, uint64_t> stored;
    for (size_t i = 0; i < blocks.size(); ++i) stored.emplace(blocks[i].key.index, there[i]);
    opened = std::make_unique<RenumberedTier>(std::move(opened), std::move(stored));
  }
  Deferred deferred{.disk = std::move(opened)};
  AllAttached gate;
  ChunkRestorer copier(parts_.blocking_transfers, gate, locate_in(images_.chunks()));
  TORPOR_RETURN_IF_ERROR(copy({.tier = *deferred.disk, .chunks = blocks}, order.deferred, copier, deferred));
  TORPOR_RETURN_IF_ERROR(copier.wait());
  reply.deferred_bytes = begin_deferred(std::move(deferred));
  reply.bytes -= reply.deferred_bytes;
  images_.index().checkpoints().note_loaded(from.id, blocks, there);
  return reply;
}

// Precondition: all regions are attached. Return the bytes that are still to come.
uint64_t RankRestorer::begin_deferred(Deferred deferred) {
  if (deferred.parts.empty()) return 0;
  auto begun = std::make_unique<Deferred>(std::move(deferred));
  begun->blocks = std::make_unique<DeferredCopies>(parts_.transfers, std::move(begun->parts), parts_.deferred_thread);
  deferred_ = std::move(begun);
  return deferred_->bytes;
}

Status RankRestorer::finish(const std::vector<std::string>& tags, bool keep) {
  const bool blocks_stay = deferred_ != nullptr && deferred_->of_image;
  TORPOR_RETURN_IF_ERROR(images_.finish(tags, keep, blocks_stay));
  if (blocks_stay && has_tag(tags, images_.chunks().kv_tag())) {
    deferred_->keep = keep;
    deferred_->foreign_writes = images_.foreign_block_writes();
  }
  return ok();
}

orders::PollRestore::Reply RankRestorer::poll(const orders::PollRestore& order) {
  orders::PollRestore::Reply reply{.ended = true};
  if (deferred_ == nullptr) return reply;
  DeferredCopies& blocks = *deferred_->blocks;
  const auto rank = static_cast<size_t>(parts_.rank);
  reply.first = rank < order.seen.size() ? std::min<uint64_t>(order.seen[rank], blocks.total()) : 0;
  if (order.cancel) blocks.cancel();
  blocks.skip(order.skipped);
  blocks.prefer(order.wanted);
  blocks.wait(order.wait, reply.first);
  reply.arrivals = blocks.from(reply.first);
  reply.why = blocks.why();
  reply.ended = reply.first == blocks.total();
  if (reply.ended) end_deferred();
  return reply;
}

Status RankRestorer::nothing_deferred() const {
  if (deferred_ == nullptr) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what = "KV blocks of the last wake are still on their way",
               .next_step = "wait for them first"};
}

void RankRestorer::end_deferred() noexcept {
  if (deferred_ == nullptr) return;
  const bool of_image = deferred_->of_image;
  const bool keep = deferred_->keep && deferred_->foreign_writes == images_.foreign_block_writes();
  deferred_.reset();
  if (of_image) images_.drop_blocks(keep);
}

}  // namespace torpor
