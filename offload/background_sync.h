// SPDX-License-Identifier: Apache-2.0
// BackgroundSync: makes safe what was put into a store while it is used, every so often, on a thread of its own, so
// that little is left for whoever must wait for it. What cannot be made safe the store drops and counts
// (SlotStore::sync).
//
// Threads: the constructor's and the destructor's; the store's sync() is called from the thread in here.
#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "offload/slot_store.h"

namespace torpor {

class BackgroundSync {
 public:
  // `store` outlives it. kResourceExhausted: there is no thread to be had.
  static Result<std::unique_ptr<BackgroundSync>> start(SlotStore& store, std::chrono::milliseconds interval);
  ~BackgroundSync();  // a sync under way ends first
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
