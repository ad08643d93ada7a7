// SPDX-License-Identifier: Apache-2.0
#include "engine/region_images.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "base/units.h"
#include "engine/combined_digest.h"
#include "engine/tags.h"

namespace torpor {

RegionImages::RegionImages(const RankParts& parts)
    : parts_(parts), chunks_(parts.allocator), index_(parts.device, parts.allocator, parts.arena) {}

// --- the content of the device ---

Status RegionImages::set_kv_layout(std::string tag, const KvLayout& layout) {
  TORPOR_RETURN_IF_ERROR(chunks_.set_kv_layout(std::move(tag), layout));
  forget_blocks();
  return ok();
}

void RegionImages::note_write(std::string_view tag) {
  forget_clean(tag);
  index_.note_write(tag);
}

void RegionImages::invalidate_digest(std::string_view tag) {
  forget_clean(tag);
  index_.invalidate_digest(tag);
}

void RegionImages::forget_clean(std::string_view tag) {
  if (is_kv(tag)) {
    forget_blocks();
    index_.set_host_store({});  // the versions of its blocks do not show this write
  }
  if (const TagImage* const image = find(tag); image != nullptr && image->kept) drop(tag);
}

void RegionImages::forget_blocks() noexcept {
  index_.forget_blocks();
  ++foreign_block_writes_;
}

void RegionImages::describe(orders::Describe::Reply& reply) {
  for (const auto& [tag, state] : parts_.allocator.states()) {
    if (state == RegionState::kAttached && !is_kv(tag) && index_.notice_write(tag)) forget_clean(tag);
  }
  index_.describe(reply);
  reply.bytes_per_block = chunks_.block_bytes();
  reply.num_blocks = chunks_.kv_layout().num_blocks;
}

void RegionImages::on_allocated(std::string_view tag) {
  if (!is_kv(tag)) invalidate_digest(tag);  // no block lies in it
}

// If regions of KV blocks are freed, a later wake fails: its engine cannot go on.
void RegionImages::on_freed(const RegionInfo& region) {
  if (is_kv(region.tag)) {
    if (!chunks_.holds_blocks(region)) return;
    forget_clean(region.tag);
    chunks_.clear_kv_layout();
    return;
  }
  invalidate_digest(region.tag);
  TagImage* const image = find(region.tag);
  if (image == nullptr) return;
  const auto is_of = [&](const SavedChunk& chunk) {
    return chunk.key.kind == ChunkKind::kRegion && chunk.key.region == region.name;
  };
  const auto spilled =
      image->chunks.begin() + static_cast<std::ptrdiff_t>(std::min(image->in_host, image->chunks.size()));
  image->in_host -= static_cast<size_t>(std::count_if(image->chunks.begin(), spilled, is_of));
  std::erase_if(image->chunks, is_of);
  if (image->chunks.empty()) drop(region.tag);
}

Result<orders::DigestTags::Reply> RegionImages::digest(const orders::DigestTags& order) {
  orders::DigestTags::Reply reply;
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  for (const std::string& tag : order.tags) {
    const auto state = states.find(tag);
    const TagImage* const image = find(tag);
    if (state != states.end() && state->second == RegionState::kDetached && image != nullptr) {
      reply.digests[tag] = combined_digest(image->chunks);
      continue;
    }
    if (state != states.end() &&
        (state->second == RegionState::kDetached || state->second == RegionState::kAttaching)) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("the content of {} is neither on the device nor saved", tag),
                   .next_step = fmt::format("wake the {} first", tag)};
    }
    if (std::optional<std::string> known = order.as_proven ? proven(tag) : std::nullopt; known) {
      reply.digests[tag] = std::move(*known);
      continue;
    }
    const std::vector<ChunkPlan> plans = chunks_.of_tag(tag);
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Digest> digests, parts_.blocking_transfers.digests(plans));
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

std::optional<std::string> RegionImages::proven(const std::string& tag) {
  std::optional<std::string> digest = index_.digest(tag);
  if (!digest) return digest;
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  const auto state = states.find(tag);
  if (state == states.end() || state->second != RegionState::kAttached) return std::nullopt;
  if (!index_.notice_write(tag)) return digest;
  forget_clean(tag);
  return std::nullopt;
}

