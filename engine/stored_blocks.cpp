// SPDX-License-Identifier: Apache-2.0
#include "engine/stored_blocks.h"

#include <unordered_set>
#include <utility>

namespace torpor {
namespace {

int32_t number_of(const SavedChunk& chunk) { return static_cast<int32_t>(chunk.key.index); }

}  // namespace

std::optional<uint64_t> StoredBlocks::find(const SealId& checkpoint, int32_t block, const BlockContent& content) const {
  for (const Noted* const noted : {&newest_, &base_}) {
    if (noted->checkpoint != checkpoint) continue;
    const auto found = noted->contents.find(block);
    if (found == noted->contents.end() || !content.same_as(found->second.content)) return std::nullopt;
    return found->second.there;
  }
  return std::nullopt;
}

void StoredBlocks::note(const SealId& checkpoint, const SealId& base, std::span<const int32_t> blocks,
                        std::span<const BlockContent> contents) {
  Noted noted{.checkpoint = checkpoint, .contents = {}};
  noted.contents.reserve(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i)
    noted.contents[blocks[i]] = {contents[i], static_cast<uint64_t>(blocks[i])};
  if (newest_.checkpoint == base) base_ = std::move(newest_);
  newest_ = std::move(noted);
  if (base_.checkpoint != base) base_ = {};
}

void StoredBlocks::note_loaded(const SealId& checkpoint, std::span<const SavedChunk> blocks,
                               std::span<const uint64_t> there) {
  clear();
  Noted noted{.checkpoint = checkpoint, .contents = {}};
  noted.contents.reserve(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) noted.contents[number_of(blocks[i])] = {.content = {}, .there = there[i]};
  newest_ = std::move(noted);
}

void StoredBlocks::note_contents(const SealId& checkpoint, std::span<const int32_t> blocks,
                                 std::span<const BlockContent> contents) {
  if (newest_.checkpoint != checkpoint) return;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (const auto found = newest_.contents.find(blocks[i]); found != newest_.contents.end())
      found->second.content = contents[i];
  }
}

void StoredBlocks::keep_only(std::span<const SavedChunk> blocks) noexcept {
  if (newest_.contents.empty() && base_.contents.empty()) return;
  const Status kept = try_catch([&]() -> Status {
    std::unordered_set<int32_t> there;
    there.reserve(blocks.size());
    for (const SavedChunk& block : blocks) there.insert(number_of(block));
    for (Noted* const noted : {&newest_, &base_})
      std::erase_if(noted->contents, [&](const auto& entry) { return !there.contains(entry.first); });
    return ok();
  });
  if (!kept) clear();
}

}  // namespace torpor
