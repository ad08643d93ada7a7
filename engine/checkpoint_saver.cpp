// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint_saver.h"

#include <map>
#include <optional>
#include <utility>

#include "base/host_name.h"
#include "base/progress_file.h"
#include "checkpoint/rank_base.h"
#include "checkpoint/rank_writer.h"
#include "engine/chunk_saver.h"
#include "engine/combined_digest.h"
#include "engine/tags.h"

namespace torpor {

Result<orders::WriteTestFile::Reply> CheckpointSaver::write_test_file(const orders::WriteTestFile& order) const {
  TORPOR_RETURN_IF_ERROR(torpor::write_test_file(parts_.file_system, order.directory, parts_.rank));
  return orders::WriteTestFile::Reply{.host = host_name()};
}

Result<orders::Save::Reply> CheckpointSaver::save(const orders::Save& order) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<BlockContent> contents,
                          contents_of(order.blocks, order.versions, order.steps));
  TORPOR_ASSIGN_OR_RETURN(
      const std::unique_ptr<RankWriter> writer,
      RankWriter::create(parts_.file_system, order.directory, order.writing, parts_.rank, parts_.key));
  const CheckpointPlan::BaseRecord in_base = [&](const ChunkKey& key) { return writer->base_record(key); };
  TORPOR_ASSIGN_OR_RETURN(CheckpointPlan plan, CheckpointPlan::of(images_, in_base, order, contents));
  const size_t own = plan.size();
  plan.carry(in_base, order);
  TORPOR_RETURN_IF_ERROR(plan.take_over_unchanged(*writer));
  TORPOR_RETURN_IF_ERROR(write(plan, plan.missing(), *writer));
  const std::vector<size_t> sparse = plan.leave_sparse(*writer, own);
  TORPOR_RETURN_IF_ERROR(write(plan, sparse, *writer));

  orders::Save::Reply reply;
  std::vector<SavedChunk>& records = plan.records();
  for (const size_t place : sparse) reply.compacted_bytes += plan.bytes_at(place);
  std::vector<bool> copied(plan.size());
  for (const size_t place : plan.missing()) copied[place] = true;
  for (const size_t place : sparse) copied[place] = true;
  for (size_t i = 0; i < records.size(); ++i) (copied[i] ? reply.bytes : reply.reused_bytes) += records[i].bytes;
  TORPOR_ASSIGN_OR_RETURN(reply.saved, writer->write_refs(records));
  for (const std::string& tag : order.tags) {
    TagImage image{.directory = order.directory};
    for (size_t i = 0; i < own; ++i) {
      if (records[i].key.tag != tag) continue;
      if (!copied[i]) image.reused_bytes += records[i].bytes;
      image.chunks.push_back(std::move(records[i]));
    }
    if (images_.is_kv(tag)) {
      images_.index().checkpoints().note(order.writing.id, order.writing.base_id, order.blocks, contents);
    } else {
      reply.digests[tag] = combined_digest(image.chunks);
      images_.index().note_digest(tag, reply.digests[tag]);
    }
    images_.put(tag, std::move(image));
  }
  return reply;
}

Result<orders::Save::Reply> CheckpointSaver::plan(const orders::Save& order) const {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<BlockContent> contents,
                          contents_of(order.blocks, order.versions, order.steps));
  const Result<std::unique_ptr<RankBase>> base =
      RankBase::open(parts_.file_system, order.writing, parts_.rank, parts_.key);
  const CheckpointPlan::BaseRecord in_base = [&](const ChunkKey& key) { return base ? (*base)->find(key) : nullptr; };
  TORPOR_ASSIGN_OR_RETURN(CheckpointPlan plan, CheckpointPlan::of(images_, in_base, order, contents));
  orders::Save::Reply reply;
  for (const std::string& tag : order.tags) reply.copied_bytes[tag] = 0;
  for (const size_t place : plan.missing()) reply.copied_bytes[plan.key_at(place).tag] += plan.bytes_at(place);
  for (const size_t place : plan.unchanged()) reply.reused_bytes += plan.bytes_at(place);
  return reply;
}

