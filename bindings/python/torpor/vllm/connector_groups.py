# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups as the connector sees them: layers with one block table, and what of the past they see."""

from __future__ import annotations

from typing import NamedTuple

from vllm import envs
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec


class Reach(NamedTuple):
    """What a layer sees of the past; all of it, if there is none of these limits."""

    window: int = 0  # the last tokens, with its own
    chunk: int = 0  # those of its chunk, of so many tokens
    state: bool = False  # nothing but the state after the last token, which is a block


# Of the class itself: what is derived from them keeps other things in its blocks.
_REACH = {
    FullAttentionSpec: lambda spec: Reach(),
    SlidingWindowSpec: lambda spec: Reach(window=spec.sliding_window + spec.extra_retained_tokens),
    ChunkedLocalAttentionSpec: lambda spec: Reach(chunk=spec.attention_chunk_size),
    MambaSpec: lambda spec: Reach(state=True),
}
_STATES = ("SHORT_CONV",)  # that were run, with all that can happen to their blocks


def unsupported(kv_cache_config, untried_states: bool = False) -> list[str]:
    """Why blocks of these groups cannot be offloaded. `untried_states`: states of all kinds can."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) == 1 and isinstance(specs[0], FullAttentionSpec):
        return []
    kinds = sorted({type(spec).__name__ for spec in specs if type(spec) not in _REACH})
    found = [f"KV caches of the kind {kind}" for kind in kinds]
    states = [spec for spec in specs if type(spec) is MambaSpec]
    modes = {spec.mamba_cache_mode for spec in states} - {"align"}
    found += [f"states with mamba_cache_mode={mode}" for mode in sorted(modes)]
    if not untried_states:
        untried = sorted({spec.mamba_type.name for spec in states} - {*_STATES})
        found += [f"states of the kind {kind}, which nobody has tried (option untried_states)" for kind in untried]
    return found


# Methods of speculation with which offloading was tried. The first has no model; the others have KV of their own.
_WITHOUT_MODEL, _WITH_MODEL = ("ngram",), ("eagle", "draft_model")


def unsupported_speculation(speculation, kv_cache_config) -> list[str]:
    """Why blocks cannot be offloaded beside this SpeculativeConfig of vLLM, or None."""
    if speculation is None or speculation.method in _WITHOUT_MODEL:
        return []
    if speculation.method not in _WITH_MODEL:
        return [f"speculation by the method {speculation.method}"]
    return ["a drafting model and KV cache groups with windows"] if need_whole_hits(kv_cache_config) else []


def drops_last_block(managers) -> bool:
    """Whether vLLM computes the last block of each hit again: its KV of the drafting model depends on what follows.

    managers: vLLM's, one for each group.
    """
    return len(managers) == 1 and managers[0].use_eagle


def reach(spec) -> Reach:
    return Reach() if isinstance(spec, FullAttentionSpec) else _REACH[type(spec)](spec)


def need_whole_hits(kv_cache_config) -> bool:
    """A shorter hit needs other blocks than the first ones of a longer one."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return len(specs) > 1 or any(reach(specs[0]))


def describe(kv_cache_config) -> str | None:
    """For the name of a namespace. None: one group that sees everything."""
    if not need_whole_hits(kv_cache_config):
        return None
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    return ";".join(_described(group, len(sizes) > 1) for group in kv_cache_config.kv_cache_groups)


def _described(group, with_size: bool) -> str:
    spec, seen = group.kv_cache_spec, reach(group.kv_cache_spec)
    text = f"{type(spec).__name__} {'state' if seen.state else (seen.window, seen.chunk)}"
    if seen.state:  # padded to the size of an attention block: none of these shows there
        text += f" {spec.shapes} {spec.dtypes} {envs.VLLM_SSM_CONV_STATE_LAYOUT}"
    return f"{text}{f' {spec.block_size}' if with_size else ''} of {','.join(group.layer_names)}"
