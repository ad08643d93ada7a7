// SPDX-License-Identifier: Apache-2.0
// RegionImages: the way into the arena, and into a file what has no room there.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/units.h"
#include "engine/combined_digest.h"
#include "engine/region_images.h"
#include "engine/spill_file.h"

namespace torpor {
namespace {

constexpr uint64_t kWhole = 1024;      // shares are of it
constexpr uint64_t kUsualShare = 784;  // of bf16 values; no less than 768 is possible
constexpr uint64_t kShareMargin = 16;  // by which other content may be larger

}  // namespace

// What a sleep does with one tag.
struct RegionImages::Portion {
  std::string tag;
  uint64_t clean_bytes = 0;              // its image holds: nothing is to be done
  std::vector<ChunkPlan> plans;          // to be copied, the most needed first
  std::vector<BlockContent> contents{};  // of these, where they are blocks
  size_t in_host = 0;                    // of them have room in the arena
  uint64_t reused_bytes = 0;             // of retained blocks that are taken over
  uint64_t retained_bytes = 0;           // of the arena, that these have
  uint64_t borrowed_bytes = 0;           // of blocks that the host store has
  Image image{};
  std::vector<SavedChunk> spilled{};

  uint64_t unread_bytes() const { return clean_bytes + reused_bytes + borrowed_bytes; }
  uint64_t copied_bytes() const {
    uint64_t bytes = 0;
    for (const ChunkPlan& plan : plans) bytes += plan.bytes();
    return bytes;
  }
  uint64_t spilled_bytes() const {
    uint64_t bytes = 0;
    for (size_t i = in_host; i < plans.size(); ++i) bytes += plans[i].bytes();
    return bytes;
  }
};

Result<orders::Save::Reply> RegionImages::save(const orders::Save& order) {
  if (!order.directory.empty()) return save_to_disk(order);
  const auto is_final = [](const Result<orders::Save::Reply>& saved) {
    return saved || saved.error().code != Code::kResourceExhausted;
  };
  Result<orders::Save::Reply> saved = save_to_arena(order, 0);
  const bool spills = !parts_.spill_dir.empty();
  if (is_final(saved) || (index_.retained_bytes() == 0 && !spills)) return saved;
  // What is retained, or held unused, may stand in the way of larger pieces; and packed content may be larger than was
  // planned.
  index_.release_retained();
  if (parts_.host_codec != Codec::kNone) {
    for (const std::string& tag : order.tags) packed_shares_[tag] = kWhole;
  }
  const auto again = [&](uint64_t unused) {
    parts_.arena.trim();
    return save_to_arena(order, unused);
  };
  saved = again(0);
  // The free memory of the arena can lie in pieces that are too small: then more goes to disk, at last all of it.
  const uint64_t budget = parts_.arena.info().budget_bytes;
  for (uint64_t unused = budget / 32; spills && unused != 0 && unused <= budget && !is_final(saved); unused *= 2)
    saved = again(unused);
  return saved;
}

Result<orders::PlanSave::Reply> RegionImages::plan(const orders::Save& order) const {
  if (!order.writing.base.empty()) return plan_to_disk(order);
  TORPOR_ASSIGN(std::vector<Portion> portions, portions_of(order, /*take=*/false));
  orders::PlanSave::Reply reply;
  uint64_t taken_over = 0;
  for (const Portion& portion : portions) taken_over += portion.retained_bytes;
  const uint64_t batch = batch_staging(portions);
  const uint64_t kept = std::min(batch, parts_.transfers.kept_staging());
  const uint64_t staging = (batch - kept) * parts_.transfers.memory_batches();
  place(portions, index_.retained_bytes() - std::min(index_.retained_bytes(), taken_over), staging);
  for (const Portion& portion : portions) {
    reply.copied_bytes[portion.tag] = portion.copied_bytes();
    reply.reused_bytes += portion.unread_bytes();
    reply.spilled_bytes += portion.spilled_bytes();
  }
  return reply;
}

// What goes to the file goes first: while there is room for its staging memory. `unused`: bytes of the arena's room
// that stay free. After an error blocks that were copied or taken over are retained.
Result<orders::Save::Reply> RegionImages::save_to_arena(const orders::Save& order, uint64_t unused) {
  TORPOR_ASSIGN(std::vector<Portion> portions, portions_of(order, /*take=*/true));
  parts_.transfers.release_staging();
  const Status saved = catching([&]() -> Status {
    for (const Portion& portion : portions) {
      if (portion.clean_bytes == 0) images_.erase(portion.tag);
    }
    TORPOR_TRY(parts_.transfers.keep_staging(batch_staging(portions)));
    place(portions, 0, unused);
    for (Portion& portion : portions) TORPOR_TRY(spill(portion));
    for (Portion& portion : portions) TORPOR_TRY(copy_to_host(portion));
    return ok();
  });
  if (!saved) {
    for (Portion& portion : portions) {
      if (portion.tag == kv_tag_) retain(portion.image);
    }
    return saved.error();
  }
  orders::Save::Reply reply;
  for (Portion& portion : portions) {
    reply.bytes += portion.copied_bytes();
    reply.spilled_bytes += portion.spilled_bytes();
    reply.reused_bytes += portion.unread_bytes();
    if (portion.clean_bytes != 0) {
      images_.at(portion.tag).reused_bytes = portion.clean_bytes;
      continue;
    }
    Image& image = portion.image;
    image.chunks.insert(image.chunks.end(), portion.spilled.begin(), portion.spilled.end());
    image.reused_bytes = portion.unread_bytes();
    if (portion.tag != kv_tag_) {
      reply.digests[portion.tag] = combined_digest(image.chunks);
      index_.note_digest(portion.tag, reply.digests[portion.tag]);
    }
    images_[portion.tag] = std::move(image);
  }
  return reply;
}

// Where memory goes while it is copied, nothing may be found to have no room later on: all of it is made before.
Result<std::vector<RegionImages::Giving>> RegionImages::prepare_giving(const orders::Save& order,
                                                                       orders::Save::Reply& reply) {
  Result<std::vector<Giving>> prepared = make_room(order, reply);
  if (prepared || prepared.error().code != Code::kResourceExhausted || index_.retained_bytes() == 0) return prepared;
  index_.release_retained();
  parts_.arena.trim();
  return make_room(order, reply);
}

Result<std::vector<RegionImages::Giving>> RegionImages::make_room(const orders::Save& order,
                                                                  orders::Save::Reply& reply) {
  TORPOR_ASSIGN(std::vector<Portion> portions, portions_of(order, /*take=*/true));
  parts_.transfers.release_staging();
  std::vector<Giving> giving;
  const Status made = catching([&]() -> Status {
    TORPOR_TRY(parts_.transfers.keep_staging(batch_staging(portions)));
    uint64_t bytes = 0;
    for (const Portion& portion : portions) {
      if (portion.clean_bytes == 0) images_.erase(portion.tag);
      const bool known = packed_shares_.contains(portion.tag);
      for (const ChunkPlan& plan : portion.plans)
        bytes += (known ? held_for(portion.tag, plan.bytes()) : plan.bytes()) + kPage;
    }
    TORPOR_TRY(parts_.arena.prefault(bytes));
    reply = {};
    for (Portion& portion : portions) {
      reply.bytes += portion.copied_bytes();
      reply.reused_bytes += portion.unread_bytes();
      if (portion.clean_bytes != 0) {
        images_.at(portion.tag).reused_bytes = portion.clean_bytes;
        continue;
      }
      std::vector<size_t> order_of(portion.plans.size());
      std::iota(order_of.begin(), order_of.end(), size_t{0});
      std::sort(order_of.begin(), order_of.end(), [&](size_t a, size_t b) {
        return portion.plans[a].pieces.front().address < portion.plans[b].pieces.front().address;
      });
      Giving& each = giving.emplace_back(Giving{.tag = portion.tag});
      for (const size_t i : order_of) {
        each.plans.push_back(std::move(portion.plans[i]));
        if (!portion.contents.empty()) each.contents.push_back(portion.contents[i]);
      }
      portion.image.reused_bytes = portion.unread_bytes();
    }
    for (Portion& portion : portions) {
      if (portion.clean_bytes == 0) images_.insert_or_assign(portion.tag, std::move(portion.image));
    }
    return ok();
  });
  if (made) return giving;
  for (Portion& portion : portions) {
    if (portion.tag == kv_tag_) retain(portion.image);
  }
  return made.error();
}

// With `take`, retained blocks that still hold are in the image, and the others are gone.
Result<std::vector<RegionImages::Portion>> RegionImages::portions_of(const orders::Save& order, bool take) const {
  std::vector<Portion> portions;
  for (const std::string& tag : order.tags) {
    Portion& portion = portions.emplace_back(Portion{.tag = tag, .plans = {}});
    if (const Image* const kept = find(tag); kept != nullptr && kept->clean && kept->host != nullptr) {
      portion.clean_bytes = kept->bytes();
      continue;
    }
    portion.image.host = std::make_unique<HostTier>(parts_.arena, parts_.host_codec);
    if (tag == kv_tag_) {
      TORPOR_TRY(fill_blocks(portion, order, take));
    } else {
      TORPOR_ASSIGN(portion.plans, plans_of(tag, {}));
    }
  }
  return portions;
}

bool RegionImages::can_borrow(const Portion& portion, const HostPlace& place) const {
  return place.in_store && place.in_store->record.bytes == kv_layout_.bytes_per_block() &&
         portion.image.host->readable(place.in_store->record.codec);
}

// Put a block into the image whose bytes stay where the host store has them.
void RegionImages::borrow(Portion& portion, const HostStore::Stored& stored, int32_t block,
                          const std::shared_ptr<HostStore>& store) const {
  Image& image = portion.image;
  SavedChunk& chunk = image.chunks.emplace_back(
      SavedChunk{.key = {.kind = ChunkKind::kKvBlock, .tag = kv_tag_, .index = static_cast<uint64_t>(block)},
                 .bytes = stored.record.bytes,
                 .digest = stored.record.digest});
  image.host->borrow(chunk, stored.bytes, stored.record.codec, store);
  image.in_host = image.chunks.size();
}

Status RegionImages::fill_blocks(Portion& portion, const orders::Save& order, bool take) const {
  const std::vector<int32_t>& blocks = order.blocks;
  if (!order.host_slots.empty() && order.host_slots.size() != blocks.size())
    return Error{.code = Code::kCorruption, .what = "an order that names blocks does not say the host slot of each"};
  TORPOR_ASSIGN(const std::vector<BlockContent> contents, contents_of(blocks, order.stamps, order.steps));

  const HostPlaces found = index_.find_in_host(blocks, contents, order.host_slots);
  std::vector<RetainedBlocks::Block> retained;
  if (take) retained = index_.take_retained(blocks, contents);
  Image& image = portion.image;
  std::vector<int32_t> copied;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const HostPlace& place = found.of_blocks[i];
    if (can_borrow(portion, place)) {
      portion.borrowed_bytes += place.in_store->record.bytes;
      if (!take) continue;
      borrow(portion, *place.in_store, blocks[i], found.store);
      image.contents.push_back(contents[i]);
      continue;
    }
    const bool given_up = take && retained[i].bytes.empty();  // meanwhile
    if (place.retained_bytes == 0 || given_up) {
      copied.push_back(blocks[i]);
      portion.contents.push_back(contents[i]);
      continue;
    }
    portion.reused_bytes += kv_layout_.bytes_per_block();
    portion.retained_bytes += place.retained_bytes;
    if (!take) continue;
    image.contents.push_back(contents[i]);
    image.chunks.push_back(std::move(retained[i].chunk));
    image.host->adopt(image.chunks.back(), std::move(retained[i].bytes));
    image.in_host = image.chunks.size();
  }
  TORPOR_ASSIGN(portion.plans, plans_of(kv_tag_, copied));
  return ok();
}

