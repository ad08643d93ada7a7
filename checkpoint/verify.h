// SPDX-License-Identifier: Apache-2.0
// verify(): everything that can be wrong with a checkpoint, looked for: every byte against its digest (and seal), every
// value against the others, every live block against what was saved, every chain of prefix hashes against the tokens.
#pragma once

#include <string>
#include <vector>

#include "base/progress.h"
#include "checkpoint/checkpoint.h"

namespace torpor {

struct VerifyOptions {
  int threads = 0;        // that read and hash; 0: as many as the machine has cores, at most 8
  bool contents = true;   // false: the state and the cross-references, but not the chunks' bytes
  ProgressSink progress;  // of the chunks; saying no ends it with kAborted
};

struct Verification {
  std::vector<Error> problems;
  // Chunks that are damaged or missing, of any rank: blocks by number, and others by name.
  std::vector<int32_t> bad_blocks;  // sorted
  std::vector<std::string> bad_chunks;
  std::vector<int32_t> bad_ranks;  // whose refs are damaged: nothing of them can be found
  uint64_t bytes = 0;              // stored bytes that were read
  uint64_t sections = 0;           // that were checked, and so on
  uint64_t chunks = 0;
  uint64_t table_entries = 0;
  uint64_t references = 0;
  uint64_t hashes = 0;             // recomputed
  std::string hashes_not_checked;  // why; empty if all were
};

// An error only where nothing could be said at all (kAborted, kResourceExhausted).
Result<Verification> verify(const Checkpoint& checkpoint, const VerifyOptions& options = {});

}  // namespace torpor
