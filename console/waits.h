// SPDX-License-Identifier: Apache-2.0
// Waits: what each request of an engine waits for, in words for people.
#pragma once

#include <map>
#include <string>

#include "console/engine_view.h"

namespace torpor::console {

class Waits {
 public:
  // `view` must outlive this object and must not change meanwhile.
  explicit Waits(const EngineView& view);
  // Return what the request waits for; empty: it is served, or the reason is unknown.
  std::string of(uint32_t request) const;

 private:
  struct Request {
    uint64_t transfers = 0;  // that load for it, or look up what could be loaded
    uint64_t blocks = 0;
    int64_t oldest = 0;  // begin of the first of them
    bool held = false;
  };

  const EngineView& view_;
  // By the request's name, because schedulers of offloading have numbers of their own.
  std::map<std::string, Request, std::less<>> by_name_;
  uint64_t waiting_ = 0;  // requests that are not scheduled
  std::string engine_;    // what all wait for
};

}  // namespace torpor::console
