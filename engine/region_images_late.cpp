// SPDX-License-Identifier: Apache-2.0
// RegionImages: a wake whose engine runs before all of its KV blocks are back.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include <fmt/core.h>

#include "base/units.h"
#include "engine/late_blocks.h"
#include "engine/rank_restorer.h"
#include "engine/region_images.h"
#include "engine/write_behind.h"

namespace torpor {

RegionImages::~RegionImages() {
  behind_.reset();
  late_.reset();
}

RegionImages::Halves RegionImages::halves_of(std::span<const SavedChunk> chunks, size_t in_host,
                                             const std::vector<int32_t>& late) {
  std::unordered_map<uint64_t, size_t> places;
  places.reserve(late.size());
  for (size_t i = 0; i < late.size(); ++i) places.emplace(static_cast<uint64_t>(late[i]), i);
  Halves halves;
  std::vector<std::pair<size_t, size_t>> order;  // place, chunk
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto place = places.find(chunks[i].key.index);
    if (place != places.end()) {
      order.emplace_back(place->second, i);
    } else {
      (i < in_host ? halves.first : halves.first_spilled).push_back(chunks[i]);
    }
  }
  std::sort(order.begin(), order.end());
  for (const auto& [place, i] : order) (i < in_host ? halves.late : halves.late_spilled).push_back(chunks[i]);
  return halves;
}

// Jobs of at most so many bytes, or one block.
Status RegionImages::add_late(Late& late, std::vector<SavedChunk> chunks, Tier& source, uint64_t job_bytes,
                              bool alone) const {
  for (auto chunk = chunks.begin(); chunk != chunks.end();) {
    LateBlocks::Part part{.tier = &source, .alone = alone};
    for (uint64_t bytes = 0; chunk != chunks.end(); ++chunk) {
      bytes += align_up(chunk->bytes, kPage);
      if (!part.chunks.empty() && bytes > job_bytes) break;
      late.bytes += chunk->bytes;
      part.chunks.push_back(std::move(*chunk));
    }
    TORPOR_ASSIGN(part.plans, plans_for(part.chunks));
    for (size_t i = 0; i < part.plans.size(); ++i) {
      if (part.chunks[i].bytes == part.plans[i].bytes()) continue;
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} was saved with another size", part.plans[i].key.to_string()),
                   .next_step = "wake it into the engine configuration that saved it"};
    }
    late.parts.push_back(std::move(part));
  }
  return ok();
}

Result<RegionImages::Late> RegionImages::restore_early(Image& image, const std::vector<int32_t>& late_blocks,
                                                       RankRestorer& restorer) {
  const size_t in_host = image.host == nullptr ? image.chunks.size() : image.in_host;
  Halves halves = halves_of(image.chunks, in_host, late_blocks);
  Late late{.of_image = true};
  if (image.host == nullptr) {
    TORPOR_ASSIGN(late.disk, open_image(image));
    restorer.keep(late.disk);
  }
  Tier& source = image.host != nullptr ? static_cast<Tier&>(*image.host) : *late.disk;
  TORPOR_ASSIGN(std::vector<ChunkPlan> plans, plans_for(halves.first));
  TORPOR_TRY(restorer.copy(halves.first, std::move(plans), source));
  TORPOR_TRY(add_late(late, std::move(halves.late), source, parts_.late_job_bytes, /*alone=*/false));
  if (image.spilled == nullptr) return late;
  TORPOR_ASSIGN(std::vector<ChunkPlan> spilled, plans_for(halves.first_spilled));
  TORPOR_TRY(restore_spilled(image, halves.first_spilled, std::move(spilled), restorer));
  TORPOR_TRY(add_late(late, std::move(halves.late_spilled), *image.spilled, parts_.spill_staging_bytes,
                      /*alone=*/true));
  return late;
}

Status RegionImages::load_all_but_late(const std::vector<SavedChunk>& blocks, const std::vector<int32_t>& late_blocks,
                                       std::unique_ptr<Tier> tier, orders::LoadBlocks::Reply& reply) {
  Halves halves = halves_of(blocks, blocks.size(), late_blocks);
  TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_for(halves.first));
  TORPOR_TRY(parts_.transfers.restore(halves.first, plans, *tier));
  if (halves.late.empty()) return ok();
  Late late{.disk = std::move(tier)};
  TORPOR_TRY(add_late(late, std::move(halves.late), *late.disk, parts_.late_job_bytes, /*alone=*/false));
  reply.late_bytes = begin_late(std::move(late));
  reply.bytes -= reply.late_bytes;
  return ok();
}

// Precondition: all regions are there. Returns the bytes that are on their way then.
uint64_t RegionImages::begin_late(Late late) {
  if (late.parts.empty()) return 0;
  auto begun = std::make_unique<Late>(std::move(late));
  begun->blocks = std::make_unique<LateBlocks>(parts_.transfers, std::move(begun->parts), parts_.late_thread);
  late_ = std::move(begun);
  return late_->bytes;
}

orders::Arrivals::Reply RegionImages::arrivals(const orders::Arrivals& order) {
  orders::Arrivals::Reply reply{.ended = true};
  if (late_ == nullptr) return reply;
  LateBlocks& blocks = *late_->blocks;
  const auto rank = static_cast<size_t>(parts_.rank);
  reply.first = rank < order.seen.size() ? std::min<uint64_t>(order.seen[rank], blocks.total()) : 0;
  if (order.cancel) blocks.cancel();
  blocks.forgo(order.skipped);
  blocks.prefer(order.wanted);
  blocks.wait(order.wait, reply.first);
  reply.arrivals = blocks.from(reply.first);
  reply.why = blocks.why();
  reply.ended = reply.first == blocks.total();
  if (reply.ended) end_late();
  return reply;
}

Status RegionImages::nothing_late() const {
  if (late_ == nullptr) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what = "KV blocks of the last wake are still on their way",
               .next_step = "wait for them first"};
}

// Whether the image that a finish() would end is still needed.
bool RegionImages::stays_for_late(bool keep) noexcept {
  if (late_ == nullptr || !late_->of_image) return false;
  late_->keep = keep;
  return true;
}

void RegionImages::cancel_late() noexcept { late_.reset(); }

void RegionImages::end_late() noexcept {
  if (late_ == nullptr) return;
  const bool of_image = late_->of_image;
  const bool keep = late_->keep;
  late_.reset();
  const auto found = images_.find(kv_tag_);
  if (!of_image || found == images_.end()) return;
  if (parts_.transfers.quarantined()) {
    HostTier::abandon(std::move(found->second.host));  // a copy may still read there
  } else {
    keep ? retain(found->second) : index_.checkpoints().clear();
  }
  images_.erase(found);
}

}  // namespace torpor
