// SPDX-License-Identifier: Apache-2.0
// RespStore: KV blocks on a Redis or Valkey server or cluster that engines share. This is the protocol; the rest is in
// remote/block_store.h.
//
// Every call has a deadline. Until then, transient errors are retried after a pause of random length. After a few
// failures in a row a node is not asked for a while (remote/breaker.h): calls for its keys fail at once. If no node may
// be asked, accepting() is false until it is time to try. While other nodes are still to be asked, a node may use no
// more than a quarter of the call's remaining time.
//
// Threads: all methods from any thread; each calling thread has a connection of its own to each node.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "remote/block_store.h"
#include "remote/resp_nodes.h"

namespace torpor::remote {

struct RespStoreOptions {
  std::string url;          // remote/resp_settings.h
  std::string credentials;  // a file; empty: none
  std::string authorities;  // a file of certificates that TLS trusts; empty: the system's
  int32_t rank = 0;
  int32_t slots = 0;
  uint64_t record_bytes = 0;
  std::shared_ptr<const Key> key;                         // null: digests detect accidents, not attackers
  bool encrypt = false;                                   // false: blocks with a key are authenticated only
  CompressionOptions compression{.codec = Codec::kNone};  // for put(); get() reads any codec
  std::chrono::milliseconds timeout{2000};                // for each call
  int attempts = 3;
  BreakerOptions breaker{};  // for each node
};

class RespStore final : public BlockStore {
 public:
  // Connects with the first call, not here. kInvalidArgument: invalid options. `clock` outlives the result; the
  // breakers use it.
  static Result<std::unique_ptr<RespStore>> open(const RespStoreOptions& options, const Clock& clock);

  bool accepting() const override { return nodes_.any_answers(); }

 private:
  struct NodeAsked {
    bool may = true;
    bool answered = false;
    std::optional<Error> failure{};
  };
  using NodesAsked = std::map<std::string, NodeAsked>;  // in one call

  RespStore(const RespStoreOptions& options, const RespSettings& settings, std::shared_ptr<const TlsTrust> trust,
            const Clock& clock);
  void exchange(std::span<Item> items, Verb verb) override;
  bool ask_node(const std::string& node, std::span<Item* const> items, Verb verb, Deadline until, NodesAsked& asked);
  void update_breakers(const NodesAsked& asked);
  Status talk(const std::string& node, std::span<Item* const> items, Verb verb, Deadline until);
  Status put_to(RespConnection& connection, const std::string& node, std::span<Item* const> items, Deadline until);
  Status receive(RespConnection& connection, const std::string& node, Item& item, Verb verb, Deadline until);
  Status receive_value(RespConnection& connection, Item& item, uint64_t length, Deadline until);
  void refused(Item& item, const std::string& words, const std::string& node);

  const std::chrono::milliseconds timeout_;
  const int attempts_;
  RespNodes nodes_;
};

}  // namespace torpor::remote
