// SPDX-License-Identifier: Apache-2.0
// TagImage: what is saved of one tag while its memory is away: chunks in the arena, and in a file without a name what
// had no room there; or chunks in a checkpoint.
//
// Owner: RegionImages. A plain value.
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
  std::unique_ptr<HostTier> host;  // null: in a checkpoint
  std::string directory;           // of the checkpoint
  std::vector<SavedChunk> chunks;
  // With `host`: so many of the first chunks are there, the others in `spilled`.
  size_t in_host = 0;
  std::unique_ptr<RecordStore> spilled;  // null: there are none
  HostArena::Span staging;               // kept free for bringing those back
  std::vector<BlockContent> contents;    // of blocks in the arena: of each chunk
  uint64_t reused_bytes = 0;             // not copied by the sleep that made it
  bool kept = false;                     // since a wake
  bool clean = false;                    // kept, and equal to the content of the attached tag
  uint64_t bytes() const {               // of the content
    uint64_t bytes = 0;
    for (const SavedChunk& chunk : chunks) bytes += chunk.bytes;
    return bytes;
  }
  bool needs_no_copy() const { return clean && host != nullptr; }
};
using TagImages = std::map<std::string, TagImage, std::less<>>;  // by tag

}  // namespace torpor
