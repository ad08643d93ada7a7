#include "kvcache/block_store.h"

#include <fmt/format.h>

#include "base/units.h"

namespace torpor {

Status BlockStore::check(uint64_t bytes_per_block) {
  if (bytes_per_block > 0) return ok();
  return Error{.code = Code::kInvalidArgument,
               .what = "bytes_per_block is 0",
               .next_step = "give the size of a block over all layers"};
}

SavedChunk BlockStore::chunk(int32_t slot) const {
  return {.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = static_cast<uint64_t>(slot)},
          .bytes = bytes_per_block_,
          .digest = digests_[static_cast<size_t>(slot)],
          .stored_bytes = bytes_per_block_};
}

Result<std::unique_ptr<HostBlocks>> HostBlocks::create(HostArena& arena, BlockPoolOptions options,
                                                       uint64_t bytes_per_block, EventSink* sink) {
  TORPOR_TRY(check(bytes_per_block));
  const int32_t count = options.num_blocks;
  TORPOR_ASSIGN(std::unique_ptr<BlockPool> pool, BlockPool::create(std::move(options), sink));
  TORPOR_ASSIGN(HostArena::Span memory,
                arena.allocate(static_cast<uint64_t>(count) * align_up(bytes_per_block, kPage)));
  return std::unique_ptr<HostBlocks>(new HostBlocks(std::move(pool), bytes_per_block, std::move(memory)));
}

Result<std::span<std::byte>> HostBlocks::place(SavedChunk& chunk) {
  const std::span<std::byte> bytes = view(chunk);
  if (bytes.empty())
    return Error{.code = Code::kInternal,
                 .what = fmt::format("{} is not a slot of host memory", chunk.key.to_string())};
  chunk.codec = Codec::kNone;
  chunk.stored_bytes = chunk.bytes;
  return bytes;
}

std::span<std::byte> HostBlocks::view(const SavedChunk& chunk) {
  if (chunk.key.index >= static_cast<uint64_t>(pool().num_blocks()) || chunk.bytes != bytes_per_block()) return {};
  return memory_.bytes().subspan(chunk.key.index * align_up(bytes_per_block(), kPage), bytes_per_block());
}

}  // namespace torpor
