// SPDX-License-Identifier: Apache-2.0
// RegionImages: regions that come and go, and what is known of the content of those that are there.
#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "base/units.h"
#include "engine/combined_digest.h"
#include "engine/region_images.h"
#include "engine/tags.h"

namespace torpor {

void RegionImages::on_allocated(std::string_view tag) {
  if (tag != kv_tag_) invalidate_digest(tag);  // no block lies in it
}

bool RegionImages::holds_blocks(const RegionInfo& region) const {
  return region.tag == kv_tag_ &&
         std::any_of(kv_layout_.tensors.begin(), kv_layout_.tensors.end(), [&](const KvTensor& tensor) {
           return tensor.address >= region.address && tensor.address - region.address < region.size_bytes;
         });
}

void RegionImages::before_free(const RegionInfo& region) {
  if (region.tag == kWeightsTag || holds_blocks(region)) stop_behind();
  if (holds_blocks(region)) end_late();
}

// A wake of blocks that have no place any more fails: their engine cannot go on.
void RegionImages::on_freed(const RegionInfo& region) {
  if (region.tag == kv_tag_) {
    if (!holds_blocks(region)) return;
    forget_clean(kv_tag_);
    kv_layout_ = {};
    return;
  }
  invalidate_digest(region.tag);
  const auto found = images_.find(region.tag);
  if (found == images_.end()) return;
  Image& image = found->second;
  const auto is_of = [&](const SavedChunk& chunk) {
    return chunk.key.kind == ChunkKind::kRegion && chunk.key.region == region.name;
  };
  const auto spilled = image.chunks.begin() + static_cast<std::ptrdiff_t>(std::min(image.in_host, image.chunks.size()));
  image.in_host -= static_cast<size_t>(std::count_if(image.chunks.begin(), spilled, is_of));
  std::erase_if(image.chunks, is_of);
  if (image.chunks.empty()) images_.erase(found);
}

// Whether the image of a tag without blocks has all of its regions.
Result<bool> RegionImages::is_whole(const std::string& tag) const {
  const Image* const image = find(tag);
  if (image == nullptr) return false;
  TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_of(tag, {}));
  return plans.size() == image->chunks.size();  // on_freed() leaves none of another
}

std::vector<std::string> RegionImages::asleep_of(const std::vector<std::string>& tags) const {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  std::vector<std::string> asleep = tags;
  std::erase_if(asleep, [&](const std::string& tag) {
    const auto state = states.find(tag);
    return away_.contains(tag) && (state == states.end() || state->second == RegionState::kAttached);
  });
  return asleep;
}

// Each from its own key: they may be in any order.
Result<std::vector<ChunkPlan>> RegionImages::plans_for(const std::vector<SavedChunk>& chunks) const {
  std::map<std::pair<std::string_view, std::string_view>, const RegionInfo*> places;  // tag and name of a region
  std::vector<RegionInfo> regions;
  if (std::any_of(chunks.begin(), chunks.end(), [](const auto& each) { return each.key.kind == ChunkKind::kRegion; }))
    regions = parts_.allocator.regions();
  for (const RegionInfo& region : regions) places[{region.tag, region.name}] = &region;
  std::vector<ChunkPlan> plans;
  plans.reserve(chunks.size());
  for (const SavedChunk& chunk : chunks) {
    const ChunkKey& key = chunk.key;
    if (key.kind == ChunkKind::kKvBlock) {
      TORPOR_ASSIGN(ChunkPlan plan, plan_of(static_cast<int32_t>(std::min<uint64_t>(key.index, INT32_MAX))));
      plans.push_back(std::move(plan));
      continue;
    }
    const auto place = places.find({key.tag, key.region});
    const std::optional<uint64_t> offset = checked_mul(key.index, kRegionChunk);
    if (place == places.end() || !offset || *offset >= place->second->size_bytes) {
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} was saved, and there is no such memory here", key.to_string()),
                   .next_step = "wake it into the engine configuration that saved it"};
    }
    const RegionInfo& region = *place->second;
    plans.push_back(
        {.key = key, .pieces = {{region.address + *offset, std::min(kRegionChunk, region.size_bytes - *offset)}}});
  }
  return plans;
}

Status RegionImages::read_saved(const RegionInfo& region, uint64_t offset, std::span<std::byte> out) const {
  const Image* const image = region.tag == kv_tag_ ? nullptr : find(region.tag);
  const size_t in_host = image == nullptr || image->host == nullptr ? 0 : image->in_host;
  uint64_t read = 0;
  std::vector<std::byte> unpacked;
  for (size_t i = 0; i < in_host && read < out.size(); ++i) {
    const SavedChunk& chunk = image->chunks[i];  // those of a region follow one another
    const uint64_t begin = chunk.key.index * kRegionChunk;
    const uint64_t from = offset + read;
    if (chunk.key.region != region.name || from < begin || from >= begin + chunk.bytes) continue;
    std::span<const std::byte> there = image->host->view(chunk);
    if (there.empty()) {
      unpacked.resize(chunk.bytes);
      TORPOR_TRY(image->host->get_one(chunk, unpacked));
      there = unpacked;
    }
    there = there.subspan(from - begin);
    const size_t bytes = std::min(there.size(), out.size() - read);
    std::memcpy(out.data() + read, there.data(), bytes);
    read += bytes;
  }
  if (read == out.size()) return ok();
  return Error{.code = Code::kNotFound,
               .what = fmt::format("nothing of {} is saved in host memory", region.tag),
               .next_step = "put it to sleep with its content first"};
}

Result<orders::DigestTags::Reply> RegionImages::digest(const orders::DigestTags& order) {
  orders::DigestTags::Reply reply;
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  for (const std::string& tag : order.tags) {
    const auto state = states.find(tag);
    const Image* const image = find(tag);
    if (state != states.end() && state->second == RegionState::kDetached && image != nullptr) {
      reply.digests[tag] = combined_digest(image->chunks);
      continue;
    }
    if (std::optional<std::string> known = order.as_proven ? proven(tag) : std::nullopt; known) {
      reply.digests[tag] = std::move(*known);
      continue;
    }
    TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_of(tag, {}));
    TORPOR_ASSIGN(const std::vector<Digest> digests, parts_.transfers.digests(plans));
    CombinedDigest all;
    for (size_t i = 0; i < plans.size(); ++i) {
      all.add(plans[i].key, digests[i]);
      reply.bytes += plans[i].bytes();
    }
    reply.digests[tag] = all.finish();
    if (state != states.end() && state->second == RegionState::kAttached) index_.note_digest(tag, reply.digests[tag]);
  }
  return reply;
}

Status RegionImages::compare(const std::vector<std::string>& tags) {
  for (const std::string& tag : tags) {
    const auto found = images_.find(tag);
    if (found == images_.end() || !found->second.kept) continue;
    TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_for(found->second.chunks));
    TORPOR_ASSIGN(const std::vector<Digest> digests, parts_.transfers.digests(plans));
    const bool same =
        std::equal(digests.begin(), digests.end(), found->second.chunks.begin(), found->second.chunks.end(),
                   [](const Digest& now, const SavedChunk& then) { return now == then.digest; });
    found->second.clean = same;
    if (!same) images_.erase(found);
  }
  return ok();
}

void RegionImages::distrust() noexcept {
  for (auto& [tag, image] : images_) image.clean = image.clean && tag == kWeightsTag;
}

}  // namespace torpor
