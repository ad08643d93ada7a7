// SPDX-License-Identifier: Apache-2.0
// The KV blocks that children of a fork do not share are copied within the device, on one rank.
#pragma once

#include "allocator/device_memory.h"
#include "base/status.h"
#include "engine/rank_orders.h"
#include "kvcache/kv_layout.h"

namespace torpor {

// Wait for what the device was given before, copy, and return when that is over. `layout`: a merged one; all its memory
// is attached. kInvalidArgument, and nothing was copied: lists of other lengths, a block that does not exist, a target
// that is named twice or is a source.
Result<orders::CopyBlocks::Reply> copy_blocks_within(DeviceMemory& device, const KvLayout& layout,
                                                     const orders::CopyBlocks& order);

}  // namespace torpor
