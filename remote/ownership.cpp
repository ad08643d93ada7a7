// SPDX-License-Identifier: Apache-2.0
#include "remote/ownership.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor::remote {

Ownership::Ownership(ObjectStore& store, const Clock& clock, std::string holder, std::chrono::milliseconds term,
                     std::string address)
    : store_(store), clock_(clock), steps_(std::move(holder), term, std::move(address)) {}

OwnershipSteps Ownership::steps() const {
  const MutexLock lock(mutex_);
  return steps_;
}
void Ownership::keep(const OwnershipSteps& steps) {
  const MutexLock lock(mutex_);
  steps_ = steps;
}

bool Ownership::owns() const {
  const MutexLock lock(mutex_);
  return steps_.owns(clock_.now());
}
std::string Ownership::before() const {
  const MutexLock lock(mutex_);
  return steps_.before();
}
OwnerRecord Ownership::newest() const {
  const MutexLock lock(mutex_);
  return steps_.head();
}

Result<bool> Ownership::take() {
  OwnershipSteps next = steps();
  next.begin_take();
  TORPOR_ASSIGN_OR_RETURN(const OwnershipOutcome outcome, run(std::move(next)));
  return outcome == OwnershipOutcome::kOwned;
}

Status Ownership::renew() {
  const OwnerRecord head = newest();
  return publish(head.checkpoint, head.answers);
}

Status Ownership::publish(const std::string& checkpoint, const std::string& answers) {
  OwnershipSteps next = steps();
  next.begin_renew(checkpoint, answers, clock_.now());
  TORPOR_ASSIGN_OR_RETURN(const OwnershipOutcome outcome, run(std::move(next)));
  if (outcome == OwnershipOutcome::kOwned) return ok();
  return Error{.code = Code::kAborted,
               .what = fmt::format("this server does not own what is in {} any more: its term was over", store_.url()),
               .next_step = "another one goes on with its requests; end this one"};
}

Status Ownership::release() {
  OwnershipSteps next = steps();
  next.begin_release(clock_.now());
  keep(next);  // it no longer owns, whatever the result of the call
  TORPOR_ASSIGN_OR_RETURN(const OwnershipOutcome outcome, run(std::move(next)));
  (void)outcome;  // released, or lost before
  return ok();
}

// Make all calls of an operation. An error of the store ends it: its outcome is unknown.
Result<OwnershipOutcome> Ownership::run(OwnershipSteps steps) {
  return try_catch([&]() -> Result<OwnershipOutcome> {
    while (steps.call()) {
      steps.sent(clock_.now());
      const Result<OwnershipAnswer> answer = ask(*steps.call());
      steps.answered(answer ? *answer : OwnershipAnswer{.failed = true}, clock_.now());
      keep(steps);
      if (!answer && steps.outcome() == OwnershipOutcome::kUnknown && !steps.call()) return answer.error();
    }
    keep(steps);
    return steps.outcome();
  });
}

Result<OwnershipAnswer> Ownership::ask(const OwnershipCall& call) {
  const std::string key = owner_key(call.record.number);
  OwnershipAnswer answer;
  switch (call.kind) {
    case OwnershipCall::Kind::kList: {
      TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store_.list(kOwnerPrefix));
      for (const std::string& each : keys) {
        if (const std::optional<uint64_t> number = owner_number(each)) answer.numbers.push_back(*number);
      }
      return answer;
    }
    case OwnershipCall::Kind::kRead: {
      const Result<std::vector<std::byte>> text = get_whole(store_, key, kMostOwnerBytes);
      if (!text && text.error().code == Code::kNotFound) return answer;
      if (!text) return text.error();
      TORPOR_ASSIGN_OR_RETURN(
          answer.record, decode_owner({reinterpret_cast<const char*>(text->data()), text->size()}, call.record.number));
      return answer;
    }
    case OwnershipCall::Kind::kPut: {
      const std::string text = encode_owner(call.record);
      TORPOR_ASSIGN_OR_RETURN(answer.created, store_.put_new(key, std::as_bytes(std::span(text))));
      return answer;
    }
    case OwnershipCall::Kind::kRemove: TORPOR_RETURN_IF_ERROR(store_.remove(key)); return answer;
  }
  return answer;
}

Result<OwnerRecord> newest_owner(ObjectStore& store) {
  constexpr int kLooks = 5;  // an owner replaces its record now and then
  for (int look = 1;; ++look) {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store.list(kOwnerPrefix));
    std::optional<uint64_t> number;
    for (const std::string& key : keys) number = std::max(number, owner_number(key));
    if (!number) return OwnerRecord{};
    const Result<std::vector<std::byte>> text = get_whole(store, owner_key(*number), kMostOwnerBytes);
    if (text) return decode_owner({reinterpret_cast<const char*>(text->data()), text->size()}, *number);
    if (text.error().code != Code::kNotFound || look == kLooks) return text.error();
  }
}

}  // namespace torpor::remote
