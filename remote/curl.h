// SPDX-License-Identifier: Apache-2.0
// Starts libcurl. Threads: any.
#pragma once

#include "base/status.h"

namespace torpor::remote {

// Start libcurl, once in a process. kUnsupported: the portable module or inspector does not find it on this machine
// (bindings/portable_system.cpp).
Status begin_curl();

}  // namespace torpor::remote
