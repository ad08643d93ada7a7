# SPDX-License-Identifier: Apache-2.0
"""Spans of sleeps, wakes and checkpoints, as a collector gets them by vLLM's own exporter."""

import sys

import pytest
from trace_collector import Collector, attributes

from torpor.errors import WrongState

CLOCKS = 1_000_000  # ns; what two clocks of the machine may differ by meanwhile


@pytest.fixture
def traced(one, monkeypatch):
    """The engine of this process, as `otlp_traces_endpoint` leaves it; `sent()` when all is at the collector."""
    from opentelemetry import trace
    from vllm.tracing import init_tracer

    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
        monkeypatch.setattr(one.engine.vllm_config.observability_config, "otlp_traces_endpoint", collector.endpoint)
        init_tracer("vllm.llm_engine", collector.endpoint)
        collector.sent = trace.get_tracer_provider().force_flush
        yield collector
        trace.get_tracer_provider().shutdown()


def test_each_operation_is_a_span_and_its_phases_are_spans_in_it(one, traced):
    answers = one.begin(5)
    reports = {
        "sleep": one.llm.sleep(level=1, preserve_state=True, to="disk"),
        "wake_up": one.llm.wake_up(),
        "checkpoint": one.llm.checkpoint(),
    }
    with pytest.raises(WrongState):
        one.llm.wake_up(from_checkpoint="/nowhere")  # it has requests of its own
    assert one.finish(answers) == one.expected
    traced.sent()
    for operation, report in reports.items():
        span = traced.named(f"torpor.{operation}")[0]
        said = attributes(span)
        assert said["torpor.requests"] == report.requests and said["torpor.saved_bytes"] == report.saved_bytes
        assert said["torpor.checkpoint"] == report.checkpoint and span.status.code == span.status.STATUS_CODE_UNSET
        phases = traced.inside(span)
        assert [phase.name for phase in phases] == [f"torpor.{operation}.{each['name']}" for each in report.phases]
        at = span.start_time_unix_nano
        for phase, each in zip(phases, report.phases, strict=True):
            assert phase.start_time_unix_nano >= at - CLOCKS and attributes(phase)["torpor.bytes"] == each["bytes"]
            assert phase.end_time_unix_nano - phase.start_time_unix_nano == pytest.approx(each["seconds"] * 1e9, abs=10)
            at = phase.end_time_unix_nano
        assert at <= span.end_time_unix_nano + CLOCKS
    _, failed = traced.named("torpor.wake_up")
    assert failed.status.code == failed.status.STATUS_CODE_ERROR and "requests of its own" in failed.status.message
    assert [event.name for event in failed.events] == ["exception"] and not traced.inside(failed)


def test_without_vllms_option_opentelemetry_is_not_looked_at(one, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # an import of it fails
    answers = one.begin(5)
    assert one.llm.sleep(level=1, preserve_state=True).changed and one.llm.wake_up()
    assert one.finish(answers) == one.expected
