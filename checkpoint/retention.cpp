// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/retention.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

namespace torpor {

uint64_t DiskUsage::with(const Manifest& manifest, uint64_t own_bytes) const {
  uint64_t bytes = bytes_ + own_bytes;
  for (const RankSummary& rank : manifest.ranks) {
    for (const LinkedFile& file : rank.files) {
      const bool own = file.id == manifest.id;  // it is part of own_bytes
      const bool first = !counted_.contains({rank.rank, file.id});
      if (own && !first) bytes -= file.bytes;
      if (!own && first) bytes += file.bytes;
    }
  }
  return bytes;
}

void DiskUsage::add(const Manifest& manifest, uint64_t own_bytes) {
  bytes_ = with(manifest, own_bytes);
  for (const RankSummary& rank : manifest.ranks) {
    for (const LinkedFile& file : rank.files) counted_.emplace(rank.rank, file.id);
  }
}

std::vector<uint64_t> retired(const std::vector<CheckpointInfo>& checkpoints, const Retention& retention,
                              double now_unix_seconds, const std::optional<Digest>& owner) {
  struct OfOwner {
    const CheckpointInfo* newest = nullptr;
    const CheckpointInfo* woken = nullptr;  // the newest that was woken from
    int place = 0;                          // index of the next checkpoint, the newest is 0
    DiskUsage usage{};                      // of the checkpoints that are kept
  };
  std::map<std::array<uint8_t, 16>, OfOwner> owners;
  for (const CheckpointInfo& info : checkpoints) {
    if (!info.readable) continue;
    OfOwner& own = owners[info.manifest.owner.bytes];
    own.newest = &info;
    if (info.woken) own.woken = &info;
  }
  std::set<uint64_t> kept;
  for (auto info = checkpoints.rbegin(); info != checkpoints.rend(); ++info) {
    if (!info->readable) continue;
    OfOwner& own = owners[info->manifest.owner.bytes];
    const int place = own.place++;
    const bool others = owner && info->manifest.owner != *owner;
    const bool last_good = place == 0 || &*info == own.woken || (place == 1 && !own.newest->woken);
    const bool wanted =
        place < std::max(retention.keep, 1) &&
        !(retention.max_age_seconds &&
          now_unix_seconds - info->manifest.created_unix_seconds > *retention.max_age_seconds) &&
        !(retention.max_total_bytes && own.usage.with(info->manifest, info->bytes) > *retention.max_total_bytes);
    if (!others && !last_good && !wanted) continue;
    kept.insert(info->generation);
    own.usage.add(info->manifest, info->bytes);
  }
  std::vector<uint64_t> gone;
  for (const CheckpointInfo& info : checkpoints) {
    if (info.readable && !kept.contains(info.generation)) gone.push_back(info.generation);
  }
  return gone;
}

}  // namespace torpor
