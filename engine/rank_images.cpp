// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_images.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <set>
#include <thread>
#include <unordered_map>

#include <fmt/core.h>

#include "base/units.h"
#include "checkpoint/rank_writer.h"
#include "engine/rank_checkpoint.h"
#include "engine/tags.h"

namespace torpor {
namespace {

constexpr uint64_t kWriteBytes = 8 * kMiB;   // of an image, at once: a disk wants many operations
constexpr uint64_t kVerifyBytes = 8 * kMiB;  // of an image: below, starting a thread takes as long as it saves
constexpr const char* kSendAgain = "abort its requests and send them again";

// Return the plan of a KV block that is the chunk at `position` of an image.
Result<ChunkPlan> plan_of(const KvLayout& layout, int32_t block, uint64_t position) {
  if (block < 0 || static_cast<uint32_t>(block) >= layout.num_blocks) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("KV block {} does not exist, there are {}", block, layout.num_blocks),
                 .next_step = "name blocks of this engine"};
  }
  return ChunkPlan{.key = {.kind = ChunkKind::kKvBlock, .tag = kKvCacheTag, .index = position},
                   .pieces = layout.pieces_of(static_cast<uint32_t>(block))};
}

// Compare each chunk with its digest, in up to `threads` threads. Return the first one that differs, or null.
const SavedChunk* first_damaged(HostTier& host, const std::vector<SavedChunk>& chunks, int threads) {
  std::atomic<size_t> next = 0;
  std::atomic<size_t> first = chunks.size();
  const auto compare = [&] {
    for (size_t i = next++; i < first; i = next++) {
      if (digest_of(host.view(chunks[i])) == chunks[i].digest) continue;
      size_t known = first;
      while (i < known && !first.compare_exchange_weak(known, i)) continue;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < threads; ++i) others.emplace_back(compare);
  } catch (const std::exception&) {
    // The threads that there are do it all.
  }
  compare();
  for (std::thread& other : others) other.join();
  return first < chunks.size() ? &chunks[first] : nullptr;
}

Error damaged(const std::string& image, const ChunkKey& key, const char* what, const char* next_step) {
  return {.code = Code::kCorruption,
          .what = fmt::format("image {}: {} {}", image, key.to_string(), what),
          .next_step = next_step};
}

}  // namespace

uint64_t RankImages::Image::bytes() const {
  uint64_t bytes = 0;
  for (const SavedChunk& chunk : chunks) bytes += chunk.bytes;
  return bytes;
}

uint64_t RankImages::room_of(const std::vector<SavedChunk>& chunks) const {
  uint64_t bytes = 0;
  uint64_t padded = 0;
  uint64_t largest = 0;
  for (const SavedChunk& chunk : chunks) {
    const uint64_t size = align_up(chunk.bytes, kPage);
    bytes += chunk.bytes;
    padded += size;
    largest = std::max(largest, size);
  }
  const uint64_t batches = parts_.transfers.memory_batches();
  const uint64_t staging = std::min(padded, batches * TransferEngine::most_staging(bytes, padded, largest));
  return bytes + chunks.size() * kPage + staging;  // for the chunks as much as HostTier::prepare() asks for
}

Result<const RankImages::Image*> RankImages::find(const std::string& id) const {
  if (const auto found = images_.find(id); found != images_.end()) return &found->second;
  return Error{.code = Code::kNotFound,
               .what = fmt::format("there is no image {}", id),
               .next_step = "name one that was extracted and not dropped"};
}

Status RankImages::is_new(const std::string& id) const {
  if (!images_.contains(id)) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what = fmt::format("there is an image {} already", id),
               .next_step = "give each image an id of its own"};
}

