# SPDX-License-Identifier: Apache-2.0
"""What vLLM's managers of KV groups keep of requests besides their block tables, as values and back.

A group is layers with one block table: those of full attention, of a sliding window, of attention in chunks, of Mamba
and its like. All take their blocks from one pool, and a table names the null block where a request needs none any more.
"""

from __future__ import annotations

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)

from torpor.errors import Incompatible

_KNOWN = (FullAttentionManager, SlidingWindowManager, ChunkedLocalAttentionManager, MambaManager)
# Of a manager: what it gathers while a step is scheduled, and hands over in the same step.
_OF_ONE_STEP = {
    "new_block_ids": "new KV blocks that were not zeroed yet",
    "_pending_cow_copies": "KV blocks that were not copied yet",
    "_pending_boundary_state_offloads": "Mamba states that were not handed over yet",
}
# Of a MambaManager in the mode "align": numbers by request.
_ALIGNED_NUMBERS = {"last_state_block_idx": "last_state_block", "_num_retired_blocks": "retired_blocks"}


def unsupported(managers) -> list[str]:
    found = [f"KV caches of the kind {type(manager).__name__}" for manager in managers if type(manager) not in _KNOWN]
    return found + [what for name, what in _OF_ONE_STEP.items() if any(getattr(m, name) for m in managers)]


def to_value(manager) -> dict:
    """By request. Empty for a group that has nothing but block tables."""
    value: dict = {"partial_hits": {request: index for request, (index, _) in manager._partial_hit_reqs.items()}}
    if _is_aligned(manager):
        value |= {name: dict(getattr(manager, attribute)) for attribute, name in _ALIGNED_NUMBERS.items()}
        value["allocated"] = sorted(manager._allocated_block_reqs)
        value["checkpoints"] = {request: list(checkpoint) for request, checkpoint in manager._checkpoints.items()}
        value["partial_tails"] = {
            request: [_index(manager.req_to_blocks[request], block), tokens]
            for request, (block, tokens) in manager._producer_partial_tail_reqs.items()
        }
    return {name: content for name, content in value.items() if content}


def from_value(manager, value: dict) -> None:
    """After its block tables: of requests that have one."""

    def of(name: str) -> list:
        return [(request, item) for request, item in value.get(name, {}).items() if request in manager.req_to_blocks]

    for request, index in of("partial_hits"):
        manager._partial_hit_reqs[request] = (index, _block(manager, request, index))
    if not _is_aligned(manager):
        return
    for attribute, name in _ALIGNED_NUMBERS.items():
        getattr(manager, attribute).update(of(name))
    manager._allocated_block_reqs.update(id for id in value.get("allocated", ()) if id in manager.req_to_blocks)
    manager._checkpoints.update((request, tuple(checkpoint)) for request, checkpoint in of("checkpoints"))
    for request, (index, tokens) in of("partial_tails"):
        manager._producer_partial_tail_reqs[request] = (_block(manager, request, index), tokens)


def forget(manager) -> None:
    """All requests, their block tables too."""
    manager.req_to_blocks.clear()
    manager.num_cached_block.clear()
    manager._partial_hit_reqs.clear()
    if isinstance(manager, MambaManager):
        manager.cached_blocks_this_step.clear()
    if _is_aligned(manager):
        for name in _ALIGNED_NUMBERS:
            getattr(manager, name).clear()
        manager._allocated_block_reqs.clear()
        manager._checkpoints.clear()
        manager._producer_partial_tail_reqs.clear()


def _is_aligned(manager) -> bool:
    """Mamba states are kept at the ends of blocks, for the prefix cache."""
    return isinstance(manager, MambaManager) and manager.mamba_cache_mode == "align"


def _index(blocks: list, block) -> int:
    return next(index for index, each in enumerate(blocks) if each is block)


def _block(manager, request: str, index: int):
    held = manager.req_to_blocks[request]
    if not 0 <= index < len(held):
        raise Incompatible(
            f"request {request} has no block {index} in a group of {len(held)}", "use another checkpoint"
        )
    return held[index]
