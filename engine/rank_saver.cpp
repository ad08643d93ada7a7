// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_saver.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/units.h"
#include "engine/chunk_restorer.h"
#include "engine/chunk_saver.h"
#include "engine/combined_digest.h"
#include "engine/spill_file.h"
#include "engine/swap_pages.h"

namespace torpor {
namespace {

// Sort the chunks by address, as pages are released in that order.
void sort_by_address(ArenaPlan::Tag& tag) {
  std::vector<size_t> order(tag.copied.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return tag.copied[a].pieces.front().address < tag.copied[b].pieces.front().address;
  });
  std::vector<uint64_t> sizes;
  std::vector<ChunkPlan> copied;
  std::vector<BlockContent> contents;
  sizes.reserve(order.size());
  copied.reserve(order.size());
  for (const size_t i : order) {
    sizes.push_back(tag.sizes[i]);
    copied.push_back(std::move(tag.copied[i]));
    if (!tag.contents.empty()) contents.push_back(tag.contents[i]);
  }
  tag.sizes = std::move(sizes);
  tag.copied = std::move(copied);
  tag.contents = std::move(contents);
}

}  // namespace

Result<orders::Save::Reply> RankSaver::save(const orders::Save& order) {
  if (!order.directory.empty()) return checkpoint_.save(order);
  const auto is_final = [](const Result<orders::Save::Reply>& saved) {
    return saved || saved.error().code != Code::kResourceExhausted;
  };
  Result<orders::Save::Reply> saved = save_to_arena(order, 0);
  if (is_final(saved) || (images_.index().retained_bytes() == 0 && !spills())) return saved;
  // Retained blocks, or free memory that is held, may be in the way of larger pieces; and packed content may be larger
  // than planned.
  images_.index().release_retained();
  for (const std::string& tag : order.tags) shares_.expect_whole(tag);
  const auto again = [&](uint64_t unused) {
    parts_.arena.trim();
    return save_to_arena(order, unused);
  };
  saved = again(0);
  // The free memory of the arena may be in pieces that are too small. Then more chunks go to the file, in the end all.
  const uint64_t budget = parts_.arena.info().budget_bytes;
  for (uint64_t unused = budget / 32; spills() && unused != 0 && unused <= budget && !is_final(saved); unused *= 2)
    saved = again(unused);
  return saved;
}

// Chunks for the file are saved first, while there is memory for staging them. `unused`: bytes of the arena to leave
// free. After an error, blocks that were copied or taken over are retained.
Result<orders::Save::Reply> RankSaver::save_to_arena(const orders::Save& order, uint64_t unused) {
  TORPOR_ASSIGN_OR_RETURN(ArenaPlan plan, ArenaPlan::of(parts_, images_, shares_, order, ArenaPlan::Take::kNow));
  const Status saved = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(begin_images(plan));
    plan.fit(0, unused);
    TORPOR_RETURN_IF_ERROR(parts_.arena.ensure_free(plan.least_bytes()));  // before any tag takes some
    for (ArenaPlan::Tag& tag : plan.tags()) TORPOR_RETURN_IF_ERROR(spill(plan, tag));
    return copy_to_host(plan, nullptr);
  });
  if (saved) return complete_images(plan, Memory::kThere);
  forget(plan, order.tags);
  return saved.error();
}

Result<orders::Save::Reply> RankSaver::save_for_swap(const orders::Save& order, SwapChannel& channel) {
  Result<ArenaPlan> prepared = prepare_for_swap(order);
  if (!prepared && prepared.error().code == Code::kResourceExhausted && images_.index().retained_bytes() > 0) {
    images_.index().release_retained();
    parts_.arena.trim();
    prepared = prepare_for_swap(order);
  }
  TORPOR_ASSIGN_OR_RETURN(ArenaPlan plan, std::move(prepared));
  PageReleaser releaser(parts_.allocator, order.tags, channel, static_cast<size_t>(parts_.rank));
  for (const ArenaPlan::Tag& tag : plan.tags()) releaser.expect(tag.copied);
  const Status saved = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(releaser.begin());
    return copy_to_host(plan, &releaser);
  });
  pages_released_ = releaser.has_released();
  if (saved) return complete_images(plan, Memory::kGone);
  abandon_quarantined(order.tags);
  return saved.error();
}

