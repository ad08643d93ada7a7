#include "checkpoint/retention.h"

#include <algorithm>
#include <set>

#include "checkpoint/format_v2_files.h"

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
                              double now_unix_seconds) {
  // The last good one may be another than it seems; and one of version 2 may need any other.
  if (std::any_of(checkpoints.begin(), checkpoints.end(), [](const CheckpointInfo& info) { return !info.readable; }))
    return {};
  const auto woken =
      std::find_if(checkpoints.rbegin(), checkpoints.rend(), [](const CheckpointInfo& info) { return info.woken; });
  std::set<uint64_t> kept;
  DiskUsage usage;
  for (auto info = checkpoints.rbegin(); info != checkpoints.rend(); ++info) {
    const auto place = info - checkpoints.rbegin();
    const bool last_good = place == 0 || info == woken || (place == 1 && !checkpoints.back().woken);
    const bool wanted =
        place < std::max(retention.keep, 1) &&
        !(retention.max_age_seconds &&
          now_unix_seconds - info->manifest.created_unix_seconds > *retention.max_age_seconds) &&
        !(retention.max_total_bytes && usage.with(info->manifest, info->bytes) > *retention.max_total_bytes);
    if (!last_good && !wanted && !kept.contains(info->manifest.generation)) continue;
    kept.insert(info->manifest.generation);
    const std::vector<uint64_t> needs = format_v2::needs(info->manifest);
    kept.insert(needs.begin(), needs.end());
    usage.add(info->manifest, info->bytes);
  }
  std::vector<uint64_t> gone;
  for (const CheckpointInfo& info : checkpoints) {
    if (!kept.contains(info.manifest.generation)) gone.push_back(info.manifest.generation);
  }
  return gone;
}

}  // namespace torpor
