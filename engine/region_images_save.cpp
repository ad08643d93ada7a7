// RegionImages: the way into the arena.
#include <algorithm>
#include <utility>

#include "engine/region_images.h"

namespace torpor {
namespace {

// Adds the chunks of `plans` to the image, whose tier they are copied into.
Status save_into(RegionImages::Image& image, const std::vector<ChunkPlan>& plans, TransferEngine& transfers) {
  Result<std::vector<SavedChunk>> saved = catching([&] { return transfers.save(plans, *image.host); });
  if (!saved) {
    if (transfers.quarantined()) (void)image.host.release();  // a copy may still write there
    return std::move(saved).error();
  }
  image.chunks.insert(image.chunks.end(), saved->begin(), saved->end());
  return ok();
}

}  // namespace

Result<RegionImages::Image> RegionImages::save_regions(const std::string& tag) {
  TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_of(tag, {}));
  Image image{.host = std::make_unique<HostTier>(parts_.arena)};
  TORPOR_TRY(save_into(image, plans, parts_.transfers));
  return image;
}

// Blocks whose bytes are retained from the last sleep are taken over, the others are copied. After an error what was
// taken over is retained again.
Result<RegionImages::Image> RegionImages::save_blocks(const orders::Save& order) {
  if (!order.stamps.empty() && order.stamps.size() != order.blocks.size()) {
    return Error{.code = Code::kCorruption, .what = "an order to save blocks does not say the stamp of each"};
  }
  std::vector<BlockContent> contents(order.blocks.size(), BlockContent{.steps = order.steps});
  for (size_t i = 0; i < order.stamps.size(); ++i) contents[i].stamp = order.stamps[i];
  std::vector<RetainedBlocks::Block> retained = retained_->take(order.blocks, contents);

  Image image{.host = std::make_unique<HostTier>(parts_.arena)};
  image.chunks.reserve(order.blocks.size());
  image.contents.reserve(order.blocks.size());
  std::vector<int32_t> copied;
  std::vector<BlockContent> contents_copied;
  for (size_t i = 0; i < retained.size(); ++i) {
    if (retained[i].bytes.empty()) {
      copied.push_back(order.blocks[i]);
      contents_copied.push_back(contents[i]);
      continue;
    }
    SavedChunk chunk = std::move(retained[i].chunk);
    image.host->adopt(chunk, std::move(retained[i].bytes));
    image.reused_bytes += chunk.bytes;
    image.chunks.push_back(std::move(chunk));
    image.contents.push_back(contents[i]);
  }
  image.contents.insert(image.contents.end(), contents_copied.begin(), contents_copied.end());
  const Status saved = catching([&]() -> Status {
    TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_of(kv_tag_, copied));
    return save_into(image, plans, parts_.transfers);
  });
  if (saved) return image;
  if (image.host != nullptr) retain(image);
  return saved.error();
}

// Of an image whose bytes are those of the present content: it is void afterwards. Throws nothing.
void RegionImages::retain(Image& image) noexcept {
  if (parts_.retain_kv_bytes == 0 || image.host == nullptr) return;
  (void)catching([&]() -> Status {
    std::vector<RetainedBlocks::Block> blocks;
    blocks.reserve(image.chunks.size());
    for (size_t i = 0; i < image.chunks.size() && i < image.contents.size(); ++i) {
      HostArena::Span bytes = image.host->release(image.chunks[i]);
      if (!bytes.empty()) blocks.push_back({std::move(image.chunks[i]), std::move(bytes), image.contents[i]});
    }
    retained_->keep(std::move(blocks), parts_.retain_kv_bytes);
    return ok();
  });
}

}  // namespace torpor
