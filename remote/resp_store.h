// RespStore: KV blocks on a Redis or Valkey server or cluster that engines share: what one computed, another finds.
//
// A block is a value of its own, under a key that names its key space, rank, group and hash (remote/block_frame.h):
// engines with other weights, layouts or ranks never meet. Blocks are created, never changed; the server forgets what
// it has no room for. What comes back is compared with what it should be, and with its digest, whoever wrote it; what
// is damaged is removed there.
//
// Slots mean nothing to it: it knows those that were put here, for get() without a key and for drop(). get() with a key
// (of a space that is not 0) asks for the key's block.
//
// Every call has a deadline. In it, what passes is tried again after a pause of random length. After a few failures in
// a row a node is not asked for a while (remote/breaker.h): calls for what it has fail at once. Where no node is asked,
// accepting() is false until it is time to try. While others wait to be asked, a node may take no more than a quarter
// of what is left of the call's time. A server without room gets nothing for a second.
//
// Threads: all methods from any; each thread that calls has a connection of its own to each node.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/seal.h"
#include "offload/store.h"
#include "remote/block_frame.h"
#include "remote/resp_nodes.h"

namespace torpor::remote {

struct RespStoreOptions {
  std::string url;          // remote/resp_settings.h
  std::string credentials;  // a file; empty: none
  std::string authorities;  // certificates that TLS trusts; empty: the system's
  int32_t rank = 0;
  int32_t slots = 0;
  uint64_t record_bytes = 0;
  std::shared_ptr<const Key> key;           // null: digests find accidents, they stop no attacker
  bool encrypt = false;                     // else blocks with a key are authenticated
  std::chrono::milliseconds timeout{2000};  // of a call
  int attempts = 3;
  BreakerOptions breaker{};  // of each node
};

class RespStore final : public Store {
 public:
  // Asks nothing yet. kInvalidArgument. `clock` outlives it; it is the breakers'.
  static Result<std::unique_ptr<RespStore>> open(RespStoreOptions options, const Clock& clock);

  const StoreTraits& traits() const override { return traits_; }
  void open_space(uint32_t space, const Digest& digest) override;
  bool accepting() const override { return nodes_.any_answers(); }
  void drop(std::span<const SlotRange> ranges) override;
  Status sync() override { return ok(); }
  StoreHealth health() const override;

 private:
  enum class Verb : uint8_t { kPut, kGet, kFind, kRemove };
  struct Item {
    StorePart* part = nullptr;
    std::string key;
    BlockFrame expected{};
    FrameBytes head{};                  // kPut
    std::span<const std::byte> body{};  // the same
    std::string node{};                 // that is asked next; empty: whoever has it
    bool asking = false;                // it was said to be there, for this once
    bool over = false;
    Status status{};
  };
  struct NodeAsked {
    bool may = true;
    bool answered = false;
    std::optional<Error> failure{};
  };
  using NodesAsked = std::map<std::string, NodeAsked>;  // of one call
  struct Known {                                        // of a slot
    BlockKey key;
    Digest space;
    StoredRecord record;
  };

  RespStore(RespStoreOptions options, RespSettings settings, std::shared_ptr<const TlsTrust> trust, const Clock& clock);
  void do_put(std::span<StorePart> parts) override;
  void do_get(std::span<StorePart> parts) override;
  void do_find(std::span<StorePart> parts) override;
  std::optional<Digest> space_of(uint32_t space) const;
  Status describe(StorePart& part, Item& item) const;
  Status seal(Item& item, std::vector<std::vector<std::byte>>& sealed);
  void exchange(std::span<Item> items, Verb verb);
  bool ask_node(const std::string& node, std::span<Item* const> items, Verb verb, Deadline until, NodesAsked& asked);
  void tell_breakers(const NodesAsked& asked);
  Status talk(const std::string& node, std::span<Item* const> items, Verb verb, Deadline until);
  Status put_to(RespConnection& connection, const std::string& node, std::span<Item* const> items, Deadline until);
  Status receive(RespConnection& connection, const std::string& node, Item& item, Verb verb, Deadline until);
  Status receive_value(RespConnection& connection, Item& item, uint64_t length, Deadline until);
  static Status verify(const BlockFrame& frame, const BlockFrame& expected);
  void refused(Item& item, const std::string& words, const std::string& node);
  void remove_damaged(std::span<Item> items);
  void note(const Error& error, bool write);

  const RespStoreOptions options_;
  const StoreTraits traits_;
  RespNodes nodes_;
  const std::string name_;
  const SealId seal_id_;
  const Digest space_salt_;  // of the key: who has another one has other key spaces
  std::atomic<uint64_t> sealed_ = 0;
  const Clock& clock_;
  mutable Mutex mutex_;  // never held over a call of the server
  std::map<uint32_t, Digest> spaces_ TORPOR_GUARDED_BY(mutex_);
  std::unordered_map<Slot, Known> known_ TORPOR_GUARDED_BY(mutex_);
  std::chrono::nanoseconds full_until_ TORPOR_GUARDED_BY(mutex_){};
  StoreHealth health_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor::remote
