// SPDX-License-Identifier: Apache-2.0
// StoreLease: keeps pushes and removals in an ObjectStore apart. A push relies on parts that exist already and that no
// checkpoint may name yet.
//
// Leases are records under leases/, of a push or of a removal. Each process writes its own record first and then looks
// for the other kind, so of two that begin together at least one sees the other. A push waits until removals have
// ended; a removal is refused while a push is under way. A record expires: a process that died delays others by its
// term plus the largest difference of clocks. A push that takes longer writes another record before its own expires,
// and so on; the record before the last is removed only then, so that a concurrent list always contains one.
//
// Threads: StoreLease is not thread-safe; KeptLease is.
#pragma once

#include <chrono>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/mutex.h"
#include "remote/object_store.h"

namespace torpor::remote {

inline constexpr std::string_view kLeasePrefix = "leases/";
inline constexpr std::chrono::minutes kPushTerm{10};
inline constexpr std::chrono::minutes kRenewedAfter{3};
inline constexpr std::chrono::minutes kRemovalTerm{2};
inline constexpr std::chrono::minutes kClocksDiffer{5};  // also the longest time of a call that was begun in time
inline constexpr std::chrono::minutes kPushPatience{3};

enum class LeaseKind : uint8_t { kPush, kRemoval };

class StoreLease {
 public:
  // Begin a lease. A push waits up to `patience` for removals to end. kUnavailable: one of the other kind is under way,
  // or, for a removal, another removal. `clock` outlives the result.
  static Result<StoreLease> begin(ObjectStore& store, LeaseKind kind, const Clock& clock,
                                  std::chrono::seconds patience = std::chrono::seconds(0));
  // Extend the lease by another term from now. kAborted: it has expired. After another error it was not renewed; try
  // again.
  Status renew(ObjectStore& store);
  // kAborted: the lease has expired; parts that the push relied on may be gone.
  Status check() const;
  bool over() const { return clock_->now() >= until_ || clock_->unix_seconds() >= unix_until_; }
  bool due() const { return clock_->now() >= renewed_ + kRenewedAfter; }
  Status end(ObjectStore& store);

 private:
  StoreLease(LeaseKind kind, const Clock& clock) : kind_(kind), clock_(&clock) {}
  Status write(ObjectStore& store);
  LeaseKind kind_;
  const Clock* clock_;
  std::string key_;
  std::string before_;  // the record before it; empty: none
  std::chrono::nanoseconds renewed_{};
  std::chrono::nanoseconds until_{};
  double unix_until_ = 0;  // the same time by a clock that runs while the machine is suspended
};

// The lease of a push, renewed by a thread of its own. Threads: any. The destructor ends the lease.
class KeptLease {
 public:
  // `store` outlives this object. `look`: the interval at which the thread checks whether a renewal is due.
  KeptLease(StoreLease lease, ObjectStore& store, std::chrono::milliseconds look = std::chrono::seconds(10));
  KeptLease(const KeptLease&) = delete;
  KeptLease& operator=(const KeptLease&) = delete;
  ~KeptLease();
  Status check() const;
  // Leave the record until it expires: a call that relies on it may still take effect.
  void leave();

 private:
  void run(std::chrono::milliseconds look);
  ObjectStore& store_;
  mutable Mutex mutex_;  // not held during a call to the store
  CondVar changed_;
  StoreLease lease_ TORPOR_GUARDED_BY(mutex_);
  bool ends_ TORPOR_GUARDED_BY(mutex_) = false;
  bool left_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace torpor::remote
