// SPDX-License-Identifier: Apache-2.0
// PackedShares: how many bytes of the arena the packed chunks of each tag need. It is known only after packing, so a
// sleep is planned with the shares of the sleep before.
//
// Owner: RankSaver. Threads: the caller holds RankMemory's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "engine/rank_parts.h"
#include "offload/chunk.h"

namespace torpor {

class PackedShares {
 public:
  explicit PackedShares(const RankParts& parts) : codec_(parts.host_codec) {}

  // Return how many bytes of the arena `bytes` of the tag are expected to need.
  uint64_t held_for(std::string_view tag, uint64_t bytes) const {
    if (codec_ == Codec::kNone) return bytes;
    const auto known = shares_.find(tag);
    const uint64_t share = known == shares_.end() ? kUsualShare : known->second;
    return std::min(bytes, bytes / kWhole * share + bytes % kWhole);
  }
  bool known(std::string_view tag) const { return shares_.contains(tag); }
  // Note how much these chunks needed; other chunks of the tag are expected to need as much.
  void learn(const std::string& tag, std::span<const SavedChunk> chunks) {
    uint64_t bytes = 0;
    uint64_t stored = 0;
    for (const SavedChunk& chunk : chunks) bytes += chunk.bytes, stored += chunk.stored_bytes;
    if (codec_ == Codec::kNone || bytes == 0) return;
    shares_[tag] = std::min(kWhole, stored * kWhole / bytes + kShareMargin);
  }
  // Expect that chunks of the tag do not become smaller.
  void expect_whole(const std::string& tag) {
    if (codec_ != Codec::kNone) shares_[tag] = kWhole;
  }

 private:
  static constexpr uint64_t kWhole = 1024;      // a share is a number of 1024ths
  static constexpr uint64_t kUsualShare = 784;  // of bf16 values; less than 768 is impossible
  static constexpr uint64_t kShareMargin = 16;  // added to a known share, as other content may need more

  const Codec& codec_;                                   // of chunks in the arena; an engine's options may change it
  std::map<std::string, uint64_t, std::less<>> shares_;  // by tag
};

}  // namespace torpor