// If memory is released while it is copied, no chunk may find the arena full later: take all host memory before.
Result<ArenaPlan> RankSaver::prepare_for_swap(const orders::Save& order) {
  TORPOR_ASSIGN_OR_RETURN(ArenaPlan plan, ArenaPlan::of(parts_, images_, shares_, order, ArenaPlan::Take::kNow));
  const Status prepared = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(begin_images(plan));
    TORPOR_RETURN_IF_ERROR(parts_.arena.prefault(plan.arena_bytes()));
    for (ArenaPlan::Tag& tag : plan.tags()) sort_by_address(tag);
    return ok();
  });
  if (prepared) return plan;
  forget(plan, order.tags);
  return prepared.error();
}

// Retain blocks that were copied or taken over, whether the images have them or the plan.
void RankSaver::forget(ArenaPlan& plan, const std::vector<std::string>& tags) noexcept {
  abandon_quarantined(tags);
  images_.forget_saved(tags);
  for (ArenaPlan::Tag& tag : plan.tags()) {
    if (images_.is_kv(tag.tag)) images_.retain(tag.image);
  }
}

// From here on the images have what was taken over, and get what is copied.
Status RankSaver::begin_images(ArenaPlan& plan) {
  parts_.transfers.release_staging();
  const uint64_t staging = plan.batch_staging();
  for (ArenaPlan::Tag& tag : plan.tags()) {
    if (!tag.clean()) images_.put(tag.tag, std::move(tag.image));
  }
  return parts_.transfers.keep_staging(staging);
}

Status RankSaver::spill(const ArenaPlan& plan, ArenaPlan::Tag& tag) {
  const std::span<const ChunkPlan> rest = std::span(tag.copied).subspan(tag.in_host);
  if (rest.empty()) return ok();
  uint64_t padded = 0;
  uint64_t largest = 0;
  for (const ChunkPlan& chunk : rest) {
    padded += align_up(chunk.bytes(), kPage);
    largest = std::max(largest, align_up(chunk.bytes(), kPage));
  }
  TagImage& image = *images_.find(tag.tag);
  // Take it before other memory, so that it lies in the way of none.
  image.staging_bytes = plan.spill_staging(padded, largest);
  TORPOR_ASSIGN_OR_RETURN(image.staging, parts_.arena.allocate(image.staging_bytes));
  TORPOR_ASSIGN_OR_RETURN(image.spilled, make_spill_file(parts_.file_system, parts_.spill_dir, parts_.rank,
                                                         parts_.key.get(), parts_.encrypt));
  const HostArenaInfo arena = parts_.arena.info();
  const uint64_t room = arena.budget_bytes - std::min(arena.budget_bytes, arena.used_bytes);
  return ChunkSaver(parts_.blocking_transfers)
      .copy_in_turn(rest, *image.spilled, std::max(parts_.spill_staging_bytes, room / 2), tag.spilled);
}

