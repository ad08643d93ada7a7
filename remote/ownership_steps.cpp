// SPDX-License-Identifier: Apache-2.0
#include "remote/ownership_steps.h"

namespace torpor::remote {

using Kind = OwnershipCall::Kind;

void OwnershipSteps::end(OwnershipOutcome outcome) {
  phase_ = Phase::kIdle;
  call_.reset();
  outcome_ = outcome;
  if (outcome == OwnershipOutcome::kLost) owned_ = false;
}

void OwnershipSteps::ask(Phase phase, Kind kind, uint64_t number) {
  phase_ = phase;
  call_ = OwnershipCall{.kind = kind, .record = {.number = number}};
}

void OwnershipSteps::put(Phase phase, OwnerRecord record) {
  phase_ = phase;
  call_ = OwnershipCall{.kind = Kind::kPut, .record = std::move(record)};
}

void OwnershipSteps::put_next(Phase phase, bool free) {
  put(phase, {.number = head_.number + 1,
              .term = head_.term,
              .holder = holder_,
              .milliseconds = head_.milliseconds,
              .free = free,
              .checkpoint = checkpoint_,
              .answers = answers_,
              .address = address_});
}

void OwnershipSteps::begin_take() {
  if (owned_) owned_ = false;  // its term was over, or the caller ignores it
  ask(Phase::kLook, Kind::kList);
}

void OwnershipSteps::begin_renew(std::string checkpoint, std::string answers, Time now) {
  if (!owns(now)) return end(OwnershipOutcome::kLost);
  checkpoint_ = std::move(checkpoint);
  answers_ = std::move(answers);
  put_next(Phase::kRenew, false);
}

void OwnershipSteps::begin_release(Time now) {
  if (!owns(now)) return end(OwnershipOutcome::kLost);
  owned_ = false;
  checkpoint_ = head_.checkpoint;
  answers_ = head_.answers;
  put_next(Phase::kRelease, true);
}

void OwnershipSteps::take_behind_head() {
  if (head_.holder != holder_) before_ = head_.holder;
  OwnerRecord record = head_;
  record.number += 1;
  record.term += 1;
  record.holder = holder_;
  record.milliseconds = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(term_).count());
  record.free = false;
  record.address = address_;
  put(Phase::kTake, std::move(record));
}

void OwnershipSteps::looked(const OwnershipAnswer& answer) {
  old_ = answer.numbers;
  if (!old_.empty()) return ask(Phase::kReadHead, Kind::kRead, old_.back());
  head_ = {};
  take_behind_head();
}

void OwnershipSteps::read_head(const OwnershipAnswer& answer, Time now) {
  if (!answer.record) return end(OwnershipOutcome::kOthers);  // a newer record replaced it meanwhile
  head_ = *answer.record;
  if (head_.free || head_.holder == holder_) return take_behind_head();
  if (watched_ != head_.number) {
    watched_ = head_.number;
    watched_since_ = now;
    return end(OwnershipOutcome::kOthers);
  }
  const std::chrono::milliseconds term{head_.milliseconds};
  if (now - watched_since_ < term + term / 4) return end(OwnershipOutcome::kOthers);  // clocks do not run alike
  take_behind_head();
}

void OwnershipSteps::checked(const OwnershipAnswer& answer, Time now) {
  const uint64_t mine = head_.number;
  if (answer.numbers.empty() || answer.numbers.back() != mine || now >= until_) {
    old_.clear();
    if (!answer.numbers.empty() && answer.numbers.back() > mine) old_ = {mine};  // the number was free a second time
    outcome_ = OwnershipOutcome::kOthers;
    return tidy();
  }
  owned_ = true;
  tried_ = 0;
  old_ = answer.numbers;
  old_.pop_back();
  outcome_ = OwnershipOutcome::kOwned;
  tidy();
}

void OwnershipSteps::renewed(Time now) {
  if (now >= until_) return end(OwnershipOutcome::kLost);
  until_ = tried_at_ + term_;
  tried_ = 0;
  if (head_.checkpoint != checkpoint_ || head_.answers != answers_) return put_next(Phase::kRenew, false);
  old_ = {head_.number - 1};
  outcome_ = OwnershipOutcome::kOwned;
  tidy();
}

// Remove the next old record. A record whose removal fails stays until a takeover.
void OwnershipSteps::tidy() {
  if (old_.empty()) return end(outcome_);
  const uint64_t number = old_.back();
  old_.pop_back();
  ask(Phase::kTidy, Kind::kRemove, number);
}

void OwnershipSteps::answered(const OwnershipAnswer& answer, Time now) {
  if (phase_ == Phase::kTidy) return tidy();
  const OwnerRecord record = call_->record;
  if (phase_ == Phase::kRenew && tried_ != record.number) {
    tried_ = record.number;
    tried_at_ = sent_;
  }
  if (answer.failed) return end(OwnershipOutcome::kUnknown);
  const bool mine = answer.record && answer.record->holder == holder_;
  switch (phase_) {
    case Phase::kLook: return looked(answer);
    case Phase::kReadHead: return read_head(answer, now);
    case Phase::kTake:
      if (!answer.created) return end(OwnershipOutcome::kOthers);
      head_ = record;
      until_ = sent_ + term_;
      return ask(Phase::kCheck, Kind::kList);
    case Phase::kCheck: return checked(answer, now);
    case Phase::kRenew:
      if (!answer.created) return ask(Phase::kReadRenewed, Kind::kRead, record.number);
      head_ = record;
      return renewed(now);
    case Phase::kReadRenewed:
      if (!mine) return end(OwnershipOutcome::kLost);
      head_ = *answer.record;
      return renewed(now);
    case Phase::kRelease:
      if (!answer.created) return ask(Phase::kReadReleased, Kind::kRead, record.number);
      return end(OwnershipOutcome::kReleased);
    case Phase::kReadReleased:
      if (!mine) return end(OwnershipOutcome::kLost);
      if (answer.record->free) return end(OwnershipOutcome::kReleased);
      head_ = *answer.record;  // an unanswered renewal took effect
      checkpoint_ = head_.checkpoint;
      answers_ = head_.answers;
      return put_next(Phase::kRelease, true);
    case Phase::kIdle:
    case Phase::kTidy: return;
  }
}

}  // namespace torpor::remote
