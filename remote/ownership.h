// SPDX-License-Identifier: Apache-2.0
// Ownership of what was pushed to an ObjectStore: at most one server at a time wakes from it and goes on.
// remote/ownership_steps.h has the protocol.
//
// Threads: take(), renew(), publish() and release() from one thread at a time; the others from any thread meanwhile.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/mutex.h"
#include "remote/object_store.h"
#include "remote/ownership_steps.h"

namespace torpor::remote {

class Ownership {
 public:
  // `holder`: 32 random hexadecimal digits. `address`: where this server serves clients. `store` and `clock` outlive
  // this object.
  Ownership(ObjectStore& store, const Clock& clock, std::string holder, std::chrono::milliseconds term,
            std::string address = "");

  // Try to take ownership. Return true if this process owns now; false if another one does, or may: try again after a
  // while.
  Result<bool> take();
  // Renew the ownership. kAborted: this process no longer owns. After another error try again before the term is over.
  Status renew();
  // Renew, and record the checkpoint and the response log from which the next owner wakes.
  Status publish(const std::string& checkpoint, const std::string& answers);
  Status release();  // the next owner need not wait

  bool owns() const;
  std::string before() const;  // the holder that this process succeeded; empty: none
  OwnerRecord newest() const;  // the newest record seen

 private:
  Result<OwnershipOutcome> run(OwnershipSteps steps);
  Result<OwnershipAnswer> ask(const OwnershipCall& call);
  OwnershipSteps steps() const;
  void keep(const OwnershipSteps& steps);

  ObjectStore& store_;
  const Clock& clock_;
  mutable Mutex mutex_;  // not held during a call to the store
  OwnershipSteps steps_ TORPOR_GUARDED_BY(mutex_);
};

// Return the record of the current or last owner; an empty record if there never was one.
Result<OwnerRecord> newest_owner(ObjectStore& store);

}  // namespace torpor::remote
