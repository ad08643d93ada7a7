// SPDX-License-Identifier: Apache-2.0
// What a recording's requests would have found in tiers of other sizes: by a model, of a recording whose engine told
// the keys of their blocks (option events_keys). It has the order of the requests, the keys of their prompts and of
// what they made, and nothing of time: a device and host memory by use, a disk by whole segments, the oldest first, all
// of it below one another (kvcache/block_index.h). Found blocks are compared, never tokens or seconds.
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

// As large as the recording's engine told them; 0: it told of none.
TierSizes recorded_sizes(const SourceEvents& recording);
RecordedHits recorded_hits(const SourceEvents& recording);
// kFailedPrecondition: no keys. kInvalidArgument: a size.
Result<ModelResult> replay_in_model(const SourceEvents& recording, const TierSizes& sizes);

}  // namespace torpor::console
