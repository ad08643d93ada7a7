// SPDX-License-Identifier: Apache-2.0
// RegionImages: the way into a checkpoint. What the one before has already is linked, and not read.
#include <algorithm>

#include "base/host_name.h"
#include "engine/combined_digest.h"
#include "engine/region_images.h"
#include "engine/storing.h"
#include "engine/tags.h"

namespace torpor {

Result<orders::Save::Reply> RegionImages::save_to_disk(const orders::Save& order) {
  TORPOR_ASSIGN(const std::vector<BlockContent> contents, contents_of(order.blocks, order.stamps, order.steps));
  TORPOR_ASSIGN(const std::unique_ptr<RankWriter> writer,
                RankWriter::create(parts_.file_system, order.directory, order.writing, parts_.rank, parts_.key));
  Storing storing;
  const BaseRecord in_base = [&](const ChunkKey& key) { return writer->base_record(key); };
  TORPOR_TRY(look_up(storing, in_base, order, contents));
  const size_t own = storing.plans.size();
  TORPOR_TRY(carry(storing, in_base, order));
  TORPOR_TRY(storing.take_over_linked(*writer));
  TORPOR_TRY(write(storing, storing.missing, *writer));
  const std::vector<size_t> sparse = storing.leave_sparse(*writer, own);
  TORPOR_TRY(write(storing, sparse, *writer));

  orders::Save::Reply reply;
  for (const size_t place : sparse) reply.compacted_bytes += storing.bytes_at(place);
  std::vector<bool> copied(storing.plans.size());
  for (const size_t place : storing.missing) copied[place] = true;
  for (const size_t place : sparse) copied[place] = true;
  for (size_t i = 0; i < storing.records.size(); ++i)
    (copied[i] ? reply.bytes : reply.reused_bytes) += storing.records[i].bytes;
  TORPOR_ASSIGN(reply.saved, writer->write_refs(storing.records));
  for (const std::string& tag : order.tags) {
    Image image{.directory = order.directory};
    for (size_t i = 0; i < own; ++i) {
      if (storing.records[i].key.tag != tag) continue;
      if (!copied[i]) image.reused_bytes += storing.records[i].bytes;
      image.chunks.push_back(std::move(storing.records[i]));
    }
    if (tag != kv_tag_) {
      reply.digests[tag] = combined_digest(image.chunks);
      index_.note_digest(tag, reply.digests[tag]);
    }
    images_[tag] = std::move(image);
  }
  if (std::find(order.tags.begin(), order.tags.end(), kv_tag_) != order.tags.end())
    index_.checkpoints().note(order.writing.id, order.writing.base_id, order.blocks, contents);
  return reply;
}

Result<orders::LeaveSign::Reply> RegionImages::leave_sign(const orders::LeaveSign& order) const {
  TORPOR_TRY(torpor::leave_sign(parts_.file_system, order.directory, parts_.rank));
  return orders::LeaveSign::Reply{.host = host_name()};
}

Result<orders::PlanSave::Reply> RegionImages::plan_to_disk(const orders::Save& order) const {
  TORPOR_ASSIGN(const std::vector<BlockContent> contents, contents_of(order.blocks, order.stamps, order.steps));
  const Result<std::unique_ptr<RankBase>> base =
      RankBase::open(parts_.file_system, order.writing, parts_.rank, parts_.key);
  Storing storing;
  const BaseRecord in_base = [&](const ChunkKey& key) { return base ? (*base)->find(key) : nullptr; };
  TORPOR_TRY(look_up(storing, in_base, order, contents));
  orders::PlanSave::Reply reply;
  for (const std::string& tag : order.tags) reply.copied_bytes[tag] = 0;
  for (const size_t place : storing.missing)
    reply.copied_bytes[storing.plans[place].key.tag] += storing.bytes_at(place);
  for (const size_t place : storing.linked) reply.reused_bytes += storing.bytes_at(place);
  return reply;
}

// Which chunks of the order's tags the base has, and which are missing there; nothing of the content is read.
Status RegionImages::look_up(Storing& storing, const BaseRecord& in_base, const orders::Save& order,
                             const std::vector<BlockContent>& contents) const {
  for (const std::string& tag : order.tags) {
    TORPOR_TRY(tag == kv_tag_ ? look_up_blocks(storing, in_base, order, contents)
                              : look_up_tag(storing, in_base, tag, order.as_proven));
  }
  return ok();
}

Status RegionImages::look_up_blocks(Storing& storing, const BaseRecord& in_base, const orders::Save& order,
                                    const std::vector<BlockContent>& contents) const {
  const size_t first = storing.plans.size();
  std::vector<ChunkPlan> plans;
  plans.reserve(order.blocks.size());
  for (const int32_t block : order.blocks) {
    TORPOR_ASSIGN(ChunkKey key, key_of(block));
    plans.push_back({.key = std::move(key), .pieces = {}});
  }
  storing.add(std::move(plans));
  storing.block_bytes = kv_layout_.bytes_per_block();
  for (size_t i = 0; i < order.blocks.size(); ++i) {
    const size_t place = first + i;
    const std::optional<uint64_t> number =
        index_.checkpoints().find(order.writing.base_id, order.blocks[i], contents[i]);
    ChunkKey key = storing.plans[place].key;
    key.index = number.value_or(key.index);
    const SavedChunk* const known = number ? in_base(key) : nullptr;
    // A seal binds the number: under another one the bytes are written again.
    const bool readable = key == storing.plans[place].key || (known != nullptr && known->seal == SealTag{});
    const bool there = known != nullptr && known->bytes == storing.block_bytes && readable;
    (there ? storing.linked : storing.missing).push_back(place);
    if (there && key != storing.plans[place].key) storing.other_numbers.emplace(place, key.index);
  }
  return ok();
}

// All pieces, where their digests in the base are together what is known of the tag; else none. Only of weights is it
// known who writes them.
Status RegionImages::look_up_tag(Storing& storing, const BaseRecord& in_base, const std::string& tag,
                                 bool as_proven) const {
  const size_t first = storing.plans.size();
  TORPOR_ASSIGN(std::vector<ChunkPlan> plans, plans_of(tag, {}));
  storing.add(std::move(plans));
  const bool believed = as_proven && tag == kWeightsTag;
  const std::optional<std::string> proven = believed ? index_.digest(tag) : std::nullopt;
  CombinedDigest there;
  bool same = proven.has_value();
  for (size_t i = first; i < storing.plans.size() && same; ++i) {
    const SavedChunk* const known = in_base(storing.plans[i].key);
    same = known != nullptr && known->bytes == storing.plans[i].bytes();
    if (same) there.add(known->key, known->digest);
  }
  same = same && there.finish() == proven;
  for (size_t i = first; i < storing.plans.size(); ++i) (same ? storing.linked : storing.missing).push_back(i);
  return ok();
}

// Tags that the checkpoint need not have: each as the base has it, or not at all.
Status RegionImages::carry(Storing& storing, const BaseRecord& in_base, const orders::Save& order) const {
  for (const std::string& tag : order.carried) {
    const size_t before = storing.plans.size();
    TORPOR_TRY(look_up_tag(storing, in_base, tag, order.as_proven));
    const bool whole = storing.missing.empty() || storing.missing.back() < before;
    if (!whole) storing.shrink(before);
  }
  return ok();
}

Result<std::vector<ChunkPlan>> RegionImages::plans_at(const Storing& storing, std::span<const size_t> places) const {
  std::vector<ChunkPlan> found;
  found.reserve(places.size());
  for (const size_t place : places) {
    const ChunkPlan& plan = storing.plans[place];
    if (plan.key.kind != ChunkKind::kKvBlock) {
      found.push_back(plan);
      continue;
    }
    TORPOR_ASSIGN(std::vector<ChunkPlan> whole, plans_of(kv_tag_, {static_cast<int32_t>(plan.key.index)}));
    found.push_back(std::move(whole.front()));
  }
  return found;
}

// Copies them from memory; what the base has with an equal digest is linked then.
Status RegionImages::write(Storing& storing, std::span<const size_t> places, RankWriter& writer) {
  if (places.empty()) return ok();
  TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_at(storing, places));
  TORPOR_ASSIGN(std::vector<SavedChunk> saved, parts_.transfers.save(plans, writer));
  for (size_t i = 0; i < places.size(); ++i) storing.records[places[i]] = std::move(saved[i]);
  return ok();
}

Status RegionImages::tell_contents(const orders::TellContents& order) {
  TORPOR_ASSIGN(const std::vector<BlockContent> contents, contents_of(order.blocks, order.stamps, order.steps));
  index_.checkpoints().tell_contents(order.id, order.blocks, contents);
  return ok();
}

}  // namespace torpor
