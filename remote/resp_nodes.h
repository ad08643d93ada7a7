// SPDX-License-Identifier: Apache-2.0
// RespNodes: connections to the nodes of a Redis or Valkey server or cluster, and which node has a key.
//
// A connection is lent to one caller at a time and comes back when every reply was taken; one that failed does not. Who
// is told MOVED says so with moved(), and asks there; a node that does not answer is forgotten with lost(), so that the
// cluster is asked anew who has its keys.
//
// Each node has a breaker of its own (remote/breaker.h): where one of many is gone, only what it has is not asked for.
//
// Threads: all methods from any.
#pragma once

#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "remote/breaker.h"
#include "remote/resp_connection.h"
#include "remote/resp_settings.h"

namespace torpor::remote {

class RespNodes {
 public:
  // `clock`, the breakers', outlives it.
  RespNodes(RespSettings settings, std::shared_ptr<const TlsTrust> trust, const Clock& clock, BreakerOptions breaker)
      : settings_(std::move(settings)), trust_(std::move(trust)), clock_(clock), breaker_(breaker) {}

  // "host:port" of the node that has the key, or of one that answers and may know which has it.
  std::string node_of(std::string_view key) const;
  // Logged in. kUnauthenticated: refused.
  Result<std::unique_ptr<RespConnection>> take(const std::string& node, Deadline until);
  void give(const std::string& node, std::unique_ptr<RespConnection> connection);
  // `words`: "MOVED 3999 127.0.0.1:6381", as `node` said it; or ASK. The node that it names; empty: it names none.
  std::string moved(std::string_view words, const std::string& node);
  void lost(const std::string& node);

  // Whether to ask the node now; who may says with answered() or failed() how it ended.
  bool may_ask(const std::string& node);
  bool answered(const std::string& node);  // whether it had not, for a while
  bool failed(const std::string& node);    // whether it is not asked for a while from now on
  bool any_answers() const;                // or is due to be tried
  // Which node has the key is asked again: the one that was said to have it is not asked now.
  void forget(std::string_view key);

 private:
  bool answers(const std::string& node) const TORPOR_REQUIRES(mutex_);

  const RespSettings settings_;
  const std::shared_ptr<const TlsTrust> trust_;
  const Clock& clock_;
  const BreakerOptions breaker_;
  mutable Mutex mutex_;
  size_t first_ TORPOR_GUARDED_BY(mutex_) = 0;                       // of the settings' nodes: who is asked at first
  std::map<uint16_t, std::string> slots_ TORPOR_GUARDED_BY(mutex_);  // nodes that were named
  std::map<std::string, std::vector<std::unique_ptr<RespConnection>>> idle_ TORPOR_GUARDED_BY(mutex_);
  std::map<std::string, std::unique_ptr<Breaker>> failing_ TORPOR_GUARDED_BY(mutex_);  // who answered last has none
};

// What a server says where it refuses something.
Error error_of(std::string_view words);

}  // namespace torpor::remote
