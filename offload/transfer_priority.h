// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace torpor {

// The order of the jobs that wait in a lane: kLoad first. Equal jobs keep the order in which they were submitted.
enum class TransferPriority : uint8_t { kLoad, kSleep, kOffload };

}  // namespace torpor
