// SPDX-License-Identifier: Apache-2.0
// Starts of threads that fail, as under a limit of processes: this program's pthread_create() goes through here.
// Link tests/support/failing_threads.cpp and ${CMAKE_DL_LIBS}.
#pragma once

#include <cstdint>

namespace torpor::test {

// The n-th start from now (1 is the next) fails; with `sticky`, all after it too. 0: none.
void fail_thread_start(uint64_t n, bool sticky = false);
uint64_t thread_starts();  // since then, failed ones included

}  // namespace torpor::test
