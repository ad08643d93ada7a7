// SPDX-License-Identifier: Apache-2.0
// BackgroundSync: a thread that makes a store's records durable at an interval, so that a later sync() has little left
// to do. The store drops and counts the records that it cannot make durable (SlotStore::sync).
//
// Threads: one thread constructs and destroys it. Its own thread calls the store's sync().
#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "offload/slot_store.h"

namespace torpor {

class BackgroundSync {
 public:
  // Start a thread that calls `store.sync()` every `interval` if bytes were put since the last call. `store` outlives
  // the result. kResourceExhausted if the system has no thread for it.
  static Result<std::unique_ptr<BackgroundSync>> start(SlotStore& store, std::chrono::milliseconds interval);
  ~BackgroundSync();  // waits for a sync that is running
  BackgroundSync(const BackgroundSync&) = delete;
  BackgroundSync& operator=(const BackgroundSync&) = delete;

 private:
  BackgroundSync(SlotStore& store, std::chrono::milliseconds interval) : store_(store), interval_(interval) {}
  void run();
  bool is_over();

  SlotStore& store_;
  const std::chrono::milliseconds interval_;
  Mutex mutex_;
  CondVar changed_;
  bool over_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace torpor
