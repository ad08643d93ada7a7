// SPDX-License-Identifier: Apache-2.0
// FrontAccess: what only an engine's front end can do for a console: plan, sleep, wake, checkpoint.
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
  // The first end is the end.
  void end(Result<nlohmann::ordered_json> result) {
    const MutexLock lock(mutex_);
    if (!result_) result_ = std::move(result);
  }
  // Null: it is under way. What it points to does not change any more.
  const Result<nlohmann::ordered_json>* result() const {
    const MutexLock lock(mutex_);
    return result_ ? &*result_ : nullptr;
  }
  const uint8_t method;  // in the table
  const uint32_t uid;    // whose it is
  const int32_t pid;

 private:
  mutable Mutex mutex_;
  std::optional<Result<nlohmann::ordered_json>> result_ TORPOR_GUARDED_BY(mutex_);
};

class FrontAccess {
 public:
  // Returns at once; the call ends in any thread, perhaps before that. Its parameters fit the method's table.
  virtual void begin(const ControlMethod& method, const nlohmann::json& params,
                     const std::shared_ptr<FrontCall>& call) = 0;

 protected:
  ~FrontAccess() = default;
};

}  // namespace torpor::console
