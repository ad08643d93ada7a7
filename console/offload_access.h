// SPDX-License-Identifier: Apache-2.0
// OffloadAccess: how a console uses the OffloadScheduler of a running engine, which has one thread and no locks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvcache/offload_scheduler.h"

namespace torpor::console {

class OffloadAccess {
 public:
  // Calls `work` between two of the engine's own calls. kUnavailable: the engine did not come to an end of one in time.
  // Any thread but the engine's.
  virtual Status use(const std::function<Status(OffloadScheduler&)>& work) = 0;
  // Inside of `work`: the keys of a request's full blocks, in all groups. kNotFound.
  virtual Result<std::vector<BlockKey>> keys_of(const std::string& request) = 0;

 protected:
  ~OffloadAccess() = default;
};

}  // namespace torpor::console