// Copy these chunks from memory. The writer links those that the base has with an equal digest.
Status CheckpointSaver::write(CheckpointPlan& plan, std::span<const size_t> places, RankWriter& writer) const {
  if (places.empty()) return ok();
  TORPOR_ASSIGN_OR_RETURN(const std::vector<ChunkPlan> chunks, plan.chunks_at(places));
  std::vector<SavedChunk> saved;
  ChunkSaver saver(parts_.blocking_transfers);
  TORPOR_RETURN_IF_ERROR(saver.copy(chunks, writer, saved));
  TORPOR_RETURN_IF_ERROR(saver.wait());
  for (size_t i = 0; i < places.size(); ++i) plan.records()[places[i]] = std::move(saved[i]);
  return ok();
}

// --- while the engine serves ---

Result<orders::Save::Reply> CheckpointSaver::open(const orders::Save& order, std::vector<ChunkPlan> named_weights) {
  writer_.reset();
  std::vector<ChunkPlan> weights;
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  const auto state = states.find(std::string(kWeightsTag));
  const bool there = state != states.end() && state->second == RegionState::kAttached;
  if (there && !images_.proven(kWeightsTag)) weights = images_.chunks().of_tag(kWeightsTag);
  images_.index().watch_weights();
  auto background = std::make_unique<BackgroundWriter>(parts_.blocking_transfers, parts_.arena, order.writing,
                                                       ProgressFile::of_caller(order.progress));
  TORPOR_RETURN_IF_ERROR(background->open(parts_.file_system, order.directory, parts_.rank, parts_.key,
                                          std::move(weights), std::move(named_weights)));
  writer_ = std::move(background);
  return orders::Save::Reply{};
}

// Return the writer of this checkpoint, with no work under way.
Result<BackgroundWriter*> CheckpointSaver::writer_of(const orders::Save& save) {
  if (writer_ == nullptr || writer_->writing().id != save.writing.id) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the checkpoint that is written in the background is another one, or none",
                 .next_step = "begin it again"};
  }
  TORPOR_RETURN_IF_ERROR(writer_->wait_idle());
  if (std::optional<std::string> digest = writer_->take_digest())
    images_.index().note_watched_digest(std::move(*digest));
  return writer_.get();
}

// Return the plan of all that the checkpoint has of this rank. Blocks that the pre-copy wrote have their records, and
// are not missing.
Result<CheckpointPlan> CheckpointSaver::plan_serving(const orders::Save& save,
                                                     const std::vector<BlockContent>& contents,
                                                     BackgroundWriter& background) {
  if (save.tags.empty() || !images_.is_kv(save.tags.front()) || has_tag(save.tags, kWeightsTag)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "while an engine serves its KV cache is saved first, and no weights",
                 .next_step = "this is a mistake in the calling code"};
  }
  RankWriter& writer = background.writer();
  const CheckpointPlan::BaseRecord in_base = [&](const ChunkKey& key) { return writer.base_record(key); };
  TORPOR_ASSIGN_OR_RETURN(CheckpointPlan plan, CheckpointPlan::of(images_, in_base, save, contents));
  const size_t own = plan.size();
  if (std::exchange(foreign_writes_, images_.foreign_block_writes()) != images_.foreign_block_writes())
    background.forget_ahead();
  std::erase_if(plan.missing(), [&](size_t place) {
    const SavedChunk* const ahead =
        place < contents.size() ? background.ahead(plan.key_at(place), contents[place]) : nullptr;
    if (ahead != nullptr) plan.records()[place] = *ahead;
    return ahead != nullptr;
  });
  plan.carry(in_base, save);
  TORPOR_RETURN_IF_ERROR(plan.take_over_unchanged(writer));
  const std::vector<size_t> sparse = plan.leave_sparse(writer, own);
  for (const size_t place : sparse) background.note_sparse(plan.key_at(place).index);
  plan.missing().insert(plan.missing().end(), sparse.begin(), sparse.end());
  return plan;
}