// After an error the images have what was copied so far.
Status RankSaver::copy_to_host(ArenaPlan& plan, ReleaseGate* gate) {
  const Status copied = try_catch([&]() -> Status {
    ChunkSaver saver(parts_.blocking_transfers, gate);
    for (const ArenaPlan::Tag& tag : plan.tags()) {
      if (tag.clean()) continue;
      TagImage& image = *images_.find(tag.tag);
      TORPOR_RETURN_IF_ERROR(saver.copy(std::span(tag.copied).first(tag.in_host), *image.host, image.chunks));
    }
    return saver.wait();
  });
  for (const ArenaPlan::Tag& tag : plan.tags()) {
    if (TagImage* const image = images_.find(tag.tag); !tag.clean()) image->in_host = image->chunks.size();
  }
  const Status noted = try_catch([&]() -> Status {
    for (const ArenaPlan::Tag& tag : plan.tags()) {
      if (tag.clean()) continue;
      TagImage& image = *images_.find(tag.tag);
      if (copied) shares_.learn(tag.tag, image.chunks);
      if (tag.contents.empty()) continue;
      const auto came = static_cast<std::ptrdiff_t>(image.chunks.size() - image.contents.size());
      image.contents.insert(image.contents.end(), tag.contents.begin(), tag.contents.begin() + came);
    }
    return ok();
  });
  return copied ? noted : copied;
}

orders::Save::Reply RankSaver::complete_images(ArenaPlan& plan, Memory memory) {
  orders::Save::Reply reply;
  for (ArenaPlan::Tag& tag : plan.tags()) {
    reply.bytes += tag.copied_bytes();
    reply.spilled_bytes += tag.spilled_bytes();
    reply.reused_bytes += tag.unread_bytes();
    TagImage& image = *images_.find(tag.tag);
    image.reused_bytes = tag.unread_bytes();
    image.reused = tag.clean();
    if (tag.clean()) continue;
    image.chunks.insert(image.chunks.end(), tag.spilled.begin(), tag.spilled.end());
    if (images_.is_kv(tag.tag)) continue;
    reply.digests[tag.tag] = combined_digest(image.chunks);
    if (memory == Memory::kThere) images_.index().note_digest(tag.tag, reply.digests[tag.tag]);
  }
  return reply;
}

// A copy that may still run can write into the images.
void RankSaver::abandon_quarantined(const std::vector<std::string>& tags) noexcept {
  if (!parts_.transfers.quarantined()) return;
  for (const std::string& tag : tags) {
    TagImage* const image = images_.find(tag);
    if (image == nullptr || image->kept) continue;
    HostTier::abandon(std::move(image->host));
    images_.drop(tag);
  }
}

Status RankSaver::reacquire_pages(const std::vector<std::string>& tags) {
  if (!pages_released_) return ok();
  TORPOR_RETURN_IF_ERROR(parts_.transfers.usable());  // else what was saved is not in the images any more
  for (const DevicePage& page : parts_.allocator.pages_of(tags))
    TORPOR_RETURN_IF_ERROR(parts_.allocator.acquire_page(page));
  for (const std::string& tag : tags) {
    const TagImage* const image = images_.find(tag);
    if (image == nullptr || image->chunks.empty()) continue;
    TORPOR_RETURN_IF_ERROR(restore_attached(parts_.blocking_transfers, images_.chunks(), image->chunks, *image->host));
  }
  pages_released_ = false;
  return ok();
}

Result<orders::Save::Reply> RankSaver::plan(const orders::Save& order) const {
  if (!order.writing.base.empty()) return checkpoint_.plan(order);
  TORPOR_ASSIGN_OR_RETURN(ArenaPlan plan, ArenaPlan::of(parts_, images_, shares_, order, ArenaPlan::Take::kNothing));
  uint64_t taken_over = 0;
  for (const ArenaPlan::Tag& tag : plan.tags()) taken_over += tag.retained_bytes;
  const uint64_t batch = plan.batch_staging();
  const uint64_t kept = std::min(batch, parts_.transfers.kept_staging());
  const uint64_t staging = (batch - kept) * parts_.transfers.memory_batches();
  const uint64_t retained = images_.index().retained_bytes();
  plan.fit(retained - std::min(retained, taken_over), staging);
  orders::Save::Reply reply;
  for (const ArenaPlan::Tag& tag : plan.tags()) {
    reply.copied_bytes[tag.tag] = tag.copied_bytes();
    reply.reused_bytes += tag.unread_bytes();
    reply.spilled_bytes += tag.spilled_bytes();
  }
  return reply;
}

}  // namespace torpor
