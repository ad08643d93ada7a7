// SPDX-License-Identifier: Apache-2.0
// RegionImages: what a stored checkpoint has of a tag -> the regions of a new process.
#include <algorithm>

#include <fmt/core.h>

#include "base/host_name.h"
#include "base/units.h"
#include "engine/combined_digest.h"
#include "engine/region_images.h"

namespace torpor {
namespace {

constexpr const char* kLoadItsFiles = "start the engine with the model's own files";

// Names the first region that is another one there.
Error other_layout(const std::string& tag, const std::vector<SavedChunk>& stored, const std::vector<ChunkPlan>& plans) {
  std::map<std::string, uint64_t> there, here;
  for (const SavedChunk& chunk : stored) there[chunk.key.region] += chunk.bytes;
  for (const ChunkPlan& plan : plans) here[plan.key.region] += plan.bytes();
  std::string what = "its pieces are cut otherwise";
  for (const auto& [region, bytes] : there) {
    const auto own = here.find(region);
    if (own != here.end() && own->second == bytes) continue;
    what = fmt::format("the region \"{}\" has {} bytes there, and {} here", region, bytes,
                       own == here.end() ? 0 : own->second);
  }
  for (const auto& [region, bytes] : here) {
    if (!there.contains(region)) what = fmt::format("the region \"{}\" of {} bytes is not there", region, bytes);
  }
  return {.code = Code::kIncompatible,
          .what = fmt::format("the checkpoint has {} of another layout: {}", tag, what),
          .next_step = "start the engine as the one that slept was started"};
}

constexpr const char* kHaveItThere =
    "let the hosts of all ranks share the directory, or copy or pull the checkpoint to the same path on each";

}  // namespace

Result<Checkpoint> RegionImages::open_same(const std::string& path, uint64_t generation, const SealId& id) const {
  Result<Checkpoint> checkpoint = open_checkpoint(parts_.file_system, path, parts_.key);
  if (!checkpoint && checkpoint.error().code == Code::kNotFound) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("the host {} has no checkpoint at {}", host_name(), path),
                 .next_step = kHaveItThere};
  }
  if (!checkpoint || (checkpoint->manifest().generation == generation && checkpoint->manifest().id == id))
    return checkpoint;
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("on the host {} {} is not the checkpoint that the other processes see there",
                                   host_name(), checkpoint->path()),
               .next_step = kHaveItThere};
}

Result<LoadedTag> RegionImages::load_tag(const StoredTag& stored) {
  const std::string& tag = stored.tag;
  TORPOR_ASSIGN(const Checkpoint checkpoint, open_same(stored.directory, stored.generation, stored.id));
  TORPOR_ASSIGN(const RankSummary* const own, own_summary(checkpoint));
  TORPOR_ASSIGN(const RankRefs refs, checkpoint.refs(*own));
  std::vector<SavedChunk> chunks;
  std::copy_if(refs.records.begin(), refs.records.end(), std::back_inserter(chunks),
               [&](const SavedChunk& chunk) { return chunk.key.kind == ChunkKind::kRegion && chunk.key.tag == tag; });
  if (chunks.empty()) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("{} has no {}: it was written without", checkpoint.path(), tag),
                 .next_step = kLoadItsFiles};
  }
  TORPOR_ASSIGN(const std::unique_ptr<DiskTier> tier, checkpoint.open_rank(*own, nullptr, FileIo::kCached));
  TORPOR_TRY(fill_tag(tag, chunks, *tier));
  LoadedTag loaded{.digest = combined_digest(chunks)};
  for (const SavedChunk& chunk : chunks) loaded.bytes += chunk.bytes;
  index_.note_filled(tag, loaded.digest);
  return loaded;
}

Status RegionImages::fill_tag(const std::string& tag, std::vector<SavedChunk> chunks, Tier& source) {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  const auto state = states.find(tag);
  if (tag == kv_tag_ || state == states.end() || state->second != RegionState::kAttached) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} cannot be filled: it is {}", tag,
                                     state == states.end() ? "not there" : name(state->second)),
                 .next_step = "fill a tag that is attached, before the engine runs"};
  }
  // By their keys: the process that saved them may have allocated in another order.
  TORPOR_ASSIGN(std::vector<ChunkPlan> plans, plans_of(tag, {}));
  const auto by_key = [](const auto& a, const auto& b) { return a.key < b.key; };
  std::sort(plans.begin(), plans.end(), by_key);
  std::sort(chunks.begin(), chunks.end(), by_key);
  const bool same = std::equal(plans.begin(), plans.end(), chunks.begin(), chunks.end(),
                               [](const ChunkPlan& plan, const SavedChunk& chunk) {
                                 return plan.key == chunk.key && plan.bytes() == chunk.bytes;
                               });
  if (!same) return other_layout(tag, chunks, plans);
  note_write(tag);
  const Status filled = catching([&] { return parts_.transfers.restore(chunks, plans, source); });
  if (!filled) index_.note_missing(tag);
  return filled;
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

}  // namespace torpor
