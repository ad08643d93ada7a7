# SPDX-License-Identifier: Apache-2.0
"""Spans of sleeps, wakes and checkpoints, and of their phases, where vLLM was told to trace (--otlp-traces-endpoint).

They go where vLLM's own go: it has made the exporter. Without that option OpenTelemetry is not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping
from contextvars import ContextVar
from typing import TypeVar

# Headers of the HTTP request that asks for an operation; with a `traceparent` the operation belongs to that trace.
Found = TypeVar("Found", bound=dict)

asked_by: ContextVar[Mapping[str, str] | None] = ContextVar("torpor_asked_by", default=None)

_OF_REPORT = (
    "level", "preserve_state", "to", "changed", "fully_awake", "requests", "kept_blocks", "saved_bytes", "reused_bytes",
    "freed_bytes", "restored_bytes", "checkpoint", "note",
)  # fmt: skip


async def traced(engine, operation: str, work: Awaitable[Found]) -> Found:
    """What `work` returns, a report, or raises. `engine`: LLMEngine or AsyncLLM."""
    if engine.vllm_config.observability_config.otlp_traces_endpoint is None:
        return await work
    began = time.time_ns()
    try:
        report = await work
    except BaseException as problem:
        _send(operation, began, {}, problem)
        raise
    _send(operation, began, report, None)
    return report


def _send(operation: str, began: int, report: dict, problem: BaseException | None) -> None:
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    ended = time.time_ns()
    tracer = trace.get_tracer("torpor")
    span = tracer.start_span(
        f"torpor.{operation}",
        context=TraceContextTextMapPropagator().extract(asked_by.get() or {}, context.get_current()),
        start_time=began,
        attributes={f"torpor.{name}": report[name] for name in _OF_REPORT if name in report},
    )
    if problem is not None:
        span.record_exception(problem)
        span.set_status(trace.StatusCode.ERROR, str(problem))
    if (core_began := report.get("began")) is not None:
        inside = trace.set_span_in_context(span)
        for phase in report["phases"]:
            start = int((core_began + phase["after"]) * 1e9)
            name, moved = f"torpor.{operation}.{phase['name']}", {"torpor.bytes": phase["bytes"]}
            tracer.start_span(name, inside, start_time=start, attributes=moved).end(start + int(phase["seconds"] * 1e9))
    span.end(ended)
