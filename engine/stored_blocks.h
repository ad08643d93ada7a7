// SPDX-License-Identifier: Apache-2.0
// StoredBlocks: which content of each KV block the newest checkpoint has, so that the next one can link it unread.
//
// A checkpoint is known by its id, a content as in engine/retained_blocks.h. What is noted of a checkpoint that is not
// committed in the end is never asked for: no later one builds on it. So the one that it was built on stays noted too.
//
// Owner: ContentIndex; RankMemory's lock is held at every call.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>

#include "base/seal.h"
#include "engine/retained_blocks.h"

namespace torpor {

class StoredBlocks {
 public:
  // The number under which the checkpoint has this content of the block: another one than the block's after a wake
  // with other block numbers. None: it has it not.
  std::optional<uint64_t> find(const SealId& checkpoint, int32_t block, const BlockContent& content) const;
  // The checkpoint, built on `base`, has these. Of others than these two nothing is known any more.
  void note(const SealId& checkpoint, const SealId& base, std::span<const int32_t> blocks,
            std::span<const BlockContent> contents);
  // The device has these blocks, which this checkpoint has under the numbers `there`, and no others; their contents are
  // told later.
  void note_loaded(const SealId& checkpoint, std::span<const SavedChunk> blocks, std::span<const uint64_t> there);
  // Of those blocks that note_loaded() named.
  void tell_contents(const SealId& checkpoint, std::span<const int32_t> blocks, std::span<const BlockContent> contents);
  // The device has lost the contents of all blocks but these.
  void keep_only(std::span<const SavedChunk> blocks) noexcept;
  void clear() noexcept {
    newest_ = {};
    base_ = {};
  }

 private:
  struct Stored {
    BlockContent content{};
    uint64_t there = 0;  // the block's number in the checkpoint
  };
  struct Noted {
    SealId checkpoint{};
    std::unordered_map<int32_t, Stored> contents;
  };
  Noted newest_;
  Noted base_;
};

}  // namespace torpor
