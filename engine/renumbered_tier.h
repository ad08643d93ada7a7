// SPDX-License-Identifier: Apache-2.0
// RenumberedTier: reads KV blocks from a checkpoint that has them under other numbers. A seal binds the number that a
// block had when it was written, so each block is read under that number.
//
// Owner: the load that made it. Threads: as DiskTier::get().
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "offload/record_store.h"

namespace torpor {

class RenumberedTier final : public RecordStore {
 public:
  // `there`: a block's number here -> its number in `source`. Blocks that are not in it have the same number.
  RenumberedTier(std::unique_ptr<RecordStore> source, std::unordered_map<uint64_t, uint64_t> there)
      : traits_{.kind = source->traits().kind}, source_(std::move(source)), there_(std::move(there)) {}

  const StoreTraits& traits() const override { return traits_; }
  Status prepare(uint64_t, uint64_t) override {
    return Error{.code = Code::kInternal, .what = "a renumbered tier is only read", .next_step = {}};
  }
  void get(std::span<RecordPart> parts) override {
    std::vector<SavedChunk> stored;
    stored.reserve(parts.size());
    std::vector<RecordPart> reads(parts.begin(), parts.end());
    for (RecordPart& read : reads) {
      SavedChunk& chunk = stored.emplace_back(*read.chunk);
      if (const auto found = there_.find(chunk.key.index); found != there_.end()) chunk.key.index = found->second;
      read.chunk = &chunk;
    }
    source_->get(reads);
    for (size_t i = 0; i < parts.size(); ++i) parts[i].status = std::move(reads[i].status);
  }
  Status finish() override { return source_->finish(); }

 private:
  const StoreTraits traits_;
  std::unique_ptr<RecordStore> source_;
  std::unordered_map<uint64_t, uint64_t> there_;
};

}  // namespace torpor
