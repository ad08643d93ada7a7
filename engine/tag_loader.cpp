// SPDX-License-Identifier: Apache-2.0
#include "engine/tag_loader.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include <fmt/core.h>

#include "checkpoint/checkpoint.h"
#include "engine/chunk_restorer.h"
#include "engine/combined_digest.h"
#include "engine/rank_checkpoint.h"

namespace torpor {
namespace {

constexpr const char* kLoadItsFiles = "start the engine with the model's own files";

// Return an error that names the first region that differs.
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

}  // namespace

Result<LoadedTag> TagLoader::load(const StoredTag& stored) {
  const std::string& tag = stored.tag;
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_same(parts_, stored.directory, stored.generation, stored.id));
  TORPOR_ASSIGN_OR_RETURN(const RankSummary* const own, own_summary(parts_, checkpoint));
  TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(*own));
  std::vector<SavedChunk> chunks;
  std::copy_if(refs.records.begin(), refs.records.end(), std::back_inserter(chunks),
               [&](const SavedChunk& chunk) { return chunk.key.kind == ChunkKind::kRegion && chunk.key.tag == tag; });
  if (chunks.empty()) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("{} has no {}: it was written without", checkpoint.path(), tag),
                 .next_step = kLoadItsFiles};
  }
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<DiskTier> tier, checkpoint.open_rank(*own, nullptr, FileIo::kCached));
  TORPOR_RETURN_IF_ERROR(fill(tag, chunks, *tier));
  LoadedTag loaded{.digest = combined_digest(chunks)};
  for (const SavedChunk& chunk : chunks) loaded.bytes += chunk.bytes;
  images_.index().note_filled(tag, loaded.digest);
  return loaded;
}

Status TagLoader::fill(const std::string& tag, std::vector<SavedChunk> chunks, RecordStore& source) {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  const auto state = states.find(tag);
  if (images_.is_kv(tag) || state == states.end() || state->second != RegionState::kAttached) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} cannot be filled: it is {}", tag,
                                     state == states.end() ? "not there" : name(state->second)),
                 .next_step = "fill a tag that is attached, before the engine runs"};
  }
  // Sort by key: the process that saved them may have allocated in another order.
  std::vector<ChunkPlan> plans = images_.chunks().of_tag(tag);
  const auto by_key = [](const auto& a, const auto& b) { return a.key < b.key; };
  std::sort(plans.begin(), plans.end(), by_key);
  std::sort(chunks.begin(), chunks.end(), by_key);
  const bool same = std::equal(plans.begin(), plans.end(), chunks.begin(), chunks.end(),
                               [](const ChunkPlan& plan, const SavedChunk& chunk) {
                                 return plan.key == chunk.key && plan.bytes() == chunk.bytes;
                               });
  if (!same) return other_layout(tag, chunks, plans);
  images_.note_write(tag);
  const Status filled =
      try_catch([&] { return restore_attached(parts_.blocking_transfers, images_.chunks(), chunks, source); });
  if (!filled) images_.index().note_missing(tag);
  return filled;
}

}  // namespace torpor
