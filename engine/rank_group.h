// SPDX-License-Identifier: Apache-2.0
// RankGroup: all worker ranks as one. An order succeeds on every rank, or the call returns an error.
//
// Owner: an operation, or RequestImages. Threads: one at a time. Failure: errors are values; a hook that throws is
// caught below (GuardedHooks).
#pragma once

#include <string>
#include <vector>

#include "engine/engine_hooks.h"
#include "engine/rank_orders.h"
#include "engine/tags.h"

namespace torpor {

class RankGroup {
 public:
  explicit RankGroup(EngineHooks& hooks) : hooks_(hooks) {}  // `hooks` outlives the group

  // Send an order to all ranks and return their replies, by rank. If a rank failed, return its error. Other ranks may
  // have carried the order out then: send the order that undoes it with undo(). A rank that has nothing to undo refuses
  // that order, which does no harm.
  template <class Order>
  Result<std::vector<typename Order::Reply>> call(const Order& order) {
    return send(order, /*refusals=*/false);
  }
  // Send an order that undoes another one. A rank in another state refuses it (kFailedPrecondition) because it has
  // nothing to undo; its reply is left out. After any other failure the order is sent once more; if that fails too,
  // return the error.
  template <class Order>
  Result<std::vector<typename Order::Reply>> undo(const Order& order) {
    const auto attempt = [&] { return send(order, /*refusals=*/true); };
    Result<std::vector<typename Order::Reply>> undone = try_catch(attempt);
    if (!undone) undone = try_catch(attempt);
    return undone;
  }

 private:
  template <class Order>
  Result<std::vector<typename Order::Reply>> send(const Order& order, bool refusals) {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Bytes> raw, send_bytes(encode_order(order)));
    std::vector<typename Order::Reply> replies;
    replies.reserve(raw.size());
    for (const Bytes& bytes : raw) {
      Result<typename Order::Reply> reply = decode_reply<Order>(bytes);
      if (reply) {
        replies.push_back(std::move(*reply));
      } else if (!refusals || reply.error().code != Code::kFailedPrecondition) {
        return std::move(reply).error();
      }
    }
    return replies;
  }
  Result<std::vector<Bytes>> send_bytes(const Bytes& order);  // at least one reply, none empty
  EngineHooks& hooks_;
};

template <class Reply>
uint64_t total_bytes(const std::vector<Reply>& replies) {
  uint64_t sum = 0;
  for (const Reply& reply : replies) sum += reply.bytes;
  return sum;
}
template <class Reply>
std::vector<RankLedger> ledgers_of(const std::vector<Reply>& replies) {
  std::vector<RankLedger> ledgers;
  for (const Reply& reply : replies) ledgers.push_back(reply.ledger);
  return ledgers;
}

// Add to a fingerprint the digest of each rank's weights. Throws std::out_of_range if a reply has none.
template <class Reply>
void add_weights(Fingerprint& fields, const std::vector<Reply>& replies) {
  for (size_t rank = 0; rank < replies.size(); ++rank)
    fields["weights_digest_rank" + std::to_string(rank)] = replies[rank].digests.at(kWeightsTag);
}

// Return the ids of all requests, in the order in which a woken engine runs them.
std::vector<std::string> requests_by_need(const CapturedState& state);
// Return all blocks of a state, the most needed first.
std::vector<int32_t> blocks_by_need(const CapturedState& state);
// Return those of `blocks`, which are by need, that may come back while the engine already runs, if it holds back
// `held`.
std::vector<int32_t> deferred_blocks_of(const CapturedState& state, const std::vector<int32_t>& blocks, HoldsBack held);
// Write into `save` which blocks of this state are saved, the most needed first, with the values that identify their
// contents.
void name_blocks(orders::Save& save, const CapturedState& state, const std::vector<int32_t>& kept);

using Described = std::vector<orders::Describe::Reply>;  // by rank
// Return whether any rank has the tag.
bool is_tag(const Described& described, const std::string& tag);
// Return the sum over all ranks of one field of a tag's ledger.
uint64_t tag_bytes(const Described& described, const std::string& tag, uint64_t RankLedger::Tag::*field);
// The bytes of one KV block. They differ by rank if stages of a pipeline have different layers.
struct BlockBytes {
  uint64_t all = 0;   // on all ranks together
  uint64_t most = 0;  // on the rank that has most of it
};
BlockBytes block_bytes(const Described& described);
// Return the number of KV blocks that all ranks have; 0: there is no KV cache.
int32_t num_blocks(const Described& described);
// Return the tags of these names in the order in which they wake; all tags of all ranks if `wanted` is empty.
// kInvalidArgument names a tag that no rank has.
Result<std::vector<std::string>> select_tags(const std::vector<std::string>& wanted, const Described& described);
// Return kInvalidArgument unless the tag of the KV cache is among these, the tags of a checkpoint. An engine whose
// model has no KV cache says itself whether it makes checkpoints (EngineHooks::unsupported).
Status has_kv(const std::vector<std::string>& tags, const Described& described);

}  // namespace torpor
