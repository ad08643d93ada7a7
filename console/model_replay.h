// SPDX-License-Identifier: Apache-2.0
// Computes, with a model, what a recording's requests would have found in tiers of other sizes. The recording needs the
// keys of their blocks (option events_keys). The model uses the order of the requests, the keys of their prompts and of
// the tokens that they generated, and no times. Device and host memory evict the least recently used block, the disk
// evicts whole segments, the oldest first (kvcache/block_index.h). Compare the found blocks; the model says nothing of
// tokens or seconds.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "console/source_events.h"

namespace torpor::console {

struct TierSizes {  // blocks
  int64_t device = 0;
  int64_t host = 0;
  int64_t disk = 0;
};

struct ModelResult {
  TierSizes sizes;
  uint64_t requests = 0;
  uint64_t asked = 0;  // blocks of prompts
  TierSizes found;     // of them, in the uppermost tier that has them
};

struct RecordedHits {  // what the engine itself found
  uint64_t asked = 0;  // below the device
  uint64_t host = 0;
  uint64_t disk = 0;
};

// Return the sizes that the recording's engine recorded; 0: it recorded none.
TierSizes recorded_sizes(const SourceEvents& recording);
RecordedHits recorded_hits(const SourceEvents& recording);
// Run the model. kFailedPrecondition: the recording has no keys. kInvalidArgument: a size is out of range.
Result<ModelResult> replay_in_model(const SourceEvents& recording, const TierSizes& sizes);

}  // namespace torpor::console
