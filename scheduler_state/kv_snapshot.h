// SPDX-License-Identifier: Apache-2.0
// KvSnapshot: an engine's KV bookkeeping as values: block tables, reference counts, prefix index, free order.
//
// The adapter captures it while the engine is quiescent. It is checked with validate(), reduced to the blocks that are
// kept, stored, and later restored unchanged. Block numbers are the engine's own; the null block (vLLM: 0) never
// appears in `blocks`.
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
  // Identifies the current content among all contents that this block has in this process: new content gets a new
  // version, even with an equal hash. Only full blocks to which the engine never writes again have one; 0: none. Not
  // stored in checkpoints.
  uint64_t version = 0;
  friend bool operator==(const KvBlock&, const KvBlock&) = default;
};

struct KvTable {  // the blocks of one request in one group, in token order
  std::string request;
  std::vector<int32_t> blocks;
  int32_t num_cached_blocks =
      0;  // how many of its first blocks were offered to the prefix cache; -1: that was not recorded
  friend bool operator==(const KvTable&, const KvTable&) = default;
};

struct KvGroup {
  int32_t block_size = 0;  // tokens
  std::vector<KvTable> tables;
  friend bool operator==(const KvGroup&, const KvGroup&) = default;
};

struct PrefixEntry {  // one key; several blocks may have it
  Bytes hash;
  std::vector<int32_t> blocks;
  friend bool operator==(const PrefixEntry&, const PrefixEntry&) = default;
};

struct ExtraHashes {  // further keys of a block
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
  std::vector<int32_t> free_order;  // in the order in which the engine would use them
  Value engine;                     // data that only the adapter understands
  // Grows with the steps of the engine; 1: before its first step; 0: unknown. If two captures of one process have the
  // same value, no block was written between them. Not stored in checkpoints.
  uint64_t steps = 0;
  // Current number of each block number at the time of the save; -1: the block was not taken over. Empty: no number
  // changed (scheduler_state/block_numbers.h). Not stored in checkpoints.
  std::vector<int32_t> block_numbers;

  // Add the blocks without a reference that `free_order` lacks, by number, in front of those that it has. They have no
  // content, so their order changes no token.
  void complete_free_order();
  // Check every cross-reference: ids are in range; tables name listed blocks; a reference count is the number of tables
  // that name the block; prefix entries and blocks agree; the free order has each block without a reference exactly
  // once. kCorruption: the first contradiction.
  Status validate() const;
  friend bool operator==(const KvSnapshot&, const KvSnapshot&) = default;
};

// The blocks whose bytes are kept, and the blocks that lose their hash because their bytes are not kept.
struct LiveBlocks {
  std::vector<int32_t> kept;     // by id: all with a reference, and the cached ones that fit the budget
  std::vector<int32_t> dropped;  // cached ones beyond the budget, by id
};

// Choose the blocks to keep. Cached blocks without a reference are kept in reverse order of eviction: the last to be
// evicted first. `budget_bytes` limits the bytes of these cached blocks; none: no limit.
LiveBlocks select_live_blocks(const KvSnapshot& snapshot, uint64_t bytes_per_block,
                              std::optional<uint64_t> budget_bytes);

// Sort `kept` in the order in which a woken engine needs the blocks: first those of `requests`, in the order of the
// requests and of their tokens; then those of other requests; then cached ones, the last used first.
std::vector<int32_t> by_need(const KvSnapshot& snapshot, const std::vector<std::string>& requests,
                             const std::vector<int32_t>& kept);

// Return those of `blocks` that may be restored after the engine runs. They have a hash and belong to none of the
// requests that run first. The first of `requests` run first: as many as together have at most `most_first` blocks, and
// at least one. `blocks`: in the order of by_need() for the same requests.
std::vector<int32_t> deferred_blocks(const KvSnapshot& snapshot, const std::vector<std::string>& requests,
                                     const std::vector<int32_t>& blocks, size_t most_first);

// Return those of `blocks` that have a hash and belong to no request.
std::vector<int32_t> cached_blocks(const KvSnapshot& snapshot, const std::vector<int32_t>& blocks);

// Return the version of each of `blocks`; 0: none.
std::vector<uint64_t> versions_of(const KvSnapshot& snapshot, const std::vector<int32_t>& blocks);

// Remove the hashes of `dropped` from the blocks, the prefix index and the extra hashes. Blocks left with neither a
// reference nor a hash are removed too.
void drop_hashes(KvSnapshot& snapshot, const std::vector<int32_t>& dropped);

}  // namespace torpor
