// Leases of an ObjectStore, by which pushes and removals keep out of each other's way: a push relies on parts that are
// there already and that no checkpoint may name yet.
//
// Records under leases/, of a push and of a removal. Each writes its own first and looks for the other kind then, so of
// two that begin at once at least one sees the other. A push waits until removals have ended, a removal is refused
// while a push is under way. A record ends by itself: who died holds nobody up for longer than its term and what clocks
// may differ by.
#pragma once

#include <chrono>
#include <string>

#include "base/clock.h"
#include "remote/object_store.h"

namespace torpor::remote {

inline constexpr std::string_view kLeasePrefix = "leases/";
inline constexpr std::chrono::hours kPushTerm{6};
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
  // kAborted: its time is over; what it relied on may be gone.
  Status check() const;
  bool over() const { return clock_->now() >= until_; }
  Status end(ObjectStore& store);

 private:
  StoreLease(std::string key, std::chrono::nanoseconds until, const Clock& clock)
      : key_(std::move(key)), until_(until), clock_(&clock) {}
  std::string key_;
  std::chrono::nanoseconds until_;
  const Clock* clock_;
};

}  // namespace torpor::remote
