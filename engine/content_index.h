// SPDX-License-Identifier: Apache-2.0
// ContentIndex: what is known of the bytes in a rank's device memory, and where else the same bytes are.
//
// Two contents are the same only where that is known: a KV block's by its content version (BlockContent), a tag's by a
// digest that was proven since its last write. Nothing is read to find out, but for the samples by which writes are
// noticed (engine/tag_contents.h).
//
// The bytes of a KV block may also lie in the host store into which an engine offloads, in the arena, where the last
// wake left them (engine/retained_blocks.h), and in the newest checkpoint (engine/stored_blocks.h).
//
// Owner: RegionImages; RankMemory's lock is held at every call. The arena may take what is retained at any time, from
// any thread.
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

// Where the bytes of KV blocks are in host memory.
struct HostPlaces {
  std::vector<uint64_t> retained_bytes;                    // of the arena, of each block; 0: none is retained
  std::shared_ptr<HostStore> store;                        // null: there is none, or it is not asked
  std::vector<std::optional<HostStore::Stored>> in_store;  // of each block; empty without a store
};

class ContentIndex {
 public:
  // All outlive it. `retain_bytes`: most that retain() keeps.
  ContentIndex(const DeviceMemory& device, const SleepAllocator& allocator, HostArena& arena, uint64_t retain_bytes);
  ~ContentIndex();

  // --- tags without blocks ---

  // Note that the tag has other bytes now.
  void note_write(std::string_view tag);
  // Note that the tag may have other bytes now.
  void invalidate_digest(std::string_view tag);
  // Look whether an attached tag was written without a note. Return true, and note it, if it was.
  bool notice_write(const std::string& tag);
  // Let later writes be noticed against what the tag has now.
  void look_anew(const std::string& tag) { tags_.look_anew(tag); }
  // Note that the tag came back from a sleep without bytes. It is missing until somebody writes it.
  void note_missing(const std::string& tag) { tags_.came_back_empty(tag); }
  bool missing(std::string_view tag) const { return tags_.missing(tag); }
  // Note the digest of what the tag was filled with just now.
  void note_filled(const std::string& tag, std::string digest) { tags_.prove(tag, std::move(digest)); }
  // Note the digest of what was read of the tag.
  void note_digest(const std::string& tag, std::string digest) { tags_.know(tag, std::move(digest)); }
  // Return the digest of the tag's bytes; none if it is not known.
  std::optional<std::string> digest(std::string_view tag) const { return tags_.proven(tag); }
  // Begin to watch the weights, whose digest is being computed in the background.
  void watch_weights() { weights_unwritten_ = true; }
  // Note that digest, unless somebody wrote the weights since watch_weights().
  void note_watched_digest(std::string digest);
  void describe(orders::Describe::Reply& reply) const { tags_.describe(reply); }

  // --- KV blocks ---

  // Ask this store from now on; null: no store.
  void set_host_store(std::weak_ptr<HostStore> store) { host_store_ = std::move(store); }
  // Forget what the arena and checkpoints have of blocks: all of them may have other bytes now.
  void forget_blocks() noexcept;
  // Return where the bytes of each block are in host memory. `slots`: of each block in the host store, or empty.
  HostPlaces find_in_host(std::span<const int32_t> blocks, std::span<const BlockContent> contents,
                          std::span<const Slot> slots) const;
  // Hand over what is retained of these blocks, without bytes for one of which nothing is. All else goes. (Const: what
  // is retained may go at any time anyway.)
  std::vector<RetainedBlocks::Block> take_retained(std::span<const int32_t> blocks,
                                                   std::span<const BlockContent> contents) const {
    return retained_->take(blocks, contents);
  }
  // Keep these in the arena, in place of what is retained, as far as retain_bytes go.
  void retain(std::vector<RetainedBlocks::Block> blocks) noexcept { retained_->keep(std::move(blocks), retain_bytes_); }
  uint64_t retained_bytes() const { return retained_->bytes(); }
  void release_retained() noexcept { retained_->clear(); }
  // Return the table of what the newest checkpoint and the one before it have.
  StoredBlocks& checkpoints() { return stored_; }
  const StoredBlocks& checkpoints() const { return stored_; }

 private:
  TagContents tags_;
  bool weights_unwritten_ = false;
  HostArena& arena_;
  const uint64_t retain_bytes_;
  const std::shared_ptr<RetainedBlocks> retained_ = std::make_shared<RetainedBlocks>();
  StoredBlocks stored_;
  std::weak_ptr<HostStore> host_store_;
};

}  // namespace torpor