// --- images ---

const TagImage* RegionImages::find(std::string_view tag) const {
  const auto found = images_.find(tag);
  return found == images_.end() ? nullptr : &found->second;
}

TagImage* RegionImages::find(std::string_view tag) {
  const auto found = images_.find(tag);
  return found == images_.end() ? nullptr : &found->second;
}

void RegionImages::drop(std::string_view tag) noexcept {
  if (const auto found = images_.find(tag); found != images_.end()) images_.erase(found);
}

void RegionImages::forget_saved(const std::vector<std::string>& tags) noexcept {
  for (const std::string& tag : tags) {
    TagImage* const image = find(tag);
    if (image == nullptr) continue;
    image->reused = false;
    if (image->kept) continue;
    if (is_kv(tag)) retain(*image);
    drop(tag);
  }
}

void RegionImages::retain(TagImage& image) noexcept {
  if (parts_.retain_kv_bytes == 0 || image.host == nullptr) return;
  (void)try_catch([&]() -> Status {
    const size_t saved = std::min(image.in_host, image.contents.size());
    image.chunks.resize(saved);
    image.contents.resize(saved);
    TORPOR_RETURN_IF_ERROR(image.host->finish());
    index_.retain(
        {.host = std::move(image.host), .chunks = std::move(image.chunks), .contents = std::move(image.contents)},
        parts_.retain_kv_bytes);
    return ok();
  });
}

void RegionImages::on_detached(const std::vector<std::string>& tags, std::set<std::string, std::less<>> away) {
  away_.merge(away);
  for (const std::string& tag : tags) {
    TagImage* image = find(tag);
    if (image != nullptr && image->kept && !image->reused) {  // this sleep did not save the tag
      drop(tag);
      image = nullptr;
    }
    if (image != nullptr) image->kept = image->clean = image->reused = false;
    if (!is_kv(tag)) continue;
    index_.release_retained();
    index_.checkpoints().keep_only(image == nullptr ? std::span<const SavedChunk>() : image->chunks);
  }
}

std::vector<std::string> RegionImages::here(const std::vector<std::string>& tags) const {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  std::vector<std::string> found = tags;
  std::erase_if(found, [&](const std::string& tag) { return !states.contains(tag); });
  return found;
}

std::vector<std::string> RegionImages::asleep_of(const std::vector<std::string>& tags) const {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  std::vector<std::string> asleep = tags;
  std::erase_if(asleep, [&](const std::string& tag) {
    const auto state = states.find(tag);
    return state == states.end() || (away_.contains(tag) && state->second == RegionState::kAttached);
  });
  return asleep;
}

// Return whether the image of a tag without blocks has all of its regions: it has none that was allocated while the tag
// slept.
bool RegionImages::is_whole(const std::string& tag) const {
  const TagImage* const image = find(tag);
  return image != nullptr && chunks_.of_tag(tag).size() == image->chunks.size();
}

// May be repeated if a reply was lost: tags that are already attached stay so.
Status RegionImages::finish(const std::vector<std::string>& tags, bool keep, bool blocks_stay) {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  std::vector<std::string> unfinished;
  for (const std::string& tag : asleep_of(tags)) {
    const auto state = states.find(tag);
    if (state == states.end() || state->second != RegionState::kAttached) unfinished.push_back(tag);
  }
  std::vector<std::string> whole;
  for (const std::string& tag : tags) {
    if (keep && parts_.keep_backup && !is_kv(tag) && is_whole(tag)) whole.push_back(tag);
  }
  // Detect writes from here on, against a tag without content.
  for (const std::string& tag : tags) {
    if (!is_kv(tag) && find(tag) == nullptr) index_.look_anew(tag);
  }
  if (!unfinished.empty()) TORPOR_RETURN_IF_ERROR(parts_.allocator.finish_restore(unfinished));
  // Nothing can fail from here on.
  for (const std::string& tag : tags) {
    if (const auto back = away_.find(tag); back != away_.end()) away_.erase(back);
    TagImage* const image = find(tag);
    if (image == nullptr) continue;
    if (is_kv(tag)) {
      if (!blocks_stay) drop_blocks(keep);
      continue;
    }
    const bool in_host = image->host != nullptr && image->spilled == nullptr;
    if (!in_host || !has_tag(whole, tag)) {
      drop(tag);
      continue;
    }
    image->kept = true;
    image->clean = tag == kWeightsTag;
    image->reused = false;
    image->reused_bytes = 0;
  }
  return ok();
}

