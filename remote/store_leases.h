// SPDX-License-Identifier: Apache-2.0
// Leases of an ObjectStore, by which pushes and removals keep out of each other's way: a push relies on parts that are
// there already and that no checkpoint may name yet.
//
// Records under leases/, of a push and of a removal. Each writes its own first and looks for the other kind then, so of
// two that begin at once at least one sees the other. A push waits until removals have ended, a removal is refused
// while a push is under way. A record ends by itself: who died holds nobody up for longer than its term and what clocks
// may differ by. A push that lasts longer writes another record before its own has ended, again and again; the one
// before the last goes then, so that who lists them meanwhile sees one.
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
inline constexpr std::chrono::minutes kClocksDiffer{5};  // and how long a call of the store may take that was begun
inline constexpr std::chrono::minutes kPushPatience{3};

enum class LeaseKind : uint8_t { kPush, kRemoval };

class StoreLease {
 public:
  // kUnavailable: of the other kind one is under way (and, of a removal, any other removal); a push waits for
  // `patience` first. `clock` outlives the result.
  static Result<StoreLease> begin(ObjectStore& store, LeaseKind kind, const Clock& clock,
                                  std::chrono::seconds patience = std::chrono::seconds(0));
  // Goes on for another term from now. kAborted: it is over. Another error: it was not renewed; try again.
  Status renew(ObjectStore& store);
  // kAborted: its time is over; what it relied on may be gone.
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
  std::string before_;  // the record before it; empty: there is none
  std::chrono::nanoseconds renewed_{};
  std::chrono::nanoseconds until_{};
  double unix_until_ = 0;  // the same: one of them goes on while the machine is suspended
};

// A lease of a push, renewed by a thread of its own as long as this lives. Threads: any; the destructor ends the lease.
class KeptLease {
 public:
  // `store` outlives this. `look`: how often the thread looks whether it is time.
  KeptLease(StoreLease lease, ObjectStore& store, std::chrono::milliseconds look = std::chrono::seconds(10));
  KeptLease(const KeptLease&) = delete;
  KeptLease& operator=(const KeptLease&) = delete;
  ~KeptLease();
  Status check() const;
  // Nothing ends the record but its term: of a call that relies on it nobody knows whether it takes effect.
  void leave();

 private:
  void run(std::chrono::milliseconds look);
  ObjectStore& store_;
  mutable Mutex mutex_;  // never held over a call of the store
  CondVar changed_;
  StoreLease lease_ TORPOR_GUARDED_BY(mutex_);
  bool ends_ TORPOR_GUARDED_BY(mutex_) = false;
  bool left_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace torpor::remote
