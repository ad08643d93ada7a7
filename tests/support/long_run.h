// SPDX-License-Identifier: Apache-2.0
// long_run(): whether tests run their long versions, as in `tools/dev proof` (TORPOR_PROOF=long).
#pragma once

#include <cstdlib>
#include <string_view>

namespace torpor::test {

inline bool long_run() {
  const char* wanted = std::getenv("TORPOR_PROOF");
  return wanted != nullptr && std::string_view(wanted) == "long";
}

}  // namespace torpor::test