// Of the arena, to bring back spilled chunks of so many bytes in all, each in pages.
uint64_t RegionImages::staging_for(uint64_t padded_bytes, uint64_t largest) const {
  return std::min(padded_bytes, std::max(parts_.spill_staging_bytes, largest));
}

uint64_t RegionImages::held_for(std::string_view tag, uint64_t bytes) const {
  if (parts_.host_codec == Codec::kNone) return bytes;
  const auto known = packed_shares_.find(tag);
  const uint64_t share = known == packed_shares_.end() ? kUsualShare : known->second;
  return std::min(bytes, bytes / kWhole * share + bytes % kWhole);
}

// What these chunks took of the arena: others of the tag are likely to take as much.
void RegionImages::learn(const std::string& tag, std::span<const SavedChunk> chunks) {
  uint64_t bytes = 0;
  uint64_t stored = 0;
  for (const SavedChunk& chunk : chunks) bytes += chunk.bytes, stored += chunk.stored_bytes;
  if (parts_.host_codec == Codec::kNone || bytes == 0) return;
  packed_shares_[tag] = std::min(kWhole, stored * kWhole / bytes + kShareMargin);
}

bool RegionImages::needs_staging() const {
  return parts_.host_codec != Codec::kNone && std::any_of(images_.begin(), images_.end(), [](const auto& each) {
           return each.second.host != nullptr && !each.second.kept;
         });
}

