// The memory tags that torpor itself tells apart. All others are the engine's own and are kept whole.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace torpor {

inline constexpr const char* kWeightsTag = "weights";
inline constexpr const char* kKvCacheTag = "kv_cache";

inline bool has_tag(const std::vector<std::string>& tags, std::string_view tag) {
  return std::find(tags.begin(), tags.end(), tag) != tags.end();
}

}  // namespace torpor
