// SPDX-License-Identifier: Apache-2.0
// Environment: how settings read environment variables. Tests replace it.
#pragma once

#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

namespace torpor::remote {

// Return the value of a variable; no value if it is unset or empty.
using Environment = std::function<std::optional<std::string>(const char* name)>;

// The environment of this process.
inline std::optional<std::string> environment(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

}  // namespace torpor::remote
