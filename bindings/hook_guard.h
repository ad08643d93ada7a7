// SPDX-License-Identifier: Apache-2.0
// How another thread uses what the engine's thread has in Python: with the interpreter's lock, and between two hooks.
//
// Threads: see each function. Failure: between_hooks() returns kUnavailable.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

#include "base/status.h"

namespace torpor {

// Stands on the stack of a hook of the engine while it runs. Python code that the hook calls may release the
// interpreter's lock to other threads.
struct InHook {
  InHook() { ++running; }
  ~InHook() { --running; }
  static inline int running = 0;  // under that lock
};

// Delays garbage collection: a finalizer may need a lock that the caller of between_hooks() holds.
struct NoCollection {
  NoCollection() : was_on(PyGC_Disable() != 0) {}
  ~NoCollection() {
    if (was_on) PyGC_Enable();
  }
  const bool was_on;
};

inline Error engine_is_busy() {
  return {.code = Code::kUnavailable, .what = "the engine's scheduler is busy", .next_step = "try again"};
}

// Run `work` with the interpreter's lock while no hook runs. kUnavailable: a hook ran for two seconds. If `work` calls
// into Python, a hook may begin meanwhile: `work` must look at `running` again.
template <class Work>
Status between_hooks(const Work& work) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (std::chrono::steady_clock::now() < until) {
    {
      const pybind11::gil_scoped_acquire lock;
      if (InHook::running == 0) {
        const NoCollection garbage_waits;
        return work();
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return engine_is_busy();
}

}  // namespace torpor
