// SPDX-License-Identifier: Apache-2.0
// KvSnapshot: an engine's KV bookkeeping as values: block tables, reference counts, prefix index, free order.
//
// It is captured while the engine is quiescent, checked with validate(), pruned to what is kept, stored, and put back
// as it was. Block numbers are the engine's own; the null block (vLLM: 0) never appears in `blocks`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/value.h"

namespace torpor {

struct KvBlock {
  int32_t id = 0;
  int32_t ref_count = 0;
  Bytes hash;               // empty: not in the prefix cache. Otherwise the engine's key, group included
  int32_t hash_tokens = 0;  // tokens that the hash covers
  // Of the present content, among all that this block ever has in this process: any new content gets another one, also
  // under an equal hash. Only full blocks into which the engine never writes again have one; 0: none. In no checkpoint.
  uint64_t version = 0;
  friend bool operator==(const KvBlock&, const KvBlock&) = default;
};

struct KvTable {  // the blocks of one request in one group, in token order
  std::string request;
  std::vector<int32_t> blocks;
  int32_t num_cached_blocks =
      0;  // how many of its first blocks have been offered to the prefix cache; -1: not recorded
  friend bool operator==(const KvTable&, const KvTable&) = default;
};

struct KvGroup {
  int32_t block_size = 0;  // tokens
  std::vector<KvTable> tables;
  friend bool operator==(const KvGroup&, const KvGroup&) = default;
};

struct PrefixEntry {  // one key; several blocks may carry it
  Bytes hash;
  std::vector<int32_t> blocks;
  friend bool operator==(const PrefixEntry&, const PrefixEntry&) = default;
};

struct ExtraHashes {  // further keys under which a block is known
  int32_t block = 0;
  std::vector<Bytes> hashes;
  friend bool operator==(const ExtraHashes&, const ExtraHashes&) = default;
};

struct KvSnapshot {
  int32_t num_blocks = 0;
  int32_t null_block = 0;  // -1: the engine has none
  std::vector<KvGroup> groups;
  std::vector<KvBlock> blocks;            // those with a reference or a hash, by id
  std::vector<PrefixEntry> prefix_index;  // in the engine's own order
  std::vector<ExtraHashes> extra_hashes;
  std::vector<int32_t> free_order;  // in the order in which the engine would take them
  Value engine;                     // what the adapter keeps beside
  // Equal in two captures of one process: no block was written between them. 1: before the first step. 0: not told. In
  // no checkpoint.
  uint64_t steps = 0;
  // Of each number that a block had when this was saved, the one that it has here, or -1: it is not here. Empty: the
  // same (scheduler_state/block_numbers.h). In no checkpoint.
  std::vector<int32_t> block_numbers;

  // Put the blocks without a reference that `free_order` does not name before those that it names, by number. They have
  // no content, so no token depends on which is taken first.
  void complete_free_order();
  // Every cross-reference: ids in range, tables name blocks that are listed, reference counts equal the number of
  // tables that name the block, prefix entries and blocks agree, the free order is exactly the blocks without
  // reference, once each. kCorruption with the first contradiction.
  Status validate() const;
  friend bool operator==(const KvSnapshot&, const KvSnapshot&) = default;
};

// Which blocks' bytes are kept, and which blocks lose their hash because theirs are not.
struct LiveBlocks {
  std::vector<int32_t> kept;     // by id: all with a reference, and cached ones as far as the budget reaches
  std::vector<int32_t> dropped;  // cached ones beyond the budget, by id
};

// Cached blocks without a reference are kept in the order in which they would be evicted last. `budget_bytes` bounds
// kept bytes beyond the referenced blocks; no value: no bound.
LiveBlocks select_live_blocks(const KvSnapshot& snapshot, uint64_t bytes_per_block,
                              std::optional<uint64_t> budget_bytes);

// `kept` in the order in which a woken engine needs them: those of `requests`, in the order of these and of their
// tokens, those of other requests, then cached ones by their last use, the latest first.
std::vector<int32_t> by_need(const KvSnapshot& snapshot, const std::vector<std::string>& requests,
                             const std::vector<int32_t>& kept);

// Of `blocks`, which are by_need() of the same requests, those that may come back when the engine runs already: they
// have a hash, and belong to none of the requests that run first. These are the first ones, as long as together they
// have no more blocks than `most_first`, and one in any case.
std::vector<int32_t> deferred_blocks(const KvSnapshot& snapshot, const std::vector<std::string>& requests,
                                     const std::vector<int32_t>& blocks, size_t most_first);

// Of `blocks`, those that no request has, and that have a hash.
std::vector<int32_t> cached_blocks(const KvSnapshot& snapshot, const std::vector<int32_t>& blocks);

// The version of each of `blocks`.
std::vector<uint64_t> versions_of(const KvSnapshot& snapshot, const std::vector<int32_t>& blocks);

// Takes the hashes of `dropped` out of blocks, prefix index and extra hashes. Blocks left with neither go too.
void drop_hashes(KvSnapshot& snapshot, const std::vector<int32_t>& dropped);

}  // namespace torpor
