// SPDX-License-Identifier: Apache-2.0
// ContentIndex: what is known of the bytes in a rank's device memory, and where else the same bytes are.
//
// Two contents count as equal only if that is known: for a KV block by its content version (BlockContent), for a tag by
// a digest that was taken since its last write. No bytes are read to compare contents, except the samples that detect
// writes (engine/tag_contents.h).
//
// The bytes of a KV block may also be in the host store of an engine that offloads, in the arena where the last wake
// left them (engine/retained_blocks.h), and in the newest checkpoint (engine/stored_blocks.h).
//
// Owner: RegionImages. Threads: the caller holds RankMemory's lock. The arena may evict retained blocks at any time,
// from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/host_arena.h"
#include "allocator/sleep_allocator.h"
#include "engine/rank_orders.h"
#include "engine/retained_blocks.h"
#include "engine/stored_blocks.h"
#include "engine/tag_contents.h"
#include "offload/host_store.h"

namespace torpor {

// KV blocks as the host store has them.
struct BlocksInStore {
  std::shared_ptr<HostStore> store;                      // null: there is no store, or it was not asked
  std::vector<std::optional<HostStore::Stored>> stored;  // of each block that was asked for; empty without a store
};

class ContentIndex {
 public:
  // All outlive this object.
  ContentIndex(const DeviceMemory& device, const SleepAllocator& allocator, HostArena& arena);
  ~ContentIndex();

  // --- tags without blocks ---

  // Note that the tag was written.
  void note_write(std::string_view tag);
  // Note that the tag may have been written.
  void invalidate_digest(std::string_view tag);
  // Return true, and note the write, if the bytes of an attached tag have changed without note_write().
  bool notice_write(const std::string& tag);
  // Compare with the tag's present bytes in later calls of notice_write().
  void look_anew(const std::string& tag) { tags_.look_anew(tag); }
  // Note that the tag came back from a sleep without content. It is missing() until it is written.
  void note_missing(const std::string& tag) { tags_.came_back_empty(tag); }
  bool missing(std::string_view tag) const { return tags_.missing(tag); }
  // Note the digest of the content with which the tag was just filled.
  void note_filled(const std::string& tag, std::string digest) { tags_.prove(tag, std::move(digest)); }
  // Note the digest of content that was read from the tag.
  void note_digest(const std::string& tag, std::string digest) { tags_.know(tag, std::move(digest)); }
  // Return the digest of the tag's content; none if it is not known.
  std::optional<std::string> digest(std::string_view tag) const { return tags_.proven(tag); }
  // Begin to watch the weights, while their digest is computed in the background.
  void watch_weights() { weights_unwritten_ = true; }
  // Note that digest, unless the weights were written since watch_weights().
  void note_watched_digest(std::string digest);
  void describe(orders::Describe::Reply& reply) const { tags_.describe(reply); }

  // --- KV blocks ---

  // Ask this store in find_in_store() from now on; null: no store.
  void set_host_store(std::weak_ptr<HostStore> store) { host_store_ = std::move(store); }
  // Forget what the arena and checkpoints have of KV blocks, as any block may have been written.
  void forget_blocks() noexcept;
  // Return what the host store has of blocks. `slots`: the slot of each block there; or empty: do not ask.
  BlocksInStore find_in_store(std::span<const Slot> slots) const;
  // See RetainedBlocks::find().
  std::vector<uint64_t> find_retained(std::span<const int32_t> blocks, std::span<const BlockContent> contents) const {
    return retained_->find(blocks, contents);
  }
  // See RetainedBlocks::take(). (This is const because the arena may evict retained blocks at any time anyway.)
  RetainedBlocks::Taken take_retained(std::span<const int32_t> blocks, std::span<const BlockContent> contents) const {
    return retained_->take(blocks, contents);
  }
  // Retain these blocks in place of what is retained now, up to `most_bytes`.
  void retain(RetainedBlocks::Blocks blocks, uint64_t most_bytes) { retained_->keep(std::move(blocks), most_bytes); }
  uint64_t retained_bytes() const { return retained_->bytes(); }
  void release_retained() noexcept { retained_->clear(); }
  // Return the blocks of the newest checkpoint and of the one before it.
  StoredBlocks& checkpoints() { return stored_; }
  const StoredBlocks& checkpoints() const { return stored_; }

 private:
  TagContents tags_;
  bool weights_unwritten_ = false;
  HostArena& arena_;
  const std::shared_ptr<RetainedBlocks> retained_ = std::make_shared<RetainedBlocks>();
  StoredBlocks stored_;
  std::weak_ptr<HostStore> host_store_;
};

}  // namespace torpor
