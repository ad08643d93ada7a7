// SPDX-License-Identifier: Apache-2.0
// StoredBlocks: which content of each KV block the newest checkpoint has, so that the next one can link it without
// reading.
//
// An id identifies a checkpoint, a BlockContent a content. The blocks of a checkpoint that is never committed may stay
// noted: no later checkpoint has it as base. So the blocks of the checkpoint before it stay noted, too.
//
// Owner: ContentIndex. Threads: the caller holds RankMemory's lock.
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
  // Return the number under which the checkpoint has this content of the block; none if it does not have it. The number
  // differs from the block's after a wake into an engine with other block numbers.
  std::optional<uint64_t> find(const SealId& checkpoint, int32_t block, const BlockContent& content) const;
  // Note that the checkpoint, built on `base`, has these contents. All other checkpoints except these two are
  // forgotten.
  void note(const SealId& checkpoint, const SealId& base, std::span<const int32_t> blocks,
            std::span<const BlockContent> contents);
  // Note that the device has exactly these blocks, which this checkpoint has under the numbers `there`. note_contents()
  // gives their contents later.
  void note_loaded(const SealId& checkpoint, std::span<const SavedChunk> blocks, std::span<const uint64_t> there);
  // Note the contents of blocks that note_loaded() named.
  void note_contents(const SealId& checkpoint, std::span<const int32_t> blocks, std::span<const BlockContent> contents);
  // Forget all blocks but these: the device has lost the content of the others.
  void keep_only(std::span<const SavedChunk> blocks) noexcept;
  void clear() noexcept {
    newest_ = {};
    base_ = {};
  }

 private:
  struct Stored {
    BlockContent content{};
    uint64_t there = 0;  // block number in the checkpoint
  };
  struct Noted {
    SealId checkpoint{};
    std::unordered_map<int32_t, Stored> contents;
  };
  Noted newest_;
  Noted base_;
};

}  // namespace torpor