// Of each batch of this sleep, and of its wake; 0 where chunks need none.
uint64_t RegionImages::batch_staging(const std::vector<Portion>& portions) const {
  if (parts_.host_codec == Codec::kNone) return 0;
  uint64_t all = 0;
  uint64_t padded = 0;
  uint64_t largest = 0;
  const auto add = [&](uint64_t bytes) {
    all += bytes;
    padded += align_up(bytes, kPage);
    largest = std::max(largest, align_up(bytes, kPage));
  };
  for (const Portion& portion : portions) {
    const Image* const clean = portion.clean_bytes == 0 ? nullptr : find(portion.tag);
    for (const ChunkPlan& plan : portion.plans) add(plan.bytes());
    for (const SavedChunk& chunk : (clean != nullptr ? *clean : portion.image).chunks) add(chunk.bytes);
    if (!portion.image.chunks.empty()) continue;
    for (uint64_t at = 0; at < portion.reused_bytes + portion.borrowed_bytes; at += kv_layout_.bytes_per_block())
      add(kv_layout_.bytes_per_block());  // of a plan, which takes none
  }
  return TransferEngine::most_staging(all, padded, largest);
}

// In the order of need; `going`: bytes in the arena that will not be there any more; `coming`: that will be, or stay
// free, beside the portions.
void RegionImages::place(std::vector<Portion>& portions, uint64_t going, uint64_t coming) const {
  const auto room_for = [this](const Portion& portion, const ChunkPlan& plan) {
    return held_for(portion.tag, plan.bytes()) + kPage;  // as HostTier::prepare()
  };
  uint64_t needed = coming;
  for (Portion& portion : portions) {
    portion.in_host = portion.plans.size();
    for (const ChunkPlan& plan : portion.plans) needed += room_for(portion, plan);
  }
  const HostArenaInfo arena = parts_.arena.info();
  if (parts_.spill_dir.empty() || arena.budget_bytes == 0) return;
  const uint64_t room = arena.budget_bytes - std::min(arena.budget_bytes, arena.used_bytes) + going;
  for (auto portion = portions.rbegin(); portion != portions.rend(); ++portion) {
    uint64_t padded = 0;
    uint64_t largest = 0;
    uint64_t staging = 0;
    while (needed + staging > room && portion->in_host > 0) {
      const ChunkPlan& plan = portion->plans[--portion->in_host];
      const uint64_t pages = align_up(plan.bytes(), kPage);
      needed -= room_for(*portion, plan);
      padded += pages;
      largest = std::max(largest, pages);
      staging = staging_for(padded, largest);
    }
    needed += staging;
  }
}

