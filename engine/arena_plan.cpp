// SPDX-License-Identifier: Apache-2.0
#include "engine/arena_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/units.h"

namespace torpor {

uint64_t ArenaPlan::Tag::copied_bytes() const { return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}); }

uint64_t ArenaPlan::Tag::spilled_bytes() const {
  return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(in_host), sizes.end(), uint64_t{0});
}

Result<ArenaPlan> ArenaPlan::of(const RankParts& parts, const RegionImages& images, const PackedShares& shares,
                                const orders::Save& order, Take take) {
  ArenaPlan plan(parts, images, shares);
  for (const std::string& name : order.tags) {
    Tag& tag = plan.tags_.emplace_back(Tag{.tag = name});
    if (const TagImage* const kept = images.find(name); kept != nullptr && kept->needs_no_copy()) {
      tag.clean_bytes = kept->bytes();
      continue;
    }
    tag.image.host = std::make_unique<HostTier>(parts.arena, parts.host_codec);
    if (images.is_kv(name)) {
      TORPOR_RETURN_IF_ERROR(plan.add_blocks(tag, order, take));
    } else {
      tag.copied = images.chunks().of_tag(name);
      for (const ChunkPlan& chunk : tag.copied) tag.sizes.push_back(chunk.bytes());
    }
    tag.in_host = tag.sizes.size();
  }
  return plan;
}

Status ArenaPlan::add_blocks(Tag& tag, const orders::Save& order, Take take) const {
  const std::vector<int32_t>& blocks = order.blocks;
  if (!order.host_slots.empty() && order.host_slots.size() != blocks.size())
    return Error{.code = Code::kCorruption, .what = "an order that names blocks does not say the host slot of each"};
  TORPOR_ASSIGN_OR_RETURN(std::vector<BlockContent> contents, contents_of(blocks, order.versions, order.steps));

  const DeviceChunks& chunks = images_->chunks();
  const ContentIndex& index = images_->index();
  const BlocksInStore in_store = index.find_in_store(order.host_slots);
  const auto is_borrowed = [&](size_t i) {
    return in_store.store != nullptr && in_store.stored[i] && can_borrow(tag, *in_store.stored[i]);
  };
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (is_borrowed(i)) contents[i] = {};  // no other copy of it is needed
  }
  const std::vector<uint64_t> retained_bytes =
      take == Take::kNothing ? index.find_retained(blocks, contents) : take_over(tag.image, blocks, contents);
  std::vector<int32_t> copied;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (is_borrowed(i)) {
      tag.borrowed_bytes += in_store.stored[i]->record.bytes;
      if (take == Take::kNow) borrow(tag, *in_store.stored[i], blocks[i], in_store.store);
    } else if (retained_bytes[i] != 0) {
      tag.reused_bytes += chunks.block_bytes();
      tag.retained_bytes += retained_bytes[i];
    } else {
      TORPOR_RETURN_IF_ERROR(chunks.check(blocks[i]));
      tag.sizes.push_back(chunks.block_bytes());
      if (take == Take::kNothing) continue;
      copied.push_back(blocks[i]);
      tag.contents.push_back(contents[i]);
    }
  }
  tag.image.in_host = tag.image.chunks.size();
  TORPOR_ASSIGN_OR_RETURN(tag.copied, chunks.of_blocks(copied));
  return ok();
}

// Move into the image what is retained of these blocks. Return as RetainedBlocks::find().
std::vector<uint64_t> ArenaPlan::take_over(TagImage& image, std::span<const int32_t> blocks,
                                           std::span<const BlockContent> contents) const {
  RetainedBlocks::Taken taken = images_->index().take_retained(blocks, contents);
  if (taken.blocks.host != nullptr) {
    image.host = std::move(taken.blocks.host);
    image.chunks = std::move(taken.blocks.chunks);
    image.contents = std::move(taken.blocks.contents);
  }
  image.chunks.reserve(blocks.size());
  image.contents.reserve(blocks.size());
  return std::move(taken.bytes);
}

