// SPDX-License-Identifier: Apache-2.0
// RenumberedTier: reads KV blocks by the numbers that they get from a checkpoint that has them under others. A seal
// binds the number that a block had when it was written, so each is read under that one.
//
// Owner: the load that made it. Threads: as DiskTier::get().
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "offload/tier.h"

namespace torpor {

class RenumberedTier final : public Tier {
 public:
  // `there`: of each number that a block gets, the one that it has in `source`.
  RenumberedTier(std::unique_ptr<Tier> source, std::unordered_map<uint64_t, uint64_t> there)
      : source_(std::move(source)), there_(std::move(there)) {}

  std::string_view kind() const override { return source_->kind(); }
  bool addressable() const override { return false; }
  Status prepare(uint64_t, uint64_t) override {
    return Error{.code = Code::kInternal, .what = "a renumbered tier is only read", .next_step = {}};
  }
  void get(std::span<TierPart> parts) override {
    std::vector<SavedChunk> stored;
    stored.reserve(parts.size());
    std::vector<TierPart> reads(parts.begin(), parts.end());
    for (TierPart& read : reads) {
      SavedChunk& chunk = stored.emplace_back(*read.chunk);
      if (const auto found = there_.find(chunk.key.index); found != there_.end()) chunk.key.index = found->second;
      read.chunk = &chunk;
    }
    source_->get(reads);
    for (size_t i = 0; i < parts.size(); ++i) parts[i].status = std::move(reads[i].status);
  }
  Status finish() override { return source_->finish(); }

 private:
  std::unique_ptr<Tier> source_;
  std::unordered_map<uint64_t, uint64_t> there_;
};

}  // namespace torpor
