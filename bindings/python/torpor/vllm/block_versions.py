# SPDX-License-Identifier: Apache-2.0
"""What tells the contents of a KV block apart, so that a sleep copies only what changed since the one before.

Each time a block is entered into the prefix cache vLLM makes a new bytes object, the hash with its group, and drops it
when the block is evicted. So as long as a full block has the same object it has the same content; an equal hash says
less: another computation of the same tokens may have other last digits.
"""

from __future__ import annotations

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
)

# Into whose full blocks nothing is written again. A Mamba state is.
_WRITE_ONCE = (FullAttentionManager, SlidingWindowManager, ChunkedLocalAttentionManager)
_GROUP_BYTES = 4  # at the end of a hash (vLLM's make_block_hash_with_group_id)


def used_blocks(scheduler) -> list:
    """Return the blocks with a reference or a hash, by number. All other blocks of the pool are not looked at."""
    pool = scheduler.kv_cache_manager.block_pool
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    found = {b.block_id: b for manager in managers for held in manager.req_to_blocks.values() for b in held}
    for cached in pool.cached_block_hash_to_block._cache.values():
        found.update(cached if isinstance(cached, dict) else {cached.block_id: cached})
    used = [b for _, b in sorted(found.items()) if not b.is_null and (b.ref_cnt > 0 or b._block_hash is not None)]
    if sum(b.ref_cnt > 0 for b in used) == pool.num_gpu_blocks - 1 - pool.free_block_queue.num_free_blocks:
        return used
    # Somebody holds blocks that no request has: look at all.
    return [b for b in pool.blocks if not b.is_null and (b.ref_cnt > 0 or b._block_hash is not None)]


def to_value(scheduler, blocks: list, speculative_config) -> dict:
    """`steps`: how many were begun. `objects`: that of each of used_blocks(); None where one may be written again."""
    return {"steps": 1 + scheduler.torpor_steps, "objects": _objects(scheduler, blocks, speculative_config)}


def _objects(scheduler, blocks: list, speculative_config) -> list:
    # A drafting model writes KV of its own into these blocks, after vLLM has called them full.
    if speculative_config is not None and speculative_config.method != "ngram":
        return [None] * len(blocks)
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    sizes = {
        manager.kv_cache_group_id.to_bytes(_GROUP_BYTES, "big"): manager.block_size
        for manager in managers
        if type(manager) in _WRITE_ONCE
    }
    return [
        key
        if (key := block._block_hash) is not None
        and (size := sizes.get(key[-_GROUP_BYTES:])) is not None
        and block._block_hash_num_tokens % size == 0  # else it covers a part of the block
        else None
        for block in blocks
    ]
