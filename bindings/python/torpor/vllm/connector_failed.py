# SPDX-License-Identifier: Apache-2.0
"""Loads that failed within a step: the step computed on top of blocks without valid content, and so does a next step
that is in flight.

vLLM drops the tokens that the step sampled for the requests that have such a block. With the policy "recompute" it
leaves the blocks in its prefix cache and expects the next steps to write them again, which a preemption, or a prompt in
chunks, does not do in time for others that find them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vllm.v1.request import RequestStatus

from torpor.vllm.connector_begin_again import begin_again


def blocks_behind(
    failed: Iterable[tuple[str, int]], tables: Mapping[str, Sequence], in_flight: Iterable[Mapping[str, Sequence]] = ()
) -> set[int]:
    """Return the blocks without valid content: those of failed loads, and all that is computed on top of them.

    failed: requests, and the position of the first bad block of each. tables: the blocks of each request that computed
    in the step, in the scheduler's order. in_flight: the same for each later step that has begun. Some requests found
    in vLLM's prefix cache what others loaded; some may have been aborted since.
    """
    bad = {block.block_id for request_id, first in failed for block in tables[request_id][first:]}
    for step in (tables, *in_flight):
        for table in step.values():
            first = next((at for at, block in enumerate(table) if block.block_id in bad), len(table))
            bad.update(block.block_id for block in table[first:])
    return bad


def can_take_back(scheduler) -> bool:
    """Return whether all that was computed on top of such blocks can be computed again.

    It was tried with a step in flight on model runner V2 only, and not with the steps in flight of a pipeline.
    """
    if scheduler.parallel_config.pipeline_parallel_size > 1:
        return False
    return scheduler.use_v2_model_runner or not scheduler.scheduler_config.async_scheduling


def take_back_failed(scheduler, side) -> None:
    """Remove `side.bad_blocks` from vLLM's prefix cache, and preempt each running request that has one of them.

    The requests begin again with what is valid. Call it before another step is scheduled.
    """
    bad, side.bad_blocks = side.bad_blocks, set()
    tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    scheduler.kv_cache_manager.evict_blocks(bad)
    having = [
        request
        for request in scheduler.running
        if request.status is RequestStatus.RUNNING
        and any(block.block_id in bad for block in tables.get(request.request_id, ()))
    ]
    begin_again(scheduler, side, having, side.bad_since)
