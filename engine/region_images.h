// SPDX-License-Identifier: Apache-2.0
// RegionImages: what is saved of each of a rank's tags, and what is known of the content in device memory.
//
// RankSaver makes an image and RankRestorer reads it. An image may be kept after a wake. A kept image is clean while it
// equals the content of its attached tag; a clean image is not copied again. The image of the weights counts as clean
// until a write is noted or noticed. The image of any other tag counts as clean only if the content was just read
// (compare()), as any code may write such a tag at any time. Each KV block is retained by itself, by its content
// version (engine/content_index.h).
//
// Owner: RankMemory. Threads: the caller holds RankMemory's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/content_index.h"
#include "engine/device_chunks.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/tag_image.h"
#include "kvcache/kv_layout.h"

namespace torpor {

class RegionImages {
 public:
  explicit RegionImages(const RankParts& parts);  // `parts` outlives this object

  // --- the content of the device ---

  // Make `tag` the one that consists of KV blocks with this layout. Errors: DeviceChunks::set_kv_layout().
  Status set_kv_layout(std::string tag, const KvLayout& layout);
  // Set the store of KV blocks of this layout whose slots orders may name (orders::Save::host_slots).
  void set_host_store(std::weak_ptr<HostStore> store) { index_.set_host_store(std::move(store)); }
  const DeviceChunks& chunks() const { return chunks_; }
  bool is_kv(std::string_view tag) const { return tag == chunks_.kv_tag(); }
  ContentIndex& index() { return index_; }
  const ContentIndex& index() const { return index_; }

  void note_write(std::string_view tag);         // note that the tag was written
  void invalidate_digest(std::string_view tag);  // note that it may have been written
  // Forget the contents of all KV blocks: other code than the engine wrote them.
  void forget_blocks() noexcept;
  uint64_t foreign_block_writes() const { return foreign_block_writes_; }  // number of calls of forget_blocks()
  // Detect writes that were not noted, and fill the reply.
  void describe(orders::Describe::Reply& reply);
  void on_allocated(std::string_view tag);  // a new region: no image has it
  void on_freed(const RegionInfo& region);  // call it before the free: nothing reads or writes the region any more
  // Return the digest of each tag: the known one, that of its image, or one of what is read now.
  Result<orders::DigestTags::Reply> digest(const orders::DigestTags& order);
  // Return the known digest of an attached tag; none if it was written since.
  std::optional<std::string> proven(const std::string& tag);

  // --- images ---

  const TagImage* find(std::string_view tag) const;  // null: there is none
  TagImage* find(std::string_view tag);
  void put(const std::string& tag, TagImage&& image) { images_[tag] = std::move(image); }
  void drop(std::string_view tag) noexcept;
  // Drop images that are not kept, of tags whose content is still attached. Blocks that were copied are retained.
  void forget_saved(const std::vector<std::string>& tags) noexcept;
  // Retain the blocks of an image for the next sleep, if they are still current. The image is void afterwards.
  void retain(TagImage& image) noexcept;
  // Note that the tags have no content any more: no image is clean, and those that no sleep has saved or reused are
  // dropped. `away`: the same tags, made before so that nothing is allocated here.
  void on_detached(const std::vector<std::string>& tags, std::set<std::string, std::less<>> away);
  // Return those of these tags that this rank has.
  std::vector<std::string> here(const std::vector<std::string>& tags) const;
  // Return those of these tags that have a region asleep. A sleeping tag has none if those regions were freed, even if
  // others were allocated since.
  std::vector<std::string> asleep_of(const std::vector<std::string>& tags) const;
  // End the wake of these tags; it does nothing to tags that are awake. `keep`: keep their images. `blocks_stay`: leave
  // the image of the KV blocks until drop_blocks().
  Status finish(const std::vector<std::string>& tags, bool keep, bool blocks_stay);
  // Drop the image of the KV blocks; with `keep`, retain its blocks.
  void drop_blocks(bool keep) noexcept;
  void on_moved(const std::string& directory);  // the checkpoint under construction was committed to this path

  // Read the content of the tags and compare it with their kept images. Equal images are clean until distrust(); others
  // are dropped.
  Status compare(const std::vector<std::string>& tags);
  void distrust() noexcept;  // no image is clean any more, except that of the weights
  // Read saved bytes of a region, from `offset` on. kNotFound: nothing is saved of it, or not in the arena.
  Status read_saved(const RegionInfo& region, uint64_t offset, std::span<std::byte> out) const;
  bool needs_staging() const;  // whether a wake needs staging memory (TransferEngine::keep_staging())
  // Reserve again the memory that a wake has given back to bring spilled chunks back with, as far as there is room.
  void reserve_staging() noexcept;
  void fill(RankLedger& ledger) const;
  void abandon() noexcept;  // copies may still run: leaks what is in the arena

 private:
  void forget_clean(std::string_view tag);
  bool is_whole(const std::string& tag) const;

  const RankParts& parts_;
  DeviceChunks chunks_;
  TagImages images_;
  std::set<std::string, std::less<>> away_;  // tags from the release of their memory until they are awake
  ContentIndex index_;
  uint64_t foreign_block_writes_ = 0;
};

}  // namespace torpor
