// SPDX-License-Identifier: Apache-2.0
// verify(): checks everything that can be wrong with a checkpoint: every byte against its digest (and seal), every
// value against the others, every live block against the saved ones, every chain of prefix hashes against the tokens.
#pragma once

#include <string>
#include <vector>

#include "base/progress.h"
#include "checkpoint/checkpoint.h"

namespace torpor {

struct VerifyOptions {
  int threads = 0;        // that read and hash; 0: twice the number of cores, at most 16
  bool contents = true;   // false: check state and cross-references, but not the bytes of chunks
  ProgressSink progress;  // of the chunks; false ends it with kAborted
};

struct Verification {
  std::vector<Error> problems;
  // Damaged or missing chunks of any rank: blocks by number, others by name.
  std::vector<int32_t> bad_blocks;  // sorted
  std::vector<std::string> bad_chunks;
  std::vector<int32_t> bad_ranks;  // their refs are damaged, so nothing of them can be found
  uint64_t bytes = 0;              // stored bytes that were read
  uint64_t sections = 0;           // number that was checked; likewise below
  uint64_t chunks = 0;
  uint64_t table_entries = 0;
  uint64_t references = 0;
  uint64_t hashes = 0;             // recomputed
  std::string hashes_not_checked;  // the reason; empty if all were checked
};

// Verify a checkpoint. Problems of the checkpoint are in the result. Errors: kAborted, kResourceExhausted.
Result<Verification> verify(const Checkpoint& checkpoint, const VerifyOptions& options = {});

}  // namespace torpor
