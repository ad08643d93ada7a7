// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_images.h"

#include <algorithm>
#include <set>

#include <fmt/core.h>

#include "engine/tags.h"

namespace torpor {
namespace {

// The plan of a KV block that is the chunk at `position` of an image.
Result<ChunkPlan> plan_of(const KvLayout& layout, int32_t block, uint64_t position) {
  if (block < 0 || static_cast<uint32_t>(block) >= layout.num_blocks) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("KV block {} does not exist, there are {}", block, layout.num_blocks),
                 .next_step = "name blocks of this engine"};
  }
  ChunkPlan plan{.key = {.kind = ChunkKind::kKvBlock, .tag = kKvCacheTag, .index = position}, .pieces = {}};
  for (const KvPiece& piece : layout.pieces_of(static_cast<uint32_t>(block)))
    plan.pieces.push_back({piece.address, piece.bytes});
  return plan;
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

Result<const RankImages::Image*> RankImages::find(const std::string& id) const {
  if (const auto found = images_.find(id); found != images_.end()) return &found->second;
  return Error{.code = Code::kNotFound,
               .what = fmt::format("there is no image {}", id),
               .next_step = "name one that was extracted and not dropped"};
}

Result<orders::Extract::Reply> RankImages::extract(const orders::Extract& order, const KvLayout& layout) {
  if (images_.contains(order.image)) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("there is an image {} already", order.image),
                 .next_step = "give each image an id of its own"};
  }
  std::vector<ChunkPlan> plans;
  for (const int32_t block : order.blocks) {
    TORPOR_ASSIGN(ChunkPlan plan, plan_of(layout, block, plans.size()));
    plans.push_back(std::move(plan));
  }
  Image image{.host = std::make_unique<HostTier>(arena_), .chunks = {}};
  if (!plans.empty()) {
    Result<std::vector<SavedChunk>> saved = transfers_.save(plans, *image.host);
    if (!saved) {
      if (transfers_.quarantined()) HostTier::abandon(std::move(image.host));
      return std::move(saved).error();
    }
    image.chunks = std::move(*saved);
    TORPOR_ASSIGN(const std::vector<Digest> now, transfers_.digests(plans));
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i] != image.chunks[i].digest) {
        return damaged(order.image, image.chunks[i].key, "changed while it was copied", "try again");
      }
    }
  }
  const orders::Extract::Reply reply{.bytes = image.bytes()};
  images_.emplace(order.image, std::move(image));
  return reply;
}

Result<orders::VerifyImage::Reply> RankImages::verify(const orders::VerifyImage& order) const {
  TORPOR_ASSIGN(const Image* const image, find(order.image));
  for (const SavedChunk& chunk : image->chunks) {
    if (digest_of(image->host->view(chunk)) != chunk.digest) {
      return damaged(order.image, chunk.key, "does not match its digest", "abort its requests and send them again");
    }
  }
  return orders::VerifyImage::Reply{.bytes = image->bytes()};
}

Result<orders::Admit::Reply> RankImages::admit(const orders::Admit& order, const KvLayout& layout) {
  TORPOR_ASSIGN(const Image* const image, find(order.image));
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
    TORPOR_ASSIGN(ChunkPlan plan, plan_of(layout, order.blocks[i], static_cast<uint64_t>(position)));
    plans.push_back(std::move(plan));
  }
  if (plans.empty()) return orders::Admit::Reply{};
  TORPOR_TRY(transfers_.wait_for_device());  // a step that was begun before may still write into these blocks
  if (Status copied = transfers_.restore(chunks, plans, *image->host); !copied)
    return copied.error().within(fmt::format("image {}", order.image));
  return orders::Admit::Reply{.bytes = bytes_of(plans)};
}

orders::DropImage::Reply RankImages::drop(const orders::DropImage& order) noexcept {
  const auto found = images_.find(order.image);
  if (found == images_.end()) return {};
  const orders::DropImage::Reply reply{.bytes = found->second.bytes()};
  if (transfers_.quarantined()) HostTier::abandon(std::move(found->second.host));
  images_.erase(found);
  return reply;
}

void RankImages::abandon() noexcept {
  for (auto& [id, image] : images_) HostTier::abandon(std::move(image.host));
}

}  // namespace torpor
