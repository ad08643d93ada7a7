// SPDX-License-Identifier: Apache-2.0
// TagImage: what is saved of one tag while its memory is released: chunks in the arena, and in a spill file those that
// did not fit there; or chunks in a checkpoint.
//
// Owner: RegionImages. It is a plain value.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "allocator/host_arena.h"
#include "engine/retained_blocks.h"
#include "offload/host_tier.h"
#include "offload/record_store.h"

namespace torpor {

struct TagImage {
  std::unique_ptr<HostTier> host;  // null: the chunks are in a checkpoint
  std::string directory;           // of that checkpoint
  std::vector<SavedChunk> chunks;
  // With `host`: number of chunks, from the first on, that are there. The others are in `spilled`.
  size_t in_host = 0;
  std::unique_ptr<RecordStore> spilled;  // null: none are
  HostArena::Span staging;     // memory of the arena, reserved to bring those back; a wake gives it back first
  uint64_t staging_bytes = 0;  // of `staging`, also while a wake has it
  // With `host`, if the tag has blocks: the content of each chunk there. A borrowed chunk has none that is known(), so
  // it cannot be retained.
  std::vector<BlockContent> contents;
  uint64_t reused_bytes = 0;  // that the sleep did not copy
  bool kept = false;          // it stayed after a wake
  bool clean = false;         // kept, and equal to the content of the attached tag
  bool reused = false;        // kept, and the sleep that is under way has it instead of a copy
  uint64_t bytes() const {    // of the content
    uint64_t bytes = 0;
    for (const SavedChunk& chunk : chunks) bytes += chunk.bytes;
    return bytes;
  }
  uint64_t host_bytes() const {  // that the chunks in the arena take there
    uint64_t bytes = 0;
    for (size_t i = 0; host != nullptr && i < in_host; ++i) bytes += chunks[i].stored_bytes;
    return bytes;
  }
  bool needs_no_copy() const { return clean && host != nullptr; }
};
using TagImages = std::map<std::string, TagImage, std::less<>>;  // by tag

}  // namespace torpor
