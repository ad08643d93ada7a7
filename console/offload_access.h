// SPDX-License-Identifier: Apache-2.0
// OffloadAccess: lets a console use the OffloadScheduler of a running engine, which has one thread and no locks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvcache/offload_scheduler.h"

namespace torpor::console {

class OffloadAccess {
 public:
  // Call `work` between two of the engine's own calls. kUnavailable: none of the engine's calls ended in time. Any
  // thread but the engine's.
  virtual Status use(const std::function<Status(OffloadScheduler&)>& work) = 0;
  // For use inside `work`: return the keys of a request's full blocks, in all groups. kNotFound.
  virtual Result<std::vector<BlockKey>> keys_of(const std::string& request) = 0;

 protected:
  ~OffloadAccess() = default;
};

}  // namespace torpor::console
