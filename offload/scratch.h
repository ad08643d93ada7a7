// SPDX-License-Identifier: Apache-2.0
// ScratchPool: page-aligned memory for the stored form of one batch. A call leases a buffer, and the pool keeps it for
// the next call. The pool is a stack, so that returning a buffer allocates nothing.
//
// Threads: any thread may begin and end a lease; one lease belongs to one thread.
#pragma once

#include <memory>
#include <utility>

#include "base/mutex.h"
#include "base/page_buffer.h"

namespace torpor {

class ScratchPool {
  struct Entry {
    PageBuffer memory;
    std::unique_ptr<Entry> below;
  };

 public:
  class Lease {
   public:
    explicit Lease(ScratchPool& pool) : pool_(pool) {
      {
        const MutexLock lock(pool.mutex_);
        entry_ = std::move(pool.idle_);
        if (entry_ != nullptr) pool.idle_ = std::move(entry_->below);
      }
      if (entry_ == nullptr) entry_ = std::make_unique<Entry>();
    }
    ~Lease() {
      const MutexLock lock(pool_.mutex_);
      entry_->below = std::move(pool_.idle_);
      pool_.idle_ = std::move(entry_);
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    PageBuffer* operator->() { return &entry_->memory; }

   private:
    ScratchPool& pool_;
    std::unique_ptr<Entry> entry_;
  };

  void clear() noexcept {  // frees the buffers that are not leased
    const MutexLock lock(mutex_);
    while (idle_ != nullptr) idle_ = std::move(idle_->below);
  }

 private:
  Mutex mutex_;
  std::unique_ptr<Entry> idle_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
