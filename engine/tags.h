// SPDX-License-Identifier: Apache-2.0
// The memory tags that torpor treats specially. All other tags are the engine's own, and are saved whole.
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

// Return whether the content is useless after the step that wrote it: no sleep saves it, and it comes back zeroed.
inline bool is_scratch(std::string_view tag) { return tag == kWorkspaceTag; }

// Return whether a wake may leave the tag asleep. All other tags wake with any tag, as in vLLM: an engine without them
// can do nothing.
inline bool may_wait(std::string_view tag) { return tag == kWeightsTag || tag == kKvCacheTag; }

// Sort tags in the order in which they wake: weights first, the KV cache last, so that its memory is mapped while
// weights are copied.
inline void sort_for_wake(std::vector<std::string>& tags) {
  const auto order = [](const std::string& tag) { return tag == kWeightsTag ? 0 : tag == kKvCacheTag ? 2 : 1; };
  std::stable_sort(tags.begin(), tags.end(),
                   [&](const std::string& a, const std::string& b) { return order(a) < order(b); });
}

}  // namespace torpor