Result<orders::Save::Reply> CheckpointSaver::precopy(const orders::Save& save) {
  TORPOR_ASSIGN_OR_RETURN(BackgroundWriter* const background, writer_of(save));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<BlockContent> contents,
                          contents_of(save.blocks, save.versions, save.steps));
  TORPOR_ASSIGN_OR_RETURN(CheckpointPlan plan, plan_serving(save, contents, *background));
  size_t written_into = 0;  // number of blocks that the engine still fills
  std::erase_if(plan.missing(), [&](size_t place) {
    if (place >= contents.size()) return true;
    if (contents[place].version == 0) ++written_into;
    return contents[place].version == 0;
  });
  std::vector<BlockContent> of_chunks;
  for (const size_t place : plan.missing()) of_chunks.push_back(contents[place]);
  TORPOR_ASSIGN_OR_RETURN(std::vector<ChunkPlan> chunks, plan.chunks_at(plan.missing()));
  orders::Save::Reply reply{.bytes = bytes_of(chunks)};
  // Before the stop each of them may become full, and another block be begun.
  TORPOR_RETURN_IF_ERROR(
      background->precopy(std::move(chunks), std::move(of_chunks), 2 * written_into, plan.block_bytes()));
  return reply;
}

Result<orders::Save::Reply> CheckpointSaver::stop_and_copy(const orders::Save& save) {
  TORPOR_ASSIGN_OR_RETURN(BackgroundWriter* const background, writer_of(save));
  TORPOR_ASSIGN_OR_RETURN(orders::DigestTags::Reply digested,
                          images_.digest({.tags = save.carried, .as_proven = save.as_proven}));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<BlockContent> contents,
                          contents_of(save.blocks, save.versions, save.steps));
  TORPOR_ASSIGN_OR_RETURN(CheckpointPlan plan, plan_serving(save, contents, *background));
  TORPOR_ASSIGN_OR_RETURN(std::vector<ChunkPlan> chunks, plan.chunks_at(plan.missing()));
  orders::Save::Reply reply{
      .bytes = bytes_of(chunks), .digests = std::move(digested.digests), .digested_bytes = digested.bytes};
  StoredBlocks& checkpoints = images_.index().checkpoints();
  orders::Save::Reply saved;
  for (size_t i = 0; i < save.blocks.size(); ++i) {
    const bool changed = !checkpoints.find(save.writing.base_id, save.blocks[i], contents[i]);
    if (!changed && background->is_sparse(plan.key_at(i).index)) saved.compacted_bytes += plan.block_bytes();
  }
  std::vector<bool> copied(plan.size());
  for (const size_t place : plan.missing()) copied[place] = true;
  for (size_t i = 0; i < plan.size(); ++i) {
    const bool linked = !copied[i] && plan.records()[i].file != 0;
    (linked ? saved.reused_bytes : saved.bytes) += plan.bytes_at(i);
  }
  TORPOR_RETURN_IF_ERROR(background->copy_rest(std::move(chunks)));
  TORPOR_RETURN_IF_ERROR(background->write(std::move(plan.records()), std::move(plan.missing()), std::move(saved)));
  checkpoints.note(save.writing.id, save.writing.base_id, save.blocks, contents);
  return reply;
}

Result<orders::PollSave::Reply> CheckpointSaver::poll(const orders::PollSave& order) {
  orders::PollSave::Reply reply{.ended = true, .saved = {}};
  if (order.stop) {
    stop();
    return reply;
  }
  if (writer_ == nullptr) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "no checkpoint is written in the background",
                 .next_step = "begin it again"};
  }
  if (!order.wait && !writer_->ended()) return orders::PollSave::Reply{};
  TORPOR_RETURN_IF_ERROR(writer_->wait_idle());
  if (writer_->written()) reply.saved = *writer_->written();
  return reply;
}

}  // namespace torpor
