// SPDX-License-Identifier: Apache-2.0
// The protocol of ownership, one call of the store after the other, without the store: what a checker can explore.
//
// Records are written once, under numbers that go up by one. Who writes the record behind the highest one goes on; the
// store lets one win. So a renewal, a push that is made known, a takeover and a release are all the same conditional
// write, and whoever was too late finds the number taken: its push is not the one that counts.
//
// An owner owns until its term is over, counted from before it began to write its last record. Who wants to take over
// must have seen the same highest record for longer than that. Only differences of one's own clock are used.
//
// Old records are removed, so a number may be free again that once was taken. Therefore who took over looks whether
// its record is the highest. A renewal need not: it counts only if it is acknowledged before the term is over.
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
  OwnerRecord record;  // kPut: the whole; kRead and kRemove: its number
  friend auto operator<=>(const OwnershipCall&, const OwnershipCall&) = default;
};

struct OwnershipAnswer {
  bool failed = false;                // nobody knows whether it took effect, or will
  std::vector<uint64_t> numbers;      // of kList, ascending
  std::optional<OwnerRecord> record;  // of kRead; none: there is no such record
  bool created = false;               // of kPut
  friend auto operator<=>(const OwnershipAnswer&, const OwnershipAnswer&) = default;
};

enum class OwnershipOutcome : uint8_t {
  kOwned,     // what was wanted is recorded
  kOthers,    // somebody else owns, or may
  kLost,      // somebody else may own from now on
  kUnknown,   // the store did not answer; try again
  kReleased,  // the next one can take over at once
};

// A value: not thread-safe. One operation at a time: begin one, then answer its calls until there is none.
class OwnershipSteps {
 public:
  using Time = std::chrono::nanoseconds;
  OwnershipSteps(std::string holder, std::chrono::milliseconds term, std::string address = "")
      : holder_(std::move(holder)), term_(term), address_(std::move(address)) {}

  void begin_take();
  // Also makes `checkpoint` and `answers` known as the newest.
  void begin_renew(std::string checkpoint, std::string answers, Time now);
  void begin_release(Time now);

  const std::optional<OwnershipCall>& call() const { return call_; }
  void sent(Time now) { sent_ = now; }  // the call is about to be made
  void answered(const OwnershipAnswer& answer, Time now);
  OwnershipOutcome outcome() const { return outcome_; }  // of the last operation that ended

  bool owns(Time now) const { return owned_ && now < until_; }
  Time until() const { return until_; }
  const std::string& before() const { return before_; }  // the holder from whom this one took over; empty: none
  const OwnerRecord& head() const { return head_; }      // the highest record that was seen or written
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
  uint64_t watched_ = 0;  // number of the record of another holder …
  Time watched_since_{0};
  std::string checkpoint_;  // to be recorded
  std::string answers_;
  std::vector<uint64_t> old_;  // numbers to be removed
};

}  // namespace torpor::remote
