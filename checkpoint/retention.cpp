#include "checkpoint/retention.h"

#include <algorithm>
#include <set>

namespace torpor {

std::vector<uint64_t> retired(const std::vector<CheckpointInfo>& checkpoints, const Retention& retention,
                              double now_unix_seconds) {
  // One that cannot be read may need any other; and it may be of use to `repair`.
  if (std::any_of(checkpoints.begin(), checkpoints.end(), [](const CheckpointInfo& info) { return !info.readable; }))
    return {};
  const auto woken =
      std::find_if(checkpoints.rbegin(), checkpoints.rend(), [](const CheckpointInfo& info) { return info.woken; });
  std::set<uint64_t> kept;
  uint64_t kept_bytes = 0;
  for (auto info = checkpoints.rbegin(); info != checkpoints.rend(); ++info) {
    const auto place = info - checkpoints.rbegin();
    const bool last_good = place == 0 || info == woken || (place == 1 && !checkpoints.back().woken);
    const bool wanted = place < std::max(retention.keep, 1) &&
                        !(retention.max_age_seconds &&
                          now_unix_seconds - info->manifest.created_unix_seconds > *retention.max_age_seconds) &&
                        !(retention.max_total_bytes && kept_bytes + info->bytes > *retention.max_total_bytes);
    if (!last_good && !wanted && !kept.contains(info->manifest.generation)) continue;
    kept.insert(info->manifest.generation);
    kept.insert(info->needs.begin(), info->needs.end());
    kept_bytes += info->bytes;
  }
  std::vector<uint64_t> gone;
  for (const CheckpointInfo& info : checkpoints) {
    if (!kept.contains(info.manifest.generation)) gone.push_back(info.manifest.generation);
  }
  return gone;
}

}  // namespace torpor
