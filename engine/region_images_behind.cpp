// SPDX-License-Identifier: Apache-2.0
// RegionImages: the way into a checkpoint that is written while the engine serves.
#include <algorithm>

#include "engine/region_images.h"
#include "engine/storing.h"
#include "engine/tags.h"
#include "engine/write_behind.h"

namespace torpor {

Result<orders::OpenBehind::Reply> RegionImages::open_behind(const orders::OpenBehind& order) {
  behind_.reset();
  std::vector<ChunkPlan> weights;
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  const auto state = states.find(std::string(kWeightsTag));
  const bool there = state != states.end() && state->second == RegionState::kAttached;
  if (there && !proven(kWeightsTag)) {
    TORPOR_ASSIGN(weights, plans_of(kWeightsTag, {}));
  }
  index_.watch_weights();
  auto behind = std::make_unique<WriteBehind>(parts_.transfers, parts_.arena, order.writing,
                                              ProgressFile::of_caller(order.progress));
  TORPOR_TRY(behind->open(parts_.file_system, order.directory, parts_.rank, parts_.key, std::move(weights)));
  behind_ = std::move(behind);
  return orders::OpenBehind::Reply{};
}

// That of this checkpoint, with nothing under way.
Result<WriteBehind*> RegionImages::behind_of(const orders::Save& save) {
  if (behind_ == nullptr || behind_->writing().id != save.writing.id) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the checkpoint that is written behind is another one, or none",
                 .next_step = "begin it again"};
  }
  TORPOR_TRY(behind_->settle());
  if (std::optional<std::string> digest = behind_->take_digest()) index_.note_watched_digest(std::move(*digest));
  return behind_.get();
}

// All that the checkpoint has of this rank, but for the bytes of those that `missing` names.
Result<RegionImages::Storing> RegionImages::look_behind(const orders::Save& save,
                                                        const std::vector<BlockContent>& contents,
                                                        WriteBehind& behind) const {
  if (save.tags.empty() || save.tags.front() != kv_tag_ || has_tag(save.tags, kWeightsTag)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "while an engine serves its KV cache is saved first, and no weights",
                 .next_step = "this is a mistake in the calling code"};
  }
  RankWriter& writer = behind.writer();
  const BaseRecord in_base = [&](const ChunkKey& key) { return writer.base_record(key); };
  Storing storing;
  TORPOR_TRY(look_up(storing, in_base, save, contents));
  const size_t own = storing.plans.size();
  std::erase_if(storing.missing, [&](size_t place) {
    const SavedChunk* const known =
        place < contents.size() ? behind.ahead(storing.plans[place].key, contents[place]) : nullptr;
    if (known != nullptr) storing.records[place] = *known;
    return known != nullptr;
  });
  TORPOR_TRY(carry(storing, in_base, save));
  TORPOR_TRY(storing.take_over_linked(writer));
  const std::vector<size_t> sparse = storing.leave_sparse(writer, own);
  for (const size_t place : sparse) behind.note_sparse(storing.plans[place].key.index);
  storing.missing.insert(storing.missing.end(), sparse.begin(), sparse.end());
  return storing;
}

Result<orders::CopyAhead::Reply> RegionImages::copy_ahead(const orders::CopyAhead& order) {
  const orders::Save& save = order.save;
  TORPOR_ASSIGN(WriteBehind* const behind, behind_of(save));
  TORPOR_ASSIGN(const std::vector<BlockContent> contents, contents_of(save.blocks, save.stamps, save.steps));
  TORPOR_ASSIGN(Storing storing, look_behind(save, contents, *behind));
  size_t written_into = 0;  // blocks that the engine still fills
  std::erase_if(storing.missing, [&](size_t place) {
    if (place >= contents.size()) return true;
    if (contents[place].stamp == 0) ++written_into;
    return contents[place].stamp == 0;
  });
  std::vector<BlockContent> of_plans;
  for (const size_t place : storing.missing) of_plans.push_back(contents[place]);
  TORPOR_ASSIGN(std::vector<ChunkPlan> plans, plans_at(storing, storing.missing));
  const orders::CopyAhead::Reply reply{.bytes = bytes_of(plans)};
  // Until the stop each of them may become full, and another one be begun.
  TORPOR_TRY(behind->copy_ahead(std::move(plans), std::move(of_plans), 2 * written_into, kv_layout_.bytes_per_block()));
  return reply;
}

Result<orders::SaveBehind::Reply> RegionImages::save_behind(const orders::SaveBehind& order) {
  const orders::Save& save = order.save;
  TORPOR_ASSIGN(WriteBehind* const behind, behind_of(save));
  TORPOR_ASSIGN(orders::DigestTags::Reply digested, digest({.tags = save.carried, .as_proven = save.as_proven}));
  TORPOR_ASSIGN(const std::vector<BlockContent> contents, contents_of(save.blocks, save.stamps, save.steps));
  TORPOR_ASSIGN(Storing storing, look_behind(save, contents, *behind));
  TORPOR_ASSIGN(std::vector<ChunkPlan> plans, plans_at(storing, storing.missing));
  orders::SaveBehind::Reply reply{
      .bytes = bytes_of(plans), .digested_bytes = digested.bytes, .digests = std::move(digested.digests)};
  std::vector<bool> copied(storing.plans.size());
  for (const size_t place : storing.missing) copied[place] = true;
  orders::Save::Reply saved;
  for (size_t i = 0; i < save.blocks.size(); ++i) {
    const bool changed = !index_.checkpoints().find(save.writing.base_id, save.blocks[i], contents[i]);
    if (!changed && behind->is_sparse(storing.plans[i].key.index)) saved.compacted_bytes += storing.block_bytes;
  }
  for (size_t i = 0; i < storing.plans.size(); ++i) {
    const bool linked = !copied[i] && storing.records[i].file != 0;
    (linked ? saved.reused_bytes : saved.bytes) += storing.bytes_at(i);
  }
  TORPOR_TRY(behind->copy_now(std::move(plans)));
  TORPOR_TRY(behind->write(std::move(storing.records), std::move(storing.missing), std::move(saved)));
  index_.checkpoints().note(save.writing.id, save.writing.base_id, save.blocks, contents);
  return reply;
}

Result<orders::LookBehind::Reply> RegionImages::look_behind(const orders::LookBehind& order) {
  orders::LookBehind::Reply reply{.ended = true, .saved = {}};
  if (order.stop) {
    stop_behind();
    return reply;
  }
  if (behind_ == nullptr) {
    return Error{
        .code = Code::kFailedPrecondition, .what = "no checkpoint is written behind", .next_step = "begin it again"};
  }
  if (!order.wait && !behind_->ended()) return orders::LookBehind::Reply{};
  TORPOR_TRY(behind_->settle());
  if (behind_->written()) reply.saved = *behind_->written();
  return reply;
}

void RegionImages::stop_behind() noexcept { behind_.reset(); }

}  // namespace torpor
