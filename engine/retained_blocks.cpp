// SPDX-License-Identifier: Apache-2.0
#include "engine/retained_blocks.h"

#include <algorithm>
#include <utility>

namespace torpor {

Result<std::vector<BlockContent>> contents_of(std::span<const int32_t> blocks, std::span<const uint64_t> versions,
                                              uint64_t steps) {
  if (!versions.empty() && versions.size() != blocks.size())
    return Error{.code = Code::kCorruption, .what = "an order that names blocks does not say the version of each"};
  std::vector<BlockContent> contents(blocks.size(), BlockContent{.steps = steps});
  for (size_t i = 0; i < versions.size(); ++i) contents[i].version = versions[i];
  return contents;
}

namespace {

constexpr uint32_t kNone = UINT32_MAX;

// Leave only the blocks at these positions, each named once, in this order.
void leave(RetainedBlocks::Blocks& blocks, std::span<const uint32_t> positions) {
  if (blocks.host == nullptr) return;
  const bool all = positions.size() == blocks.chunks.size() && std::is_sorted(positions.begin(), positions.end());
  if (!all) {
    std::vector<SavedChunk> chunks;
    std::vector<BlockContent> contents;
    chunks.reserve(positions.size());
    contents.reserve(positions.size());
    for (const uint32_t position : positions) {
      chunks.push_back(std::move(blocks.chunks[position]));
      contents.push_back(blocks.contents[position]);
    }
    blocks.chunks = std::move(chunks);
    blocks.contents = std::move(contents);
  }
  blocks.host->keep_only(blocks.chunks);
}

// Return the position in `there` of each wanted block; kNone if it is not there, or was wanted before. Block numbers
// are dense, so a table can hold all.
std::vector<uint32_t> positions_of(const RetainedBlocks::Blocks& there, std::span<const int32_t> wanted,
                                   std::span<const BlockContent> contents) {
  uint64_t numbers = 0;
  for (const SavedChunk& chunk : there.chunks) numbers = std::max(numbers, chunk.key.index + 1);
  std::vector<uint32_t> of_number(numbers, kNone);
  for (size_t i = 0; i < there.chunks.size(); ++i) of_number[there.chunks[i].key.index] = static_cast<uint32_t>(i);
  std::vector<uint32_t> found(wanted.size(), kNone);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto number = static_cast<uint64_t>(wanted[i]);
    const uint32_t place = number < numbers ? std::exchange(of_number[number], kNone) : kNone;
    if (place != kNone && contents[i].same_as(there.contents[place])) found[i] = place;
  }
  return found;
}

std::vector<uint64_t> bytes_at(const RetainedBlocks::Blocks& there, std::span<const uint32_t> positions) {
  std::vector<uint64_t> bytes(positions.size());
  for (size_t i = 0; i < positions.size(); ++i)
    bytes[i] = positions[i] == kNone ? 0 : there.chunks[positions[i]].stored_bytes;
  return bytes;
}

}  // namespace

void RetainedBlocks::keep(Blocks blocks, uint64_t budget_bytes) {
  std::vector<uint32_t> kept;
  kept.reserve(blocks.chunks.size());
  for (uint32_t i = 0; i < blocks.chunks.size(); ++i) {
    if (blocks.contents[i].known()) kept.push_back(i);
  }
  // A block without a version is useful only until the next step.
  (void)std::stable_partition(kept.begin(), kept.end(), [&](uint32_t i) { return blocks.contents[i].version != 0; });
  uint64_t bytes = 0;
  const auto end = std::find_if(kept.begin(), kept.end(), [&](uint32_t i) {
    if (blocks.chunks[i].stored_bytes > budget_bytes - bytes) return true;
    bytes += blocks.chunks[i].stored_bytes;
    return false;
  });
  kept.erase(end, kept.end());
  leave(blocks, kept);
  Blocks before;
  const MutexLock lock(mutex_);
  before = std::exchange(blocks_, std::move(blocks));
  bytes_ = bytes;
}

std::vector<uint64_t> RetainedBlocks::find(std::span<const int32_t> wanted,
                                           std::span<const BlockContent> contents) const {
  const MutexLock lock(mutex_);
  return bytes_at(blocks_, positions_of(blocks_, wanted, contents));
}

RetainedBlocks::Taken RetainedBlocks::take(std::span<const int32_t> wanted, std::span<const BlockContent> contents) {
  Taken taken;
  {
    const MutexLock lock(mutex_);
    taken.blocks = std::exchange(blocks_, {});
    bytes_ = 0;
  }
  std::vector<uint32_t> found = positions_of(taken.blocks, wanted, contents);
  taken.bytes = bytes_at(taken.blocks, found);
  std::erase(found, kNone);
  leave(taken.blocks, found);
  return taken;
}

uint64_t RetainedBlocks::evict(uint64_t bytes) noexcept {
  uint64_t given = 0;
  while (given < bytes) {
    HostArena::Span going;
    const MutexLock lock(mutex_);
    if (blocks_.chunks.empty()) break;
    const SavedChunk& last = blocks_.chunks.back();
    given += last.stored_bytes;
    bytes_ -= last.stored_bytes;
    going = blocks_.host->release(last);
    blocks_.chunks.pop_back();
    blocks_.contents.pop_back();
  }
  return given;
}

void RetainedBlocks::clear() noexcept {
  Blocks going;
  const MutexLock lock(mutex_);
  going = std::exchange(blocks_, {});
  bytes_ = 0;
}

uint64_t RetainedBlocks::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace torpor
