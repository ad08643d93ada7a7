# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups as the connector sees them: layers with one block table, and what of the past they see."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

# Of the class itself: what is derived from them keeps other things in its blocks.
_WINDOWS = {
    FullAttentionSpec: lambda spec: (0, 0),
    SlidingWindowSpec: lambda spec: (spec.sliding_window + spec.extra_retained_tokens, 0),
    ChunkedLocalAttentionSpec: lambda spec: (0, spec.attention_chunk_size),
}


def unsupported(kv_cache_config) -> list[str]:
    """Why blocks of these groups cannot be offloaded."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) == 1 and isinstance(specs[0], FullAttentionSpec):
        return []
    kinds = sorted({type(spec).__name__ for spec in specs if type(spec) not in _WINDOWS})
    found = [f"KV caches of the kind {kind}" for kind in kinds]
    if len({spec.block_size for spec in specs}) > 1:
        found.append("KV cache groups with blocks of several sizes")
    return found


def reach(spec) -> tuple[int, int]:
    """How many tokens a layer sees with its own, or of how many a chunk is in which it sees all; 0: no such limit."""
    return (0, 0) if isinstance(spec, FullAttentionSpec) else _WINDOWS[type(spec)](spec)


def need_whole_hits(kv_cache_config) -> bool:
    """A shorter hit needs other blocks than the first ones of a longer one."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return len(specs) > 1 or any(reach(specs[0]))


def describe(kv_cache_config) -> str | None:
    """For the name of a namespace. None: one group that sees everything."""
    if not need_whole_hits(kv_cache_config):
        return None
    return ";".join(
        f"{type(group.kv_cache_spec).__name__} {reach(group.kv_cache_spec)} of {','.join(group.layer_names)}"
        for group in kv_cache_config.kv_cache_groups
    )
