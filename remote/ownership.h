// SPDX-License-Identifier: Apache-2.0
// Ownership of what was pushed to an ObjectStore: one server at a time goes on with it. remote/ownership_steps.h has
// the protocol.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/mutex.h"
#include "remote/object_store.h"
#include "remote/ownership_steps.h"

namespace torpor::remote {

// Threads: those that ask the store from one at a time, the others from any thread meanwhile.
class Ownership {
 public:
  // `holder`: 32 random hexadecimal digits. `address`: at which it serves clients. The store and the clock outlive
  // this.
  Ownership(ObjectStore& store, const Clock& clock, std::string holder, std::chrono::milliseconds term,
            std::string address = "");

  // True: this process owns. False: another one does, or may: ask again after a while.
  Result<bool> take();
  // Goes on owning. kAborted: it does not own any more. Other errors: try again before the term is over.
  Status renew();
  // As renew(); from now on this is what the next owner wakes from.
  Status publish(const std::string& checkpoint, const std::string& answers);
  Status release();  // the next owner need not wait

  bool owns() const;
  std::string before() const;  // the holder from whom this process took over; empty: none
  OwnerRecord newest() const;  // the record that was seen last

 private:
  Result<OwnershipOutcome> run(OwnershipSteps steps);
  Result<OwnershipAnswer> ask(const OwnershipCall& call);
  OwnershipSteps steps() const;
  void keep(const OwnershipSteps& steps);

  ObjectStore& store_;
  const Clock& clock_;
  mutable Mutex mutex_;  // never held over a call of the store
  OwnershipSteps steps_ TORPOR_GUARDED_BY(mutex_);
};

// Of whoever owns, or did last; an empty one: nobody ever did.
Result<OwnerRecord> newest_owner(ObjectStore& store);

}  // namespace torpor::remote
