// RankGroup: all worker ranks as one: an order succeeds on every rank or it is an error.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/engine_hooks.h"
#include "engine/rank_protocol.h"

namespace torpor {

class RankGroup {
 public:
  explicit RankGroup(EngineHooks& hooks) : hooks_(hooks) {}  // `hooks` outlives the group

  // The replies of all ranks, by rank. If one failed: its error. Then other ranks may have carried the order out; the
  // caller sends the order that undoes it, which a rank that has nothing to undo refuses without harm: see undo().
  Result<std::vector<RankReply>> call(const std::string& method, const RankOrder& order);
  // Sends an undoing order. A rank in another state refuses it (kFailedPrecondition) and has nothing to undo; any other
  // failure is tried once more, then it is the result's error.
  Result<std::vector<RankReply>> undo(const std::string& method, const RankOrder& order);

 private:
  Result<std::vector<RankReply>> send(const std::string& method, const RankOrder& order);
  EngineHooks& hooks_;
};

uint64_t total_bytes(const std::vector<RankReply>& replies);
// The sum of one field of a tag's ledger over all ranks.
uint64_t tag_bytes(const std::vector<RankReply>& replies, const std::string& tag, uint64_t RankLedger::Tag::*field);
// Of one KV block: stages of a pipeline have different layers.
struct BlockBytes {
  uint64_t all = 0;   // on all ranks together
  uint64_t most = 0;  // on the rank that needs most for it
};
BlockBytes block_bytes(const std::vector<RankReply>& described);
std::vector<RankLedger> ledgers_of(const std::vector<RankReply>& replies);

}  // namespace torpor
