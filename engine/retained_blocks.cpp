#include "engine/retained_blocks.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace torpor {

void RetainedBlocks::keep(std::vector<Block> blocks, uint64_t budget_bytes) noexcept {
  std::vector<Block> before;
  // Without a stamp it is of use only until the next step.
  const auto unstamped =
      std::stable_partition(blocks.begin(), blocks.end(), [](const Block& block) { return block.content.stamp != 0; });
  (void)unstamped;
  uint64_t bytes = 0;
  const auto end = std::find_if(blocks.begin(), blocks.end(), [&](const Block& block) {
    if (block.content.stamp == 0 && block.content.steps == 0) return true;
    if (block.chunk.bytes > budget_bytes - bytes) return true;
    bytes += block.chunk.bytes;
    return false;
  });
  blocks.erase(end, blocks.end());
  const MutexLock lock(mutex_);
  before = std::exchange(blocks_, std::move(blocks));
  bytes_ = bytes;
}

std::vector<RetainedBlocks::Block> RetainedBlocks::take(std::span<const int32_t> wanted,
                                                        std::span<const BlockContent> contents) {
  std::vector<Block> found(wanted.size());
  std::vector<Block> there;
  {
    const MutexLock lock(mutex_);
    there = std::exchange(blocks_, {});
    bytes_ = 0;
  }
  std::unordered_map<uint64_t, size_t> place;
  place.reserve(there.size());
  for (size_t i = 0; i < there.size(); ++i) place.emplace(there[i].chunk.key.index, i);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto at = place.find(static_cast<uint64_t>(wanted[i]));
    if (at != place.end() && contents[i].same_as(there[at->second].content)) found[i] = std::move(there[at->second]);
  }
  return found;
}

uint64_t RetainedBlocks::give_up(uint64_t bytes) noexcept {
  uint64_t given = 0;
  while (given < bytes) {
    HostArena::Span going;
    const MutexLock lock(mutex_);
    if (blocks_.empty()) break;
    given += blocks_.back().chunk.bytes;
    bytes_ -= blocks_.back().chunk.bytes;
    going = std::move(blocks_.back().bytes);
    blocks_.pop_back();
  }
  return given;
}

void RetainedBlocks::clear() noexcept {
  std::vector<Block> going;
  const MutexLock lock(mutex_);
  going.swap(blocks_);
  bytes_ = 0;
}

uint64_t RetainedBlocks::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace torpor
