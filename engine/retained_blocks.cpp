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

void RetainedBlocks::keep(std::vector<Block> blocks, uint64_t budget_bytes) noexcept {
  std::vector<Block> before;
  // A block without a version is useful only until the next step.
  const auto unversioned = std::stable_partition(blocks.begin(), blocks.end(),
                                                 [](const Block& block) { return block.content.version != 0; });
  (void)unversioned;
  uint64_t bytes = 0;
  const auto end = std::find_if(blocks.begin(), blocks.end(), [&](const Block& block) {
    if (block.content.version == 0 && block.content.steps == 0) return true;
    if (block.chunk.stored_bytes > budget_bytes - bytes) return true;
    bytes += block.chunk.stored_bytes;
    return false;
  });
  blocks.erase(end, blocks.end());
  const MutexLock lock(mutex_);
  before = std::exchange(blocks_, std::move(blocks));
  bytes_ = bytes;
}

namespace {

constexpr uint32_t kNone = UINT32_MAX;

// Return the position in `there` of each wanted block, or kNone. Block numbers are dense, so a table can hold all.
std::vector<uint32_t> places(std::span<const RetainedBlocks::Block> there, std::span<const int32_t> wanted,
                             std::span<const BlockContent> contents) {
  uint64_t numbers = 0;
  for (const RetainedBlocks::Block& block : there) numbers = std::max(numbers, block.chunk.key.index + 1);
  std::vector<uint32_t> of_number(numbers, kNone);
  for (size_t i = 0; i < there.size(); ++i) of_number[there[i].chunk.key.index] = static_cast<uint32_t>(i);
  std::vector<uint32_t> found(wanted.size(), kNone);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto number = static_cast<uint64_t>(wanted[i]);
    const uint32_t place = number < numbers ? of_number[number] : kNone;
    if (place != kNone && contents[i].same_as(there[place].content)) found[i] = place;
  }
  return found;
}

}  // namespace

std::vector<uint64_t> RetainedBlocks::find(std::span<const int32_t> wanted,
                                           std::span<const BlockContent> contents) const {
  std::vector<uint64_t> found(wanted.size());
  const MutexLock lock(mutex_);
  const std::vector<uint32_t> place = places(blocks_, wanted, contents);
  for (size_t i = 0; i < place.size(); ++i) found[i] = place[i] == kNone ? 0 : blocks_[place[i]].chunk.stored_bytes;
  return found;
}

std::vector<RetainedBlocks::Block> RetainedBlocks::take(std::span<const int32_t> wanted,
                                                        std::span<const BlockContent> contents) {
  std::vector<Block> there;
  {
    const MutexLock lock(mutex_);
    there.swap(blocks_);
    bytes_ = 0;
  }
  const std::vector<uint32_t> place = places(there, wanted, contents);
  bool unchanged = there.size() == wanted.size();
  for (size_t i = 0; i < place.size() && unchanged; ++i) unchanged = place[i] == i;
  if (unchanged) return there;
  std::vector<Block> found(wanted.size());
  for (size_t i = 0; i < place.size(); ++i) {
    if (place[i] != kNone) found[i] = std::move(there[place[i]]);
  }
  return found;
}

uint64_t RetainedBlocks::give_up(uint64_t bytes) noexcept {
  uint64_t given = 0;
  while (given < bytes) {
    HostArena::Span going;
    const MutexLock lock(mutex_);
    if (blocks_.empty()) break;
    given += blocks_.back().chunk.stored_bytes;
    bytes_ -= blocks_.back().chunk.stored_bytes;
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
