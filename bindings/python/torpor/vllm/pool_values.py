# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool, block tables and prefix index as values, and back."""

from __future__ import annotations

from array import array

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.sched.scheduler import Scheduler

from torpor.vllm import block_versions, kv_groups


def pool_to_value(scheduler: Scheduler, blocks: list | None = None) -> dict:
    """`blocks`: block_versions.used_blocks(), where they are known."""
    pool = scheduler.kv_cache_manager.block_pool
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    blocks = block_versions.used_blocks(scheduler) if blocks is None else blocks
    beside = [kv_groups.to_value(manager) for manager in managers]
    return {
        "num_blocks": pool.num_gpu_blocks,
        "null_block": pool.null_block.block_id,
        "groups": [
            {
                "block_size": manager.block_size,
                "tables": {
                    request_id: array("i", [b.block_id for b in held])
                    for request_id, held in manager.req_to_blocks.items()
                },
                "num_cached_blocks": dict(manager.num_cached_block),
            }
            for manager in managers
        ],
        "blocks": {
            "ids": array("i", [b.block_id for b in blocks]),
            "ref_counts": array("i", [b.ref_cnt for b in blocks]),
            "hashes": [b._block_hash or b"" for b in blocks],
            "hash_tokens": array("i", [b._block_hash_num_tokens or 0 for b in blocks]),
        },
        "extra_hashes": [
            (block_id, sorted(hashes)) for block_id, hashes in pool.cached_block_hashes_by_block.items() if hashes
        ],
        "prefix_index": [
            (key, list(found) if isinstance(found, dict) else [found.block_id])
            for key, found in pool.cached_block_hash_to_block._cache.items()
        ],
        "free_order": _last_free(pool.free_block_queue, sum(b.ref_cnt == 0 for b in blocks)),
        "engine": {"groups": beside} if any(beside) else {},
    }


def _last_free(queue, cached: int) -> array:
    """Return the ids of the free list from its first block with content on. `cached` of its blocks have content.

    The blocks before that one have none; KvSnapshot::complete_free_order() names them.
    """
    ids = array("i")
    block = queue.fake_free_list_tail.prev_free_block
    while cached > 0 and block is not queue.fake_free_list_head:
        ids.append(block.block_id)
        cached -= block._block_hash is not None
        block = block.prev_free_block
    ids.reverse()
    return ids


def pool_from_value(scheduler: Scheduler, value: dict, lost_requests: set[str]) -> None:
    """Puts the block pool, the tables and the prefix index back as they were. Blocks of `lost_requests` become free."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    _reset_blocks(pool)
    blocks = value["blocks"]
    for block_id, ref_count, key, tokens in zip(
        blocks["ids"], blocks["ref_counts"], blocks["hashes"], blocks["hash_tokens"], strict=True
    ):
        block = pool.blocks[block_id]
        block.ref_cnt = ref_count
        if key:
            block._block_hash, block._block_hash_num_tokens = key, tokens
    for key, ids in value["prefix_index"]:
        found = {block_id: pool.blocks[block_id] for block_id in ids}
        pool.cached_block_hash_to_block._cache[key] = found if len(found) > 1 else pool.blocks[ids[0]]
    for block_id, keys in value["extra_hashes"]:
        pool.cached_block_hashes_by_block[block_id] = set(keys)
    _link_free(pool, value["free_order"])
    for group, single in zip(value["groups"], manager.coordinator.single_type_managers, strict=True):
        for request_id, ids in group["tables"].items():
            held = [pool.blocks[block_id] for block_id in ids]
            if request_id in lost_requests:
                pool.free_blocks(reversed(held))
            else:
                single.req_to_blocks[request_id] = held
                if request_id in group["num_cached_blocks"]:
                    single.num_cached_block[request_id] = group["num_cached_blocks"][request_id]
    of_groups = value["engine"].get("groups", ())
    for single, beside in zip(manager.coordinator.single_type_managers, of_groups, strict=False):
        kv_groups.from_value(single, beside)


def renumber_tables(checkpoint: dict) -> None:
    """The workers' own block tables, where blocks have other numbers than when they were saved."""
    kv = checkpoint["kv"]
    if (numbers := kv.get("block_numbers")) is None:
        return
    for worker in checkpoint["workers"]:
        for request in worker["engine"]["requests"]:
            # A worker's table also names blocks that the request has given back, and never reads.
            request["block_ids"] = [
                array("q", [now if (now := numbers[block_id]) >= 0 else kv["null_block"] for block_id in ids])
                for ids in request["block_ids"]
            ]


def announce_blocks(scheduler: Scheduler) -> None:
    """KV cache events for the restored blocks of the requests, of which the tokens are known.

    Cached blocks without a request are not announced: an event names their tokens, which nobody has any more.
    """
    pool = scheduler.kv_cache_manager.block_pool
    for group, single in enumerate(scheduler.kv_cache_manager.coordinator.single_type_managers):
        for request_id, count in single.num_cached_block.items():
            if all(block._block_hash is not None for block in single.req_to_blocks[request_id][:count]):
                pool.emit_cached_block_events(scheduler.requests[request_id], count, single.block_size, group)


def empty_pool(scheduler: Scheduler) -> None:
    """All blocks free and without a hash, in the order of their numbers."""
    pool = scheduler.kv_cache_manager.block_pool
    _reset_blocks(pool)
    _link_free(pool, [b.block_id for b in pool.blocks if not b.is_null])
    for single in scheduler.kv_cache_manager.coordinator.single_type_managers:
        kv_groups.forget(single)


def _reset_blocks(pool) -> None:
    for block in pool.blocks:
        block.prev_free_block = block.next_free_block = None
        if not block.is_null:
            block.ref_cnt = 0
            block._block_hash = block._block_hash_num_tokens = None
    if pool.enable_kv_cache_events and pool.cached_block_hash_to_block._cache:
        pool.kv_event_queue.append(AllBlocksCleared())
    pool.cached_block_hash_to_block._cache.clear()
    pool.cached_block_hashes_by_block.clear()


def _link_free(pool, ids) -> None:
    queue = pool.free_block_queue
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    head.next_free_block, tail.prev_free_block = tail, head
    queue.num_free_blocks = 0
    queue.append_n([pool.blocks[block_id] for block_id in ids])
