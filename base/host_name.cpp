// SPDX-License-Identifier: Apache-2.0
#include "base/host_name.h"

#include <array>

#include <unistd.h>

namespace torpor {

std::string host_name() {
  std::array<char, 256> name{};  // one more than the system allows, so that it ends with a zero
  if (::gethostname(name.data(), name.size() - 1) != 0 || name.front() == '\0') return "unknown";
  return name.data();
}

}  // namespace torpor