Result<orders::Extract::Reply> RankImages::extract(const orders::Extract& order, const KvLayout& layout) {
  TORPOR_RETURN_IF_ERROR(is_new(order.image));
  std::vector<ChunkPlan> plans;
  for (const int32_t block : order.blocks) {
    TORPOR_ASSIGN_OR_RETURN(ChunkPlan plan, plan_of(layout, block, plans.size()));
    plans.push_back(std::move(plan));
  }
  Image image{.host = std::make_unique<HostTier>(parts_.arena), .chunks = {}};
  if (!plans.empty()) {
    Result<std::vector<SavedChunk>> saved = parts_.blocking_transfers.save(plans, *image.host);
    if (!saved) {
      if (parts_.transfers.quarantined()) HostTier::abandon(std::move(image.host));
      return std::move(saved).error();
    }
    image.chunks = std::move(*saved);
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Digest> now, parts_.blocking_transfers.digests(plans));
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i] != image.chunks[i].digest) {
        return damaged(order.image, image.chunks[i].key, "changed while it was copied", "try again");
      }
    }
  }
  const orders::Extract::Reply reply{.bytes = image.bytes()};
  room_for_next_ = std::max(room_for_next_, room_of(image.chunks));
  images_.emplace(order.image, std::move(image));
  return reply;
}

Result<orders::ReadImage::Reply> RankImages::read(const orders::ReadImage& order, const KvLayout& layout) {
  TORPOR_RETURN_IF_ERROR(is_new(order.image));
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_same(parts_, order.directory, order.generation, order.id));
  TORPOR_ASSIGN_OR_RETURN(const RankSummary* const own, own_summary(parts_, checkpoint));
  TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(*own));
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<DiskTier> source, checkpoint.open_rank(*own, nullptr, FileIo::kCached));
  std::unordered_map<uint64_t, const SavedChunk*> records;  // by block
  for (const SavedChunk& record : refs.records) {
    if (record.key.kind == ChunkKind::kKvBlock && record.key.tag == kKvCacheTag)
      records.emplace(record.key.index, &record);
  }
  Image image{.host = std::make_unique<HostTier>(parts_.arena), .chunks = {}};
  TORPOR_RETURN_IF_ERROR(image.host->prepare(order.blocks.size() * layout.bytes_per_block(), order.blocks.size()));
  for (const int32_t block : order.blocks) {
    const auto found = records.find(static_cast<uint64_t>(block));
    if (block < 0 || found == records.end()) {
      return Error{.code = Code::kNotFound,
                   .what = fmt::format("{} has no KV block {}", checkpoint.path(), block),
                   .next_step = "use another checkpoint"};
    }
    const SavedChunk& record = *found->second;
    if (record.bytes != layout.bytes_per_block()) {
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} has KV blocks of {} bytes, this engine of {}", checkpoint.path(),
                                       record.bytes, layout.bytes_per_block()),
                   .next_step = "start the engine with the same KV layout"};
    }
    SavedChunk chunk{.key = record.key, .bytes = record.bytes, .digest = record.digest};
    TORPOR_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, image.host->place(chunk));
    TORPOR_RETURN_IF_ERROR(source->get_one(record, bytes));
    if (digest_of(bytes) != record.digest)
      return damaged(order.image, record.key, "does not match its digest", "use another checkpoint");
    chunk.key.index = image.chunks.size();
    image.chunks.push_back(std::move(chunk));
  }
  TORPOR_RETURN_IF_ERROR(image.host->finish());
  const orders::ReadImage::Reply reply{.bytes = image.bytes()};
  images_.emplace(order.image, std::move(image));
  return reply;
}

