// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace torpor {

// Which of the jobs that wait in a lane goes first; equal ones in the order in which they came.
enum class TransferPriority : uint8_t { kLoad, kSleep, kOffload };

}  // namespace torpor
