// SPDX-License-Identifier: Apache-2.0
// FrontAccess: the calls of a console that only an engine's front end can carry out: plan, sleep, wake, checkpoint.
#pragma once

#include <memory>
#include <optional>

#include <nlohmann/json.hpp>

#include "base/mutex.h"
#include "base/status.h"
#include "console/control_methods.h"

namespace torpor::console {

// A call that was begun. Threads: any.
class FrontCall {
 public:
  FrontCall(uint8_t of, uint32_t whose, int32_t process) : method(of), uid(whose), pid(process) {}
  // Set the result; all but the first call are ignored.
  void end(Result<nlohmann::ordered_json> result) {
    const MutexLock lock(mutex_);
    if (!result_) result_ = std::move(result);
  }
  // Return the result; null: the call is under way. A result never changes.
  const Result<nlohmann::ordered_json>* result() const {
    const MutexLock lock(mutex_);
    return result_ ? &*result_ : nullptr;
  }
  const uint8_t method;  // index in the table
  const uint32_t uid;    // the calling user
  const int32_t pid;

 private:
  mutable Mutex mutex_;
  std::optional<Result<nlohmann::ordered_json>> result_ TORPOR_GUARDED_BY(mutex_);
};

class FrontAccess {
 public:
  // Begin a call and return at once. It calls call->end() on any thread, perhaps before this returns. `params` fit the
  // method's table.
  virtual void begin(const ControlMethod& method, const nlohmann::json& params,
                     const std::shared_ptr<FrontCall>& call) = 0;

 protected:
  ~FrontAccess() = default;
};

}  // namespace torpor::console