void RegionImages::drop_blocks(bool keep) noexcept {
  TagImage* const image = find(chunks_.kv_tag());
  if (image == nullptr) return;
  if (!keep) index_.checkpoints().clear();
  if (parts_.transfers.quarantined()) {
    HostTier::abandon(std::move(image->host));  // a copy may still read there
  } else if (keep) {
    retain(*image);
  }
  drop(chunks_.kv_tag());
}

void RegionImages::on_moved(const std::string& directory) {
  for (auto& [tag, image] : images_) {
    if (image.host == nullptr) image.directory = directory;
  }
}

Status RegionImages::compare(const std::vector<std::string>& tags) {
  for (const std::string& tag : tags) {
    TagImage* const image = find(tag);
    if (image == nullptr || !image->kept) continue;
    TORPOR_ASSIGN_OR_RETURN(const std::vector<ChunkPlan> plans, chunks_.of_saved(image->chunks));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Digest> digests, parts_.blocking_transfers.digests(plans));
    image->clean = std::equal(digests.begin(), digests.end(), image->chunks.begin(), image->chunks.end(),
                              [](const Digest& now, const SavedChunk& then) { return now == then.digest; });
    if (!image->clean) drop(tag);
  }
  return ok();
}

void RegionImages::distrust() noexcept {
  for (auto& [tag, image] : images_) image.clean = image.clean && tag == kWeightsTag;
}

Status RegionImages::read_saved(const RegionInfo& region, uint64_t offset, std::span<std::byte> out) const {
  const TagImage* const image = is_kv(region.tag) ? nullptr : find(region.tag);
  const size_t in_host = image == nullptr || image->host == nullptr ? 0 : image->in_host;
  uint64_t read = 0;
  std::vector<std::byte> unpacked;
  for (size_t i = 0; i < in_host && read < out.size(); ++i) {
    const SavedChunk& chunk = image->chunks[i];  // chunks of a region follow one another
    const uint64_t begin = chunk.key.index * DeviceChunks::kRegionChunk;
    const uint64_t from = offset + read;
    if (chunk.key.region != region.name || from < begin || from >= begin + chunk.bytes) continue;
    std::span<const std::byte> there = image->host->view(chunk);
    if (there.empty()) {
      unpacked.resize(chunk.bytes);
      TORPOR_RETURN_IF_ERROR(image->host->get_one(chunk, unpacked));
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

bool RegionImages::needs_staging() const {
  return parts_.host_codec != Codec::kNone && std::any_of(images_.begin(), images_.end(), [](const auto& each) {
           return each.second.host != nullptr && !each.second.kept;
         });
}

void RegionImages::reserve_staging() noexcept {
  for (auto& [tag, image] : images_) {
    if (image.spilled == nullptr || !image.staging.empty()) continue;
    (void)try_catch([&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(image.staging, parts_.arena.allocate(image.staging_bytes));
      return ok();
    });
  }
}

void RegionImages::fill(RankLedger& ledger) const {
  for (const auto& [tag, image] : images_) {
    for (size_t i = 0; i < image.chunks.size(); ++i) {
      (image.host != nullptr && i < image.in_host ? ledger.tags[tag].backup_host_bytes
                                                  : ledger.tags[tag].backup_disk_bytes) += image.chunks[i].stored_bytes;
    }
    ledger.tags[tag].reused_bytes += image.reused_bytes;
  }
  if (const uint64_t bytes = index_.retained_bytes(); bytes > 0)
    ledger.tags[chunks_.kv_tag()].backup_host_bytes += bytes;
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
