// SPDX-License-Identifier: Apache-2.0
#include "tests/support/failing_threads.h"

#include <atomic>
#include <cerrno>

#include <dlfcn.h>
#include <pthread.h>

namespace torpor::test {
namespace {

std::atomic<uint64_t> starts = 0;
std::atomic<uint64_t> fail_at = 0;
std::atomic<bool> fail_after = false;

}  // namespace

void fail_thread_start(uint64_t n, bool sticky) { starts = 0, fail_at = n, fail_after = sticky; }
uint64_t thread_starts() { return starts; }

}  // namespace torpor::test

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) {
  using namespace torpor::test;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(::dlsym(RTLD_NEXT, "pthread_create"));
  const uint64_t start = ++starts;
  const uint64_t at = fail_at;
  if (at != 0 && (start == at || (fail_after && start > at))) return EAGAIN;
  return real(thread, attributes, run, argument);
}