Status RegionImages::spill(Portion& portion) {
  const std::span<const ChunkPlan> rest = std::span(portion.plans).subspan(portion.in_host);
  if (rest.empty()) return ok();
  uint64_t padded = 0;
  uint64_t largest = 0;
  for (const ChunkPlan& plan : rest) {
    padded += align_up(plan.bytes(), kPage);
    largest = std::max(largest, align_up(plan.bytes(), kPage));
  }
  Image& image = portion.image;
  // Before other memory is taken: it lies in the way of none then.
  TORPOR_ASSIGN(image.staging, parts_.arena.allocate(staging_for(padded, largest)));
  TORPOR_ASSIGN(image.spilled,
                make_spill_file(parts_.file_system, parts_.spill_dir, parts_.rank, parts_.key.get(), parts_.encrypt));
  const HostArenaInfo arena = parts_.arena.info();
  const uint64_t room = arena.budget_bytes - std::min(arena.budget_bytes, arena.used_bytes);
  for (size_t first = 0; first < rest.size();) {
    const size_t end = end_of_job(rest, first, std::max(parts_.spill_staging_bytes, room / 2));
    TORPOR_ASSIGN(const std::vector<SavedChunk> saved,
                  parts_.transfers.save(rest.subspan(first, end - first), *image.spilled));
    portion.spilled.insert(portion.spilled.end(), saved.begin(), saved.end());
    parts_.transfers.release_staging();
    first = end;
  }
  return ok();
}

Status RegionImages::copy_to_host(Portion& portion) {
  Image& image = portion.image;
  if (image.host == nullptr) return ok();  // a clean one
  const std::span<const ChunkPlan> plans = std::span(portion.plans).first(portion.in_host);
  Result<std::vector<SavedChunk>> saved = catching([&] { return parts_.transfers.save(plans, *image.host); });
  if (!saved) {
    if (parts_.transfers.quarantined()) HostTier::abandon(std::move(image.host));  // a copy may still write there
    return std::move(saved).error();
  }
  image.chunks.insert(image.chunks.end(), saved->begin(), saved->end());
  learn(portion.tag, image.chunks);
  image.contents.insert(image.contents.end(), portion.contents.begin(), portion.contents.end());
  image.in_host = image.chunks.size();
  return ok();
}

// Blocks of an image whose bytes are those of the present content: it is void afterwards. Throws nothing.
void RegionImages::retain(Image& image) noexcept {
  if (parts_.retain_kv_bytes == 0 || image.host == nullptr) return;
  (void)catching([&]() -> Status {
    std::vector<RetainedBlocks::Block> blocks;
    blocks.reserve(image.in_host);
    for (size_t i = 0; i < image.in_host && i < image.contents.size(); ++i) {
      HostArena::Span bytes = image.host->release(image.chunks[i]);
      if (!bytes.empty()) blocks.push_back({std::move(image.chunks[i]), std::move(bytes), image.contents[i]});
    }
    index_.retain(std::move(blocks));
    return ok();
  });
}

}  // namespace torpor
