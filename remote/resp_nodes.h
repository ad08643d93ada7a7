// RespNodes: connections to the nodes of a Redis or Valkey server or cluster, and which node has a key.
//
// A connection is lent to one caller at a time and comes back when every reply was taken; one that failed does not. Who
// is told MOVED says so with moved(), and asks there; a node that does not answer is forgotten with lost(), so that the
// cluster is asked anew who has its keys.
//
// Threads: all methods from any.
#pragma once

#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "remote/resp_connection.h"
#include "remote/resp_settings.h"

namespace torpor::remote {

class RespNodes {
 public:
  RespNodes(RespSettings settings, std::shared_ptr<const TlsTrust> trust)
      : settings_(std::move(settings)), trust_(std::move(trust)) {}

  std::string node_of(std::string_view key) const;  // "host:port"
  // Logged in. kUnauthenticated: refused.
  Result<std::unique_ptr<RespConnection>> take(const std::string& node, Deadline until);
  void give(const std::string& node, std::unique_ptr<RespConnection> connection);
  // `words`: "MOVED 3999 127.0.0.1:6381", as `node` said it; or ASK. The node that it names; empty: it names none.
  std::string moved(std::string_view words, const std::string& node);
  void lost(const std::string& node);

 private:
  const RespSettings settings_;
  const std::shared_ptr<const TlsTrust> trust_;
  mutable Mutex mutex_;
  size_t first_ TORPOR_GUARDED_BY(mutex_) = 0;                       // of the settings' nodes: who is asked at first
  std::map<uint16_t, std::string> slots_ TORPOR_GUARDED_BY(mutex_);  // nodes that were named
  std::map<std::string, std::vector<std::unique_ptr<RespConnection>>> idle_ TORPOR_GUARDED_BY(mutex_);
};

// What a server says where it refuses something.
Error error_of(std::string_view words);

}  // namespace torpor::remote
