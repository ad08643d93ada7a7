// SPDX-License-Identifier: Apache-2.0
// The name of this machine, for messages in which ranks of several machines report to one.
#pragma once

#include <string>

namespace torpor {

std::string host_name();  // "unknown" if the system does not know it

}  // namespace torpor
