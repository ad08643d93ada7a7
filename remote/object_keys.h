// SPDX-License-Identifier: Apache-2.0
// Valid keys of an ObjectStore: they contain nothing that a store, a URL or a file system interprets or rewrites.
#pragma once

#include <algorithm>
#include <string_view>

namespace torpor::remote {

// Return whether `text` is a key: words of [A-Za-z0-9._-] with '/' between them, none of them "." or "..", at most 900
// bytes.
inline bool is_key(std::string_view text) {
  if (text.empty() || text.size() > 900) return false;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find('/', begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    if (word.empty() || word == "." || word == "..") return false;
    for (const char letter : word) {
      const bool plain = (letter >= 'A' && letter <= 'Z') || (letter >= 'a' && letter <= 'z') ||
                         (letter >= '0' && letter <= '9') || letter == '.' || letter == '_' || letter == '-';
      if (!plain) return false;
    }
    begin = end + 1;
  }
  return true;
}

}  // namespace torpor::remote
