// SPDX-License-Identifier: Apache-2.0
// RankGroup: all worker ranks as one: an order succeeds on every rank or it is an error.
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

  // The replies of all ranks, by rank. If one failed: its error. Then other ranks may have carried the order out; the
  // caller sends the order that undoes it, which a rank that has nothing to undo refuses without harm: see undo().
  template <class Order>
  Result<std::vector<typename Order::Reply>> call(const Order& order) {
    return send(order, /*refusals=*/false);
  }
  // Sends an undoing order. A rank in another state refuses it (kFailedPrecondition): it has nothing to undo, and its
  // reply is left out. Any other failure is tried once more, then it is the result's error.
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
  Result<std::vector<Bytes>> send_bytes(const Bytes& order);  // one answer or more, none without bytes
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

// To a fingerprint, what each rank said of its weights. Throws std::out_of_range where one said nothing.
template <class Reply>
void add_weights(Fingerprint& fields, const std::vector<Reply>& replies) {
  for (size_t rank = 0; rank < replies.size(); ++rank)
    fields["weights_digest_rank" + std::to_string(rank)] = replies[rank].digests.at(kWeightsTag);
}

// In the order in which a woken engine runs them.
std::vector<std::string> requests_by_need(const SchedulerCheckpoint& state);
// All blocks of a state, in the order in which it needs them.
std::vector<int32_t> blocks_by_need(const SchedulerCheckpoint& state);
// Of these blocks of a state, which are by need, those that may come back behind an engine that holds so much back.
std::vector<int32_t> deferred_blocks_of(const SchedulerCheckpoint& state, const std::vector<int32_t>& blocks,
                                        HoldsBack held);
// Says which blocks of this state are saved, the most needed first, and what tells their contents apart.
void name_blocks(orders::Save& save, const SchedulerCheckpoint& state, const std::vector<int32_t>& kept);

using Described = std::vector<orders::Describe::Reply>;  // by rank
// The sum of one field of a tag's ledger over all ranks.
uint64_t tag_bytes(const Described& described, const std::string& tag, uint64_t RankLedger::Tag::*field);
// Of one KV block: stages of a pipeline have different layers.
struct BlockBytes {
  uint64_t all = 0;   // on all ranks together
  uint64_t most = 0;  // on the rank that needs most for it
};
BlockBytes block_bytes(const Described& described);
// KV blocks that all ranks have; 0: there is no KV.
int32_t num_blocks(const Described& described);
// Return the tags of these names, in the order in which they wake; where none is named, all that there are.
// kInvalidArgument names one that is not there.
Result<std::vector<std::string>> select_tags(const std::vector<std::string>& wanted, const Described& described);
// Return kInvalidArgument unless the KV cache is among these tags, which a checkpoint will have.
Status has_kv(const std::vector<std::string>& tags);

}  // namespace torpor
