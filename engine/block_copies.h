// SPDX-License-Identifier: Apache-2.0
// Copies KV blocks within the device of one rank: those that the children of a fork do not share.
//
// Owner: none, this is a function. Threads: RankMemory's lock is held.
#pragma once

#include "allocator/device_memory.h"
#include "base/status.h"
#include "engine/rank_orders.h"
#include "kvcache/kv_layout.h"

namespace torpor {

// Wait for all work that the device was given before, copy the blocks, and return when the copies have ended. `layout`:
// a merged layout, all of whose memory is attached. kInvalidArgument: the lists differ in length, a block does not
// exist, or a target is named twice or is a source; then nothing was copied.
Result<orders::CopyBlocks::Reply> copy_blocks_within(DeviceMemory& device, const KvLayout& layout,
                                                     const orders::CopyBlocks& order);

}  // namespace torpor