Result<orders::SaveImage::Reply> RankImages::save(const orders::SaveImage& order) const {
  TORPOR_ASSIGN_OR_RETURN(const Image* const image, find(order.image));
  TORPOR_ASSIGN_OR_RETURN(
      const std::unique_ptr<RankWriter> writer,
      RankWriter::create(parts_.file_system, order.directory, order.writing, parts_.rank, parts_.key));
  TORPOR_RETURN_IF_ERROR(writer->prepare(image->bytes(), image->chunks.size()));
  std::vector<SavedChunk> records;
  for (const SavedChunk& chunk : image->chunks)
    records.push_back({.key = chunk.key, .bytes = chunk.bytes, .digest = chunk.digest});
  for (size_t i = 0; i < records.size();) {
    std::vector<RecordPart> parts;
    for (uint64_t bytes = 0; i < records.size() && (parts.empty() || bytes + records[i].bytes <= kWriteBytes); ++i) {
      const std::span<std::byte> bytes_of_chunk = image->host->view(image->chunks[i]);
      if (digest_of(bytes_of_chunk) != records[i].digest)
        return damaged(order.image, records[i].key, "does not match its digest", kSendAgain);
      parts.push_back({&records[i], bytes_of_chunk, ok()});
      bytes += records[i].bytes;
    }
    writer->put(parts);
    for (RecordPart& part : parts) TORPOR_RETURN_IF_ERROR(std::move(part.status));
  }
  orders::SaveImage::Reply reply{.bytes = image->bytes(), .saved = {}};
  TORPOR_ASSIGN_OR_RETURN(reply.saved, writer->write_refs(records));
  return reply;
}

Result<orders::VerifyImage::Reply> RankImages::verify(const orders::VerifyImage& order) const {
  TORPOR_ASSIGN_OR_RETURN(const Image* const image, find(order.image));
  const bool alone = !parts_.transfers.own_threads() || image->bytes() < kVerifyBytes;
  if (const SavedChunk* const chunk =
          first_damaged(*image->host, image->chunks, alone ? 1 : parts_.transfers.threads()))
    return damaged(order.image, chunk->key, "does not match its digest", kSendAgain);
  return orders::VerifyImage::Reply{.bytes = image->bytes()};
}

Result<orders::Admit::Reply> RankImages::admit(const orders::Admit& order, const KvLayout& layout) {
  TORPOR_ASSIGN_OR_RETURN(const Image* const image, find(order.image));
  const std::set<int32_t> targets(order.blocks.begin(), order.blocks.end());
  if (order.chunks.size() != order.blocks.size() || targets.size() != order.blocks.size()) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("image {}: {} chunks for {} blocks, {} different ones", order.image,
                                     order.chunks.size(), order.blocks.size(), targets.size()),
                 .next_step = "give each chunk a block of its own"};
  }
  std::vector<SavedChunk> chunks;
  std::vector<ChunkPlan> plans;
  for (size_t i = 0; i < order.chunks.size(); ++i) {
    const int32_t position = order.chunks[i];
    if (position < 0 || static_cast<size_t>(position) >= image->chunks.size()) {
      return Error{
          .code = Code::kInvalidArgument,
          .what = fmt::format("image {} has no chunk {}, it has {}", order.image, position, image->chunks.size()),
          .next_step = "name chunks of the image"};
    }
    chunks.push_back(image->chunks[static_cast<size_t>(position)]);
    TORPOR_ASSIGN_OR_RETURN(ChunkPlan plan, plan_of(layout, order.blocks[i], static_cast<uint64_t>(position)));
    plans.push_back(std::move(plan));
  }
  if (plans.empty()) return orders::Admit::Reply{};
  TORPOR_RETURN_IF_ERROR(
      parts_.transfers.wait_for_device());  // a step that began earlier may still write into these blocks
  if (Status copied = parts_.blocking_transfers.restore(chunks, plans, *image->host); !copied)
    return copied.error().within(fmt::format("image {}", order.image));
  return orders::Admit::Reply{.bytes = bytes_of(plans)};
}

orders::DropImage::Reply RankImages::drop(const orders::DropImage& order) noexcept {
  const auto found = images_.find(order.image);
  if (found == images_.end()) return {};
  const orders::DropImage::Reply reply{.bytes = found->second.bytes()};
  if (parts_.transfers.quarantined()) HostTier::abandon(std::move(found->second.host));
  images_.erase(found);
  return reply;
}

void RankImages::abandon() noexcept {
  for (auto& [id, image] : images_) HostTier::abandon(std::move(image.host));
}

}  // namespace torpor
