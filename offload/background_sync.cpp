// SPDX-License-Identifier: Apache-2.0
#include "offload/background_sync.h"

#include <system_error>

#include <fmt/core.h>

namespace torpor {

Result<std::unique_ptr<BackgroundSync>> BackgroundSync::start(SlotStore& store, std::chrono::milliseconds interval) {
  return try_catch([&]() -> Result<std::unique_ptr<BackgroundSync>> {
    std::unique_ptr<BackgroundSync> made(new BackgroundSync(store, interval));
    try {
      made->thread_ = std::thread([self = made.get()] { self->run(); });
    } catch (const std::system_error& error) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("no thread for syncing in the background: {}", error.what()),
                   .next_step = "allow this process more threads, or leave out `durable`"};
    }
    return made;
  });
}

BackgroundSync::~BackgroundSync() {
  if (!thread_.joinable()) return;
  {
    const MutexLock lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

// Wait for the interval, or until the end. Return true if this object ends.
bool BackgroundSync::is_over() {
  const auto end = std::chrono::steady_clock::now() + interval_;
  const MutexLock lock(mutex_);
  while (!over_) {
    const auto left = end - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) return false;
    changed_.wait_for(mutex_, left);
  }
  return true;
}

void BackgroundSync::run() {
  uint64_t safe = 0;  // StoreHealth::put_bytes before the last sync
  while (!is_over()) {
    (void)try_catch([&]() -> Status {
      const uint64_t put = store_.health().put_bytes;
      if (put == safe) return ok();
      (void)store_.sync();  // the store counts and logs its failures
      safe = put;
      return ok();
    });
  }
}

}  // namespace torpor
