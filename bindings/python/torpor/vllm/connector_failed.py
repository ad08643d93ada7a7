# SPDX-License-Identifier: Apache-2.0
"""Loads that failed within a step: the step computed on top of blocks without valid content.

vLLM drops the tokens that the step sampled for the requests that have such a block. With the policy "recompute" it
leaves the blocks in its prefix cache and expects the next steps to write them again, which a preemption, or a prompt in
chunks, does not do in time for others that find them there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from vllm.v1.request import RequestStatus


def blocks_behind(failed: Iterable[tuple[str, int]], tables: Mapping[str, Sequence]) -> set[int]:
    """Return the blocks without valid content: those of failed loads, and all that was computed on top of them.

    failed: requests, and the position of the first bad block of each. tables: the blocks of each request that computed
    in the step. Some found what others loaded in vLLM's prefix cache; some may have been aborted since.
    """
    bad = {block.block_id for request_id, first in failed for block in tables[request_id][first:]}
    for table in tables.values():
        first = next((at for at, block in enumerate(table) if block.block_id in bad), len(table))
        bad.update(block.block_id for block in table[first:])
    return bad


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
    for request in reversed(having):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def keep_seeds(model_runner, bad: AbstractSet[int]) -> None:
    """Let requests that have one of these device blocks sample from copies of their generators in the present step.

    vLLM drops these samples, and draws them again later. Call it before the step's forward pass. Model runner V2 has no
    generators: it draws by seed and position.
    """
    batch = getattr(model_runner, "input_batch", None)
    if batch is None or not (generators := getattr(batch, "generators", None)):
        return
    for request_id, index in batch.req_id_to_index.items():
        tables = model_runner.requests[request_id].block_ids
        if (generator := generators.get(index)) is None or bad.isdisjoint(block for table in tables for block in table):
            continue
        generators[index] = torch.Generator(device=generator.device)
        generators[index].set_state(generator.get_state())
