// SPDX-License-Identifier: Apache-2.0
// Waits: what each request of an engine waits for, in words for people.
#pragma once

#include <map>
#include <string>

#include "console/engine_view.h"

namespace torpor::console {

class Waits {
 public:
  // Of a view that outlives it and is not changed meanwhile.
  explicit Waits(const EngineView& view);
  // Empty: it is served, or nothing is known of why it is not.
  std::string of(uint32_t request) const;

 private:
  struct Request {
    uint64_t transfers = 0;  // that load for it, or ask for what could be loaded
    uint64_t blocks = 0;
    int64_t oldest = 0;  // when the first of them began
    bool held = false;
  };

  const EngineView& view_;
  std::map<std::string, Request, std::less<>> by_name_;  // schedulers of offloading have numbers of their own
  uint64_t waiting_ = 0;                                 // requests that are not scheduled
  std::string engine_;                                   // what all wait for
};

}  // namespace torpor::console
