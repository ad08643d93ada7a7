// SPDX-License-Identifier: Apache-2.0
// Makes starts of threads fail, as a limit of processes does: this program's pthread_create() goes through here. Link
// tests/support/failing_threads.cpp and ${CMAKE_DL_LIBS}.
#pragma once

#include <cstdint>

namespace torpor::test {

// The n-th start from now (1 is the next) fails; with `sticky`, all later ones too. 0: none fails.
void fail_thread_start(uint64_t n, bool sticky = false);
uint64_t thread_starts();  // since the last fail_thread_start(), failed ones included

}  // namespace torpor::test
