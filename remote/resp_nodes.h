// SPDX-License-Identifier: Apache-2.0
// RespNodes: connections to the nodes of a Redis or Valkey server or cluster, and which node has a key.
//
// A connection belongs to one caller at a time, which returns it after it has read every reply; a failed connection is
// not returned. A caller that gets a MOVED reply passes it to moved(), and asks the node that it names. lost() forgets
// a node that does not answer, so that the cluster is asked again which node has its keys.
//
// Each node has a breaker of its own (remote/breaker.h): if one of many nodes is gone, only its keys are not asked for.
//
// Threads: all methods from any thread.
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
  // `clock` outlives this object; the breakers use it.
  RespNodes(RespSettings settings, std::shared_ptr<const TlsTrust> trust, const Clock& clock, BreakerOptions breaker)
      : settings_(std::move(settings)), trust_(std::move(trust)), clock_(clock), breaker_(breaker) {}

  // Return "host:port" of the node that has the key, or of a node that answers and may know it.
  std::string node_of(std::string_view key) const;
  // Return a connection that is logged in. kUnauthenticated: the server refused the login.
  Result<std::unique_ptr<RespConnection>> take(const std::string& node, Deadline until);
  void give(const std::string& node, std::unique_ptr<RespConnection> connection);
  // Note a MOVED reply of `node`, as "MOVED 3999 127.0.0.1:6381", or an ASK reply. Return the node that it names; empty
  // if it names none.
  std::string moved(std::string_view words, const std::string& node);
  void lost(const std::string& node);

  // Return whether to ask the node now. If so, the caller must call answered() or failed() afterwards.
  bool may_ask(const std::string& node);
  bool answered(const std::string& node);  // returns true if the node's breaker was open
  bool failed(const std::string& node);    // returns true if that opened the node's breaker
  bool any_answers() const;                // a node answers, or may be tried again
  // Forget which node has the key, because that node is not asked now.
  void forget(std::string_view key);

 private:
  bool answers(const std::string& node) const TORPOR_REQUIRES(mutex_);

  const RespSettings settings_;
  const std::shared_ptr<const TlsTrust> trust_;
  const Clock& clock_;
  const BreakerOptions breaker_;
  mutable Mutex mutex_;
  size_t first_ TORPOR_GUARDED_BY(mutex_) = 0;                       // index in settings_.nodes: the node to ask first
  std::map<uint16_t, std::string> slots_ TORPOR_GUARDED_BY(mutex_);  // node by cluster slot, as far as known
  std::map<std::string, std::vector<std::unique_ptr<RespConnection>>> idle_ TORPOR_GUARDED_BY(mutex_);
  std::map<std::string, std::unique_ptr<Breaker>> failing_ TORPOR_GUARDED_BY(mutex_);  // nodes whose last answer failed
};

// Return the error for a refusal of the server.
Error error_of(std::string_view words);

}  // namespace torpor::remote
