// SPDX-License-Identifier: Apache-2.0
// PackedShares: how much of the arena chunks of each tag take once they are packed. Before they are, nobody knows: a
// sleep is planned by the last one.
//
// Owner: RankSaver. Threads: RankMemory's lock is held at every call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "offload/chunk.h"

namespace torpor {

class PackedShares {
 public:
  explicit PackedShares(Codec codec) : codec_(codec) {}  // of chunks in the arena

  // Return how many bytes of the arena so many bytes of the tag will take.
  uint64_t held_for(std::string_view tag, uint64_t bytes) const {
    if (codec_ == Codec::kNone) return bytes;
    const auto known = shares_.find(tag);
    const uint64_t share = known == shares_.end() ? kUsualShare : known->second;
    return std::min(bytes, bytes / kWhole * share + bytes % kWhole);
  }
  bool known(std::string_view tag) const { return shares_.contains(tag); }
  // Note what these chunks took: others of the tag are likely to take as much.
  void learn(const std::string& tag, std::span<const SavedChunk> chunks) {
    uint64_t bytes = 0;
    uint64_t stored = 0;
    for (const SavedChunk& chunk : chunks) bytes += chunk.bytes, stored += chunk.stored_bytes;
    if (codec_ == Codec::kNone || bytes == 0) return;
    shares_[tag] = std::min(kWhole, stored * kWhole / bytes + kShareMargin);
  }
  // Note that nothing of the tag may get smaller.
  void expect_whole(const std::string& tag) {
    if (codec_ != Codec::kNone) shares_[tag] = kWhole;
  }

 private:
  static constexpr uint64_t kWhole = 1024;      // shares are of it
  static constexpr uint64_t kUsualShare = 784;  // of bf16 values; no less than 768 is possible
  static constexpr uint64_t kShareMargin = 16;  // by which other content may be larger

  const Codec codec_;
  std::map<std::string, uint64_t, std::less<>> shares_;  // by tag
};

}  // namespace torpor
