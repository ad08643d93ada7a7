// SPDX-License-Identifier: Apache-2.0
// OwnershipSteps: the protocol of ownership as one call to the store after another, without the store, so that a
// checker can explore it.
//
// Records are written once, under numbers that rise by one. A process that writes the record after the highest one
// becomes or stays the owner; the store lets one writer win. So a renewal, a published push, a takeover and a release
// are the same conditional write. A process that was too late finds the number taken, and its push is not valid.
//
// An owner owns until its term is over, counted from before it began to write its last record. A process that wants to
// take over must have seen the same highest record for longer than that. Each process uses only differences of its own
// clock.
//
// Old records are removed, so a number can be free a second time. Therefore a process that took over checks that its
// record is the highest. A renewal need not: it counts only if it is acknowledged before the term is over.
#pragma once

#include <chrono>
#include <compare>
#include <optional>
#include <string>
#include <vector>

#include "remote/owner_record.h"

namespace torpor::remote {

struct OwnershipCall {
  enum class Kind : uint8_t { kList, kRead, kPut, kRemove };
  Kind kind = Kind::kList;
  OwnerRecord record;  // kPut: the whole record; kRead, kRemove: its number
  friend auto operator<=>(const OwnershipCall&, const OwnershipCall&) = default;
};

struct OwnershipAnswer {
  bool failed = false;                // it is unknown whether the call took effect, or will
  std::vector<uint64_t> numbers;      // kList: ascending
  std::optional<OwnerRecord> record;  // kRead; no value: no such record
  bool created = false;               // kPut
  friend auto operator<=>(const OwnershipAnswer&, const OwnershipAnswer&) = default;
};

enum class OwnershipOutcome : uint8_t {
  kOwned,     // the process owns, and the record is written
  kOthers,    // another process owns, or may
  kLost,      // another process may own from now on
  kUnknown,   // the store did not answer; try again
  kReleased,  // the next process can take over at once
};

// Not thread-safe. One operation at a time: begin one, then answer its calls until call() is empty.
class OwnershipSteps {
 public:
  using Time = std::chrono::nanoseconds;
  OwnershipSteps(std::string holder, std::chrono::milliseconds term, std::string address = "")
      : holder_(std::move(holder)), term_(term), address_(std::move(address)) {}

  void begin_take();
  // Begin to renew, and to record `checkpoint` and `answers` as the newest.
  void begin_renew(std::string checkpoint, std::string answers, Time now);
  void begin_release(Time now);

  const std::optional<OwnershipCall>& call() const { return call_; }
  void sent(Time now) { sent_ = now; }  // before the call is made
  void answered(const OwnershipAnswer& answer, Time now);
  OwnershipOutcome outcome() const { return outcome_; }  // of the last operation that ended

  bool owns(Time now) const { return owned_ && now < until_; }
  Time until() const { return until_; }
  const std::string& before() const { return before_; }  // the holder that this one succeeded; empty: none
  const OwnerRecord& head() const { return head_; }      // the highest record seen or written
  friend auto operator<=>(const OwnershipSteps&, const OwnershipSteps&) = default;

 private:
  enum class Phase : uint8_t {
    kIdle,
    kLook,
    kReadHead,
    kTake,
    kCheck,
    kRenew,
    kReadRenewed,
    kRelease,
    kReadReleased,
    kTidy
  };
  void end(OwnershipOutcome outcome);
  void ask(Phase phase, OwnershipCall::Kind kind, uint64_t number = 0);
  void put(Phase phase, OwnerRecord record);
  void put_next(Phase phase, bool free);
  void take_behind_head();
  void looked(const OwnershipAnswer& answer);
  void read_head(const OwnershipAnswer& answer, Time now);
  void checked(const OwnershipAnswer& answer, Time now);
  void renewed(Time now);
  void tidy();

  std::string holder_;
  Time term_;
  std::string address_;
  Phase phase_ = Phase::kIdle;
  std::optional<OwnershipCall> call_;
  OwnershipOutcome outcome_ = OwnershipOutcome::kOthers;
  bool owned_ = false;
  Time until_{0};
  Time sent_{0};
  uint64_t tried_ = 0;  // number of a renewal that may have taken effect …
  Time tried_at_{0};    // … and when it was first sent
  OwnerRecord head_;
  std::string before_;
  uint64_t watched_ = 0;    // number of another holder's record …
  Time watched_since_{0};   // … and since when it is the highest
  std::string checkpoint_;  // to be recorded
  std::string answers_;
  std::vector<uint64_t> old_;  // numbers to be removed
};

}  // namespace torpor::remote
