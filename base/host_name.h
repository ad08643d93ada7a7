// SPDX-License-Identifier: Apache-2.0
// The name of this machine, for messages that ranks on several of them send to one.
#pragma once

#include <string>

namespace torpor {

std::string host_name();  // "unknown" where the system does not say

}  // namespace torpor
