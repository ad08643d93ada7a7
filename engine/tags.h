// SPDX-License-Identifier: Apache-2.0
// The memory tags that torpor itself tells apart. All others are the engine's own and are kept whole.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace torpor {

inline constexpr const char* kWeightsTag = "weights";
inline constexpr const char* kKvCacheTag = "kv_cache";
inline constexpr const char* kWorkspaceTag = "workspace";

inline bool has_tag(const std::vector<std::string>& tags, std::string_view tag) {
  return std::find(tags.begin(), tags.end(), tag) != tags.end();
}

// Its content is of no use after the step that wrote it: no sleep saves it, and it comes back zeroed.
inline bool is_scratch(std::string_view tag) { return tag == kWorkspaceTag; }

// A wake that names tags takes all others with it, as vLLM's does: an engine without them can do nothing.
inline bool may_wait(std::string_view tag) { return tag == kWeightsTag || tag == kKvCacheTag; }

// Weights wake first, the KV cache last: its memory comes while weights are copied.
inline void sort_for_wake(std::vector<std::string>& tags) {
  const auto order = [](const std::string& tag) { return tag == kWeightsTag ? 0 : tag == kKvCacheTag ? 2 : 1; };
  std::stable_sort(tags.begin(), tags.end(),
                   [&](const std::string& a, const std::string& b) { return order(a) < order(b); });
}

}  // namespace torpor
