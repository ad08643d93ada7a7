"""Pooling requests (embeddings, scores): they give one answer at their end, and begin again in a new process."""

from __future__ import annotations

import msgspec
from vllm.pooling_params import PoolingParams


def to_value(params: PoolingParams | None) -> str | None:
    """As JSON."""
    return None if params is None else msgspec.json.encode(params).decode()


def from_value(value: str | None) -> PoolingParams | None:
    return None if value is None else msgspec.json.decode(value, type=PoolingParams)


def unsupported(params: PoolingParams | None) -> list[str]:
    """What of it cannot be preserved, by name."""
    if params is None:
        return []
    if params.late_interaction_params is not None:
        return ["scores by late interaction: a worker keeps their queries"]
    try:
        msgspec.json.encode(params)
    except (TypeError, ValueError):
        return ["pooling parameters that are no plain values"]
    return []
