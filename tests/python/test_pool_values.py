# SPDX-License-Identifier: Apache-2.0
"""A sleep reads the blocks of vLLM's pool that have content, and no others."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool

from torpor.vllm import block_versions, pool_values


@pytest.fixture
def scheduler():
    """A pool has 64 blocks. Two requests hold 1 to 3 and 4 to 6. Blocks 7 to 9 are cached and free; 9 is evicted first.
    Blocks 10 to 12 are free without content: 10 stands between the cached ones, 11 and 12 behind them."""
    pool = BlockPool(64, True, 16)
    taken = pool.get_new_blocks(12)
    assert [block.block_id for block in taken] == list(range(1, 13))
    for block in taken[6:9]:
        block._block_hash = b"%d" % block.block_id
        pool.cached_block_hash_to_block._cache[block._block_hash] = block
    by_id = {block.block_id: block for block in taken}
    for block_id in (9, 10, 7, 8, 11, 12):
        by_id[block_id].ref_cnt = 0
        pool.free_block_queue.append(by_id[block_id])
    requests = SimpleNamespace(req_to_blocks={"a": [*taken[:3], pool.null_block], "b": taken[3:6]})
    coordinator = SimpleNamespace(single_type_managers=[requests])
    return SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool, coordinator=coordinator))


class NotToBeRead:
    def __iter__(self):
        raise AssertionError("all blocks of the pool were looked at")


def test_only_blocks_with_content_are_looked_at(scheduler):
    scheduler.kv_cache_manager.block_pool.blocks = NotToBeRead()
    assert [block.block_id for block in block_versions.used_blocks(scheduler)] == list(range(1, 10))


def test_a_block_that_no_request_has_is_found_all_the_same(scheduler):
    [block] = scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    assert [used.block_id for used in block_versions.used_blocks(scheduler)] == [*range(1, 10), block.block_id]


def test_of_the_free_blocks_those_from_the_first_with_content_on_are_named(scheduler):
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    assert list(pool_values._last_free(queue, 3)) == [9, 10, 7, 8, 11, 12]
    assert list(pool_values._last_free(queue, 0)) == []
    assert len(pool_values._last_free(queue, 4)) == queue.num_free_blocks  # one that says it is cached is not there
