// SPDX-License-Identifier: Apache-2.0
#include "remote/store_leases.h"

#include <thread>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/seal.h"

namespace torpor::remote {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kLeaseFormat = 1;
constexpr uint64_t kMostLeaseBytes = 4096;
constexpr std::string_view kPush = "push-";
constexpr std::string_view kRemoval = "removal-";
constexpr std::chrono::milliseconds kLookAgain{500};

double seconds_of(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

// Return when the record expires, in Unix seconds; no value if it is gone. An unreadable record counts: it expires at
// `now`.
Result<std::optional<double>> ends_at(ObjectStore& store, const std::string& key, double now) {
  const Result<std::vector<std::byte>> text = get_whole(store, key, kMostLeaseBytes);
  if (!text && text.error().code == Code::kNotFound) return std::optional<double>();
  if (!text) return text.error();
  const Json json = Json::parse(reinterpret_cast<const char*>(text->data()),
                                reinterpret_cast<const char*>(text->data() + text->size()), nullptr, false);
  if (!json.is_object() || !json.contains("until") || !json["until"].is_number()) return std::optional<double>(now);
  return std::optional<double>(json["until"].get<double>());
}

// Return the key of a lease that conflicts; empty if there is none. Removes expired leases.
Result<std::string> in_the_way(ObjectStore& store, LeaseKind kind, const std::string& own, const Clock& clock) {
  for (bool again = true; again;) {
    again = false;
    TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store.list(kLeasePrefix));
    for (const std::string& key : keys) {
      const bool push = std::string_view(key).substr(kLeasePrefix.size()).starts_with(kPush);
      if (key == own || (kind == LeaseKind::kPush && push)) continue;
      const double now = clock.unix_seconds();
      TORPOR_ASSIGN_OR_RETURN(const std::optional<double> until, ends_at(store, key, now));
      again = again || !until;  // it ended, or went on under another name
      if (!until) continue;
      if (now < *until + seconds_of(kClocksDiffer)) return key;
      TORPOR_RETURN_IF_ERROR(store.remove(key));
    }
  }
  return std::string();
}

}  // namespace

// Write a record with a new key. The members change only after that succeeded.
Status StoreLease::write(ObjectStore& store) {
  const bool push = kind_ == LeaseKind::kPush;
  const std::chrono::nanoseconds term = push ? kPushTerm : kRemovalTerm;
  const std::chrono::nanoseconds now = clock_->now();
  const double until = clock_->unix_seconds() + seconds_of(term);
  std::string key = fmt::format("{}{}{}", kLeasePrefix, push ? kPush : kRemoval, hex(random_seal_id()));
  const std::string text = Json{{"torpor_lease", kLeaseFormat}, {"until", until}}.dump();
  TORPOR_RETURN_IF_ERROR(store.put_new(key, std::as_bytes(std::span(text))));
  before_ = std::exchange(key_, std::move(key));
  renewed_ = now;
  until_ = now + term;
  unix_until_ = until;
  return ok();
}

Result<StoreLease> StoreLease::begin(ObjectStore& store, LeaseKind kind, const Clock& clock,
                                     std::chrono::seconds patience) {
  const std::chrono::nanoseconds waits_until = clock.now() + patience;
  while (true) {
    StoreLease lease(kind, clock);
    TORPOR_RETURN_IF_ERROR(lease.write(store));
    TORPOR_ASSIGN_OR_RETURN(const std::string other, in_the_way(store, kind, lease.key_, clock));
    if (other.empty()) return lease;
    TORPOR_RETURN_IF_ERROR(lease.end(store));
    if (clock.now() >= waits_until)
      return Error{
          .code = Code::kUnavailable,
          .what = fmt::format("{} is under way in {} ({})",
                              other.find(kPush) == std::string::npos ? "a removal" : "a push", store.url(), other),
          .next_step = "try again later; if whoever began it was killed, remove that object"};
    std::this_thread::sleep_for(kLookAgain);
  }
}

Status StoreLease::renew(ObjectStore& store) {
  TORPOR_RETURN_IF_ERROR(check());
  StoreLease next = *this;
  TORPOR_RETURN_IF_ERROR(next.write(store));
  TORPOR_RETURN_IF_ERROR(check());  // if it was written too late, a removal may have looked in between
  const std::string old = std::exchange(before_, {});
  *this = std::move(next);
  return old.empty() ? ok() : store.remove(old);
}

Status StoreLease::check() const {
  if (!over()) return ok();
  return Error{.code = Code::kAborted,
               .what = fmt::format("the lease of this push could not be renewed for {} minutes: parts may have been "
                                   "removed meanwhile",
                                   kPushTerm.count()),
               .next_step = "start it again: it goes on where it was"};
}

Status StoreLease::end(ObjectStore& store) {
  const Status removed = before_.empty() ? ok() : store.remove(before_);
  TORPOR_RETURN_IF_ERROR(store.remove(key_));
  return removed;
}

KeptLease::KeptLease(StoreLease lease, ObjectStore& store, std::chrono::milliseconds look)
    : store_(store), lease_(std::move(lease)), thread_([this, look] { run(look); }) {}

KeptLease::~KeptLease() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
  const MutexLock lock(mutex_);          // no other thread is left
  if (!left_) (void)lease_.end(store_);  // else it expires
}

Status KeptLease::check() const {
  const MutexLock lock(mutex_);
  return lease_.check();
}

void KeptLease::leave() {
  const MutexLock lock(mutex_);
  left_ = true;
}

void KeptLease::run(std::chrono::milliseconds look) {
  while (true) {
    std::optional<StoreLease> next;
    {
      const MutexLock lock(mutex_);
      if (!ends_) changed_.wait_for(mutex_, look);
      if (ends_) return;
      if (!lease_.due() || lease_.over()) continue;
      // Without memory for the copy, try again as after an error.
      (void)try_catch([&]() TORPOR_REQUIRES(mutex_) -> Status { return next = lease_, ok(); });
    }
    if (!next) continue;
    // After an error try again until the term is over; check() fails from then on.
    (void)try_catch([&]() -> Status { return next->renew(store_); });
    const MutexLock lock(mutex_);
    lease_ = std::move(*next);
  }
}

}  // namespace torpor::remote