bool ArenaPlan::can_borrow(const Tag& tag, const HostStore::Stored& stored) const {
  return stored.record.bytes == images_->chunks().block_bytes() && tag.image.host->readable(stored.record.codec);
}

// Put a block into the image and leave its bytes in the host store. It has no content to be retained with.
void ArenaPlan::borrow(Tag& tag, const HostStore::Stored& stored, int32_t block,
                       const std::shared_ptr<HostStore>& store) const {
  TagImage& image = tag.image;
  SavedChunk& chunk = image.chunks.emplace_back(
      SavedChunk{.key = {.kind = ChunkKind::kKvBlock, .tag = tag.tag, .index = static_cast<uint64_t>(block)},
                 .bytes = stored.record.bytes,
                 .digest = stored.record.digest});
  image.host->borrow(chunk, stored.bytes, stored.record.codec, store);
  image.contents.emplace_back();
}

// `bytes`: the size of one chunk.
uint64_t ArenaPlan::room_for(const Tag& tag, uint64_t bytes) const {
  return shares_->held_for(tag.tag, bytes) + kPage;  // as HostTier::prepare() does
}

uint64_t ArenaPlan::arena_bytes() const {
  uint64_t bytes = 0;
  for (const Tag& tag : tags_) {
    const bool known = shares_->known(tag.tag);
    for (const uint64_t size : tag.sizes) bytes += known ? room_for(tag, size) : size + kPage;
  }
  return bytes;
}

uint64_t ArenaPlan::least_bytes() const {
  uint64_t bytes = 0;
  for (const Tag& tag : tags_)
    bytes += HostTier::least_bytes(parts_->host_codec, tag.copied_bytes() - tag.spilled_bytes(), tag.in_host);
  return bytes;
}

uint64_t ArenaPlan::spill_staging(uint64_t padded_bytes, uint64_t largest) const {
  return std::min(padded_bytes, std::max(parts_->spill_staging_bytes, largest));
}

uint64_t ArenaPlan::batch_staging() const {
  if (parts_->host_codec == Codec::kNone) return 0;
  uint64_t all = 0;
  uint64_t padded = 0;
  uint64_t largest = 0;
  const auto add = [&](uint64_t bytes) {
    all += bytes;
    padded += align_up(bytes, kPage);
    largest = std::max(largest, align_up(bytes, kPage));
  };
  const uint64_t block_bytes = images_->chunks().block_bytes();
  for (const Tag& tag : tags_) {
    const TagImage* const clean = tag.clean() ? images_->find(tag.tag) : nullptr;
    for (const uint64_t size : tag.sizes) add(size);
    for (const SavedChunk& chunk : (clean != nullptr ? *clean : tag.image).chunks) add(chunk.bytes);
    if (!tag.image.chunks.empty()) continue;
    for (uint64_t at = 0; at < tag.reused_bytes + tag.borrowed_bytes; at += block_bytes) add(block_bytes);
  }
  return TransferEngine::most_staging(all, padded, largest);
}

void ArenaPlan::fit(uint64_t freed, uint64_t reserved) {
  uint64_t needed = reserved;
  for (Tag& tag : tags_) {
    tag.in_host = tag.sizes.size();
    for (const uint64_t size : tag.sizes) needed += room_for(tag, size);
  }
  const HostArenaInfo arena = parts_->arena.info();
  if (parts_->spill_dir.empty() || arena.budget_bytes == 0) return;
  const uint64_t room = arena.budget_bytes - std::min(arena.budget_bytes, arena.used_bytes) + freed;
  for (auto tag = tags_.rbegin(); tag != tags_.rend(); ++tag) {
    uint64_t padded = 0;
    uint64_t largest = 0;
    uint64_t staging = 0;
    while (needed + staging > room && tag->in_host > 0) {
      const uint64_t size = tag->sizes[--tag->in_host];
      const uint64_t pages = align_up(size, kPage);
      needed -= room_for(*tag, size);
      padded += pages;
      largest = std::max(largest, pages);
      staging = spill_staging(padded, largest);
    }
    needed += staging;
  }
}

}  // namespace torpor
