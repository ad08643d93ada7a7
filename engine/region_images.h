// SPDX-License-Identifier: Apache-2.0
// RegionImages: what is saved of each of a rank's tags, and what is known of the content that the device has.
//
// An image is made by RankSaver and read by RankRestorer. It may be kept after a wake. A clean one is still equal to
// the content of its attached tag: it is not copied again. That of the weights is believed to be until somebody says
// that they were written, or it is noticed; that of any other tag, which anybody writes at any time, only where the
// content was just read (compare()). Of KV blocks each is kept by itself, by its version (engine/content_index.h).
//
// Owner: RankMemory; its lock is held at every call.
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
  explicit RegionImages(const RankParts& parts);  // outlives it

  // --- what the device has ---

  // From now on `tag` consists of KV blocks laid out like this. Errors: DeviceChunks::set_kv_layout().
  Status set_kv_layout(std::string tag, const KvLayout& layout);
  // Blocks of this layout, that orders may name by their slots there (orders::Save::host_slots).
  void set_host_store(std::weak_ptr<HostStore> store) { index_.set_host_store(std::move(store)); }
  const DeviceChunks& chunks() const { return chunks_; }
  bool is_kv(std::string_view tag) const { return tag == chunks_.kv_tag(); }
  ContentIndex& index() { return index_; }
  const ContentIndex& index() const { return index_; }

  void note_write(std::string_view tag);         // its content is another one
  void invalidate_digest(std::string_view tag);  // it may be
  // Blocks were written by others than the engine: nobody has their content.
  void forget_blocks() noexcept;
  uint64_t foreign_block_writes() const { return foreign_block_writes_; }  // calls of forget_blocks()
  // Look for writes that nobody told of, and fill the reply.
  void describe(orders::Describe::Reply& reply);
  void on_allocated(std::string_view tag);  // a new region: it is in no image
  void on_freed(const RegionInfo& region);  // before: nothing reads or writes it any more
  // Return the digest of each tag: known, of its image, or of what is read now.
  Result<orders::DigestTags::Reply> digest(const orders::DigestTags& order);
  // Return the digest that is known of an attached tag; none if it was written since.
  std::optional<std::string> proven(const std::string& tag);

  // --- images ---

  const TagImage* find(std::string_view tag) const;  // null: there is none
  TagImage* find(std::string_view tag);
  void put(const std::string& tag, TagImage&& image) { images_[tag] = std::move(image); }
  void drop(std::string_view tag) noexcept;
  // Drop what is not kept, of tags whose content is there still. Blocks are retained as far as they were copied.
  void forget_saved(const std::vector<std::string>& tags) noexcept;
  // Keep the blocks of an image for the next sleep, if they are those of the present content. The image is void then.
  void retain(TagImage& image) noexcept;
  // The tags have no content any more: no image is clean. `away`: the same tags; takes no memory.
  void on_detached(const std::vector<std::string>& tags, std::set<std::string, std::less<>> away);
  // Of tags that are to come back, return those that still have a region asleep. One that went away has none if those
  // regions were freed, even if others were allocated since.
  std::vector<std::string> asleep_of(const std::vector<std::string>& tags) const;
  // The tags are awake; one that is already stays so. Without `keep` no image is kept. With `blocks_stay` that of the
  // KV blocks stays as it is: drop_blocks() ends it.
  Status finish(const std::vector<std::string>& tags, bool keep, bool blocks_stay);
  // Drop the image of the KV blocks; with `keep` they are retained.
  void drop_blocks(bool keep) noexcept;
  void on_moved(const std::string& directory);  // the checkpoint under construction was committed to this path

  // Read the content of the tags; kept images of another content go, those of the same are clean until distrust().
  Status compare(const std::vector<std::string>& tags);
  void distrust() noexcept;  // all but those of the weights
  // Read what was saved of a region, from `offset` on. kNotFound: nothing is, or it does not lie in the arena.
  Status read_saved(const RegionInfo& region, uint64_t offset, std::span<std::byte> out) const;
  bool needs_staging() const;  // kept for a wake (TransferEngine::keep_staging())
  // Take out the images of these tags, for put_back() or to be dropped. Neither needs memory.
  TagImages take(const std::vector<std::string>& tags) noexcept;
  void put_back(TagImages images) noexcept { images_.merge(images); }
  void fill(RankLedger& ledger) const;
  void abandon() noexcept;  // copies may still run: what is in the arena is leaked

 private:
  void forget_clean(std::string_view tag);
  bool is_whole(const std::string& tag) const;

  const RankParts& parts_;
  DeviceChunks chunks_;
  TagImages images_;
  std::set<std::string, std::less<>> away_;  // tags, from the time their memory goes until they are awake
  ContentIndex index_;
  uint64_t foreign_block_writes_ = 0;
};

}  // namespace torpor
