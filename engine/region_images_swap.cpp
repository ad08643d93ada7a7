// SPDX-License-Identifier: Apache-2.0
// RegionImages: memory that one engine gives to another while it is copied.
#include <algorithm>
#include <deque>

#include "engine/region_images.h"
#include "engine/swap_pages.h"

namespace torpor {
namespace {

constexpr size_t kUnderWay = 2;  // jobs: one is copied while memory is unmapped, or mapped, beside it

}  // namespace

Result<orders::Save::Reply> RegionImages::save_giving(const orders::Save& order, SwapChannel& room) {
  orders::Save::Reply reply;
  TORPOR_ASSIGN(const std::vector<Giving> giving, prepare_giving(order, reply));
  const SwapPages pages(parts_.allocator, order.tags);
  std::vector<uint64_t> needed(pages.size());  // of each page: pieces that are not copied
  for (const Giving& each : giving) {
    for (const ChunkPlan& plan : each.plans) pages.each_of(plan, [&](size_t page) { ++needed[page]; });
  }
  const auto let_go = [&](size_t page) -> Status {
    pages_gone_ = true;
    TORPOR_TRY(parts_.allocator.give_page(pages[page]));
    return room.give(static_cast<size_t>(parts_.rank), pages[page].size_bytes);
  };

  struct Part {
    const Giving* of = nullptr;
    std::span<const ChunkPlan> plans{};
    size_t first = 0;
    JobId job = JobId::kNone;
  };
  std::deque<Part> under_way;
  const auto end_oldest = [&]() -> Status {
    const Part part = under_way.front();
    under_way.pop_front();
    TORPOR_ASSIGN(const std::vector<SavedChunk> saved, parts_.transfers.end_save(part.job));
    Image& image = images_.at(part.of->tag);
    image.chunks.insert(image.chunks.end(), saved.begin(), saved.end());
    for (size_t i = 0; i < saved.size() && !part.of->contents.empty(); ++i)
      image.contents.push_back(part.of->contents[part.first + i]);
    image.in_host = image.chunks.size();
    Status gone;
    for (const ChunkPlan& plan : part.plans) {
      pages.each_of(plan, [&](size_t page) {
        if (--needed[page] == 0 && gone) gone = let_go(page);
      });
    }
    return gone;
  };
  const Status copied = catching([&]() -> Status {
    for (size_t page = 0; page < pages.size(); ++page) {
      if (needed[page] == 0) TORPOR_TRY(let_go(page));
    }
    for (const Giving& each : giving) {
      const std::span<const ChunkPlan> plans = each.plans;
      for (size_t first = 0, end = 0; first < plans.size(); first = end) {
        for (uint64_t bytes = 0; end < plans.size() && bytes < pages.most_bytes(); ++end) bytes += plans[end].bytes();
        under_way.push_back({&each, plans.subspan(first, end - first), first});
        Result<JobId> begun = parts_.transfers.begin_save(under_way.back().plans, *images_.at(each.tag).host);
        if (!begun) under_way.pop_back();
        TORPOR_ASSIGN(const JobId job, std::move(begun));
        under_way.back().job = job;
        if (under_way.size() == kUnderWay) TORPOR_TRY(end_oldest());
      }
    }
    while (!under_way.empty()) TORPOR_TRY(end_oldest());
    for (const Giving& each : giving) {
      const Image& image = images_.at(each.tag);
      TORPOR_TRY(image.host->finish());
      learn(each.tag, image.chunks);
    }
    return ok();
  });
  for (; !under_way.empty(); under_way.pop_front()) (void)parts_.transfers.end_save(under_way.front().job);
  if (copied) return reply;
  for (const Giving& each : giving) {
    if (!parts_.transfers.quarantined()) break;
    HostTier::abandon(std::move(images_.at(each.tag).host));  // a copy may still write there
    images_.erase(each.tag);
  }
  return copied.error();
}

// What was not copied never went. May be repeated.
Status RegionImages::take_back(const std::vector<std::string>& tags) {
  if (!pages_gone_) return ok();
  for (const DevicePage& page : parts_.allocator.pages_of(tags)) TORPOR_TRY(parts_.allocator.take_page(page));
  for (const std::string& tag : tags) {
    const Image* const image = find(tag);
    if (image == nullptr || image->chunks.empty()) continue;
    TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_for(image->chunks));
    TORPOR_TRY(parts_.transfers.restore(image->chunks, std::span(plans).first(image->chunks.size()), *image->host));
  }
  pages_gone_ = false;
  return ok();
}

}  // namespace torpor
