# SPDX-License-Identifier: Apache-2.0
"""Pooling requests (embeddings, scores): they give one answer at their end, and begin again in a new process."""

from __future__ import annotations

import msgspec
from vllm.pooling_params import PoolingParams

from torpor.vllm.values import tensor_from_value, tensor_to_value


def to_value(params: PoolingParams | None) -> str | None:
    """As JSON."""
    return None if params is None else msgspec.json.encode(params).decode()


def from_value(value: str | None) -> PoolingParams | None:
    """Of a request that no checkpoint can hold (an empty value) nothing but that it is one: it is ended by name."""
    if value is None:
        return None
    return msgspec.json.decode(value, type=PoolingParams) if value else PoolingParams()


def unsupported(params: PoolingParams | None) -> list[str]:
    """What of it cannot be preserved, by name."""
    if params is None:
        return []
    if getattr(params, "late_chunking_params", None) is not None:  # since vLLM 0.33
        return ["pooling by late chunking"]
    try:
        msgspec.json.encode(params)
    except (TypeError, ValueError):
        return ["pooling parameters that are no plain values"]
    return []


def queries_to_value(runner) -> dict | None:
    """Scores by late interaction: what was made of their queries, and how many comparisons with documents are to come.

    `runner`: a worker's LateInteractionRunner, or None. Documents tell it of themselves when they begin again.
    """
    if runner is None or not runner._query_cache:
        return None
    return {
        "tensors": {key: tensor_to_value(tensor) for key, tensor in runner._query_cache.items()},
        "uses": dict(runner._query_uses),
    }


def restore_queries(runner, value: dict | None, device=None) -> None:
    if runner is None:
        return
    runner.clear()
    if value is not None:
        queries = {key: tensor_from_value(tensor).to(device) for key, tensor in value["tensors"].items()}
        runner._query_cache.update(queries)
        runner._query_uses.update(value["uses"])
