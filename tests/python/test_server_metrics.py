# SPDX-License-Identifier: Apache-2.0
"""Metrics of a server without an engine: what is there from the start, and what each operation changes."""

import ast
import asyncio
import re
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from server_calls import EVERYTHING
from server_stubs import (  # noqa: F401
    OF_ENGINE,
    Engine,
    build,
    client,
    metric,
    metrics_by,
    no_settings,
    report,
    run,
    started,
)
from torpor.errors import NotEnoughRoom, WrongState
from torpor.vllm import frontend
from torpor.vllm.server import metrics
from torpor.vllm.server.metrics import Metrics
from torpor.vllm.server.route_table import ROUTES
from torpor.vllm.server.tasks import TASKS

ROOT = Path(__file__).parents[2]


def families(registry) -> dict:
    return {family.name: family for family in registry.collect()}


def test_counts_are_counters_and_amounts_and_facts_are_gauges():
    registry = CollectorRegistry()
    Metrics("model", registry)
    kinds = {name: family.type for name, family in families(registry).items()}
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        "torpor_operations", "torpor_moved_bytes", "torpor_requests_refused", "torpor_response_log_failures",
        "torpor_automatic_operations", "torpor_task_failures", "torpor_responses_dropped", "torpor_failovers",
        "torpor_session_actions", "torpor_pushes",
    }  # fmt: skip
    assert {name for name, kind in kinds.items() if kind == "histogram"} == {
        "torpor_operation_seconds", "torpor_phase_seconds", "torpor_checkpoint_seconds", "torpor_queue_seconds",
        "torpor_failover_seconds", "torpor_session_action_seconds",
    }  # fmt: skip
    for name in ("torpor_response_log_bytes", "torpor_requests_queued", "torpor_start_requests", "torpor_build_info"):
        assert kinds[name] == "gauge"


def test_each_verb_of_sessions_is_counted_from_the_start():
    registry = CollectorRegistry()
    Metrics("model", registry)
    counted = {
        (sample.labels["verb"], sample.labels["outcome"])
        for sample in families(registry)["torpor_session_actions"].samples
        if sample.name == "torpor_session_actions_total"
    }
    verbs = {
        path.rpartition("/")[2] for method, path in ROUTES if path.startswith("/v1/sessions/{") and method == "POST"
    }
    assert verbs > {"hibernate", "demote"} and {verb for verb, _ in counted} == verbs | {"delete"}
    assert {("demote", "accepted"), ("pin", "clipped")} <= counted


def test_every_series_has_the_labels_of_vllm_and_values_without_blanks():
    registry = CollectorRegistry()
    served = Metrics("org/model", registry)
    for state in metrics.STATES:
        served.enter(state)
    for task in TASKS:
        served.task_failed(task)
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert len(samples) > 100
    for sample in samples:
        assert sample.labels.items() >= {"model_name": "org/model", "engine": "0"}.items()
        assert not any(" " in value for value in sample.labels.values()), sample
    texts = [family.documentation for family in registry.collect()]
    assert len(set(texts)) == len(texts) and min(len(text.split()) for text in texts) > 5


def test_counters_and_histograms_get_no_series_that_they_do_not_begin_with(monkeypatch, tmp_path):
    """All that a server may do is done: every series that it then has was there before, with 0."""

    def series(server):
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in server.metrics.registry.collect()
            if family.type in ("counter", "histogram")
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    async def scene():
        app, server = build(monkeypatch, EVERYTHING, engine=Engine(tmp_path), new_requests="refuse")
        before = series(server)
        assert not any(before.values())
        await started(server)
        for operation, tier in metrics.OPERATIONS:
            server.metrics.record(operation, tier, report(freed_bytes=1))
            server.metrics.failed(operation, tier)
        for to in ("host", "disk"):
            await server.sleep(to=to)
            async with client(app) as http:
                assert (await http.post("/v1/completions")).status_code == 503
            server.engine.fails_with = NotEnoughRoom("no room")
            with pytest.raises(NotEnoughRoom):
                await server.wake_up()
            server.engine.fails_with = None
            await server.wake_up()
        await server.checkpoint()
        for ok in (True, False):
            server.metrics.pushed(ok, 1e9)
        for task in TASKS:
            server.tasks.failed(task, ValueError(task))
        after = series(server)
        assert after.keys() == before.keys() and sum(after.values()) > 50

    run(scene())


def test_each_phase_of_an_operation_has_a_series_and_each_series_a_phase(one):
    """A checkpoint is written while the engine serves. A wake opens and quiesces for a checkpoint in a new process."""

    def beyond(stage: str) -> None:
        while one.engine.torpor.call("continue_checkpoint") == stage:
            time.sleep(0.001)

    registry = CollectorRegistry()
    recorded = Metrics("model", registry)
    answers = one.begin(5)
    for to in ("host", "disk"):
        recorded.record("sleep", to, one.llm.sleep(level=1, preserve_state=True, to=to))
        recorded.record("wake", to, one.llm.wake_up())
    began = time.time()
    one.engine.torpor.call("begin_checkpoint")
    begun = time.time()
    beyond("copying")
    taken = frontend.finish(frontend.while_frozen(frontend.BlockingSide(one.engine), "take_checkpoint", {}))
    beyond("writing")
    checkpoint = one.engine.torpor.call("end_checkpoint") | taken
    assert began <= checkpoint["began"] <= begun  # the phases are after that
    recorded.record("checkpoint", "disk", checkpoint)
    assert one.finish(answers) == one.expected
    counted = {
        (sample.labels["operation"], sample.labels["phase"]): sample.value
        for sample in families(registry)["torpor_phase_seconds"].samples
        if sample.name == "torpor_phase_seconds_count"
    }
    assert counted.keys() == {(name, phase) for name, phases in metrics.PHASES.items() for phase in phases}
    assert {each for each, count in counted.items() if count == 0} <= {("wake", "open"), ("wake", "quiesce")}


def test_phases_and_tasks_are_those_of_the_sources():
    header = (ROOT / "engine/phases.h").read_text()
    named = set(re.findall(r'"([a-z]+)"', header[header.index("kPhaseNames") : header.index("kEngineStates")]))
    assert {phase for phases in metrics.PHASES.values() for phase in phases} == named - {"other", "attach"}
    called = set()
    for path in Path(metrics.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        constants = {ast.unparse(node.targets[0]): node.value for node in assigned}
        for node in ast.walk(tree):
            how = re.search(r"tasks\.(keep|run|failed)$|\.(_said)$", ast.unparse(getattr(node, "func", node)))
            if isinstance(node, ast.Call) and how is not None:
                names = node.args[:1] if how[1] == "failed" or how[2] else node.args[1:2]
                known = [constants.get(ast.unparse(each), each) for each in names]
                called |= {each.value for each in known if isinstance(each, ast.Constant)}
    assert called == set(TASKS)


def test_what_is_not_known_is_absent(monkeypatch, tmp_path):
    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path), response_log="off")
        unknown = (
            "torpor_checkpoint_timestamp_seconds", "torpor_checkpoint_bytes", "torpor_start_timestamp_seconds",
            "torpor_response_log_bytes", "torpor_checkpoint_interval_seconds", "torpor_push_timestamp_seconds",
            "torpor_response_log_failing", "torpor_checkpoint_not_due_timestamp_seconds",
        )  # fmt: skip
        for name in unknown:
            assert metric(server, name) is None
        await started(server)
        assert metric(server, "torpor_start_timestamp_seconds") > 1e9
        assert metric(server, "torpor_checkpoint_timestamp_seconds") is None
        await server.checkpoint()
        assert metric(server, "torpor_checkpoint_timestamp_seconds") > 1e9
        assert metric(server, "torpor_checkpoint_bytes") == 1
        assert metric(server, "torpor_response_log_bytes") is None  # it has none
        _, server = build(monkeypatch, [], checkpoint_interval_seconds=5)
        await started(server)
        assert metric(server, "torpor_checkpoint_interval_seconds") == 5
        assert metric(server, "torpor_response_log_bytes") is not None
        assert metric(server, "torpor_response_log_failing") == 0

    run(scene())


def test_versions_are_labels(monkeypatch):
    import torpor
    import vllm

    _, server = build(monkeypatch, [])
    versions = {"version": torpor.__version__, "vllm_version": vllm.__version__}
    assert metric(server, "torpor_build_info", **versions) == 1


def counts(server, operation: str, tier: str) -> tuple[float | None, ...]:
    """How many were good, failed, and were measured."""
    of = {"operation": operation, "tier": tier}
    return (
        *(metric(server, "torpor_operations_total", **of, outcome=outcome) for outcome in ("ok", "error")),
        metric(server, "torpor_operation_seconds_count", **of),
    )


def test_a_call_that_changes_nothing_is_no_operation(monkeypatch):
    async def scene():
        _, server = build(monkeypatch, [])
        await started(server)
        await server.sleep()
        server.engine.changes = False
        for _ in range(3):
            await server.sleep()
        assert counts(server, "sleep", "host") == (1, 0, 1)
        server.engine.changes = True
        await server.wake_up()
        server.engine.changes = False
        await server.wake_up()
        assert counts(server, "wake", "host") == (1, 0, 1)

    run(scene())


@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_wake_has_the_tier_that_it_reads_from(monkeypatch, tmp_path, to):
    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)
        await server.sleep(to=to)
        server.engine.changes = False
        await server.sleep(to="host" if to == "disk" else "disk")  # it sleeps already
        server.engine.changes = True
        server.engine.fails_with = WrongState("requests run")
        with pytest.raises(WrongState):
            await server.wake_up()
        server.engine.fails_with = None
        await server.wake_up()
        assert counts(server, "wake", to) == (1, 1, 1)
        assert counts(server, "wake", "host" if to == "disk" else "disk") == (0, 0, 0)

    run(scene())


def test_what_a_start_found_is_counted_by_its_result():
    registry = CollectorRegistry()
    served = Metrics("model", registry)
    replayed = {"extended": ["a", "b"], "added": ["c"], "dropped": ["gone", "gone too"]}
    served.started(8, replayed, {"b": "failed", "unknown": "dropped"})
    found = {result: registry.get_sample_value("torpor_start_requests", OF_ENGINE | {"result": result})
             for result in metrics.RESULTS}  # fmt: skip
    assert found == {"restored": 4, "extended": 1, "added": 1, "dropped": 3, "failed": 1}


def test_waiting_is_measured(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, EVERYTHING)
        await started(server)
        async with client(app) as http:
            await http.post("/v1/completions")
            await server.sleep()
            call = asyncio.create_task(http.post("/v1/completions"))
            while server.queued == 0:
                await asyncio.sleep(0)
            assert metric(server, "torpor_requests_queued") == 1
            await server.wake_up()
            await call
        assert metric(server, "torpor_requests_queued") == 0
        assert metric(server, "torpor_queue_seconds_count") == 1  # not the one that did not wait
        assert metric(server, "torpor_queue_seconds_sum") > 0

    run(scene())


def test_the_memory_of_an_engine_is_known_from_the_start(monkeypatch):
    async def scene():
        engine = Engine()
        stub = engine._torpor
        engine.torpor.call = lambda method, options=None: (
            asyncio.sleep(0, [{"tags": {"weights": {"physical_bytes": 7}}}]) if method == "ledger" else stub(method)
        )
        _, server = build(monkeypatch, [], engine=engine)
        await started(server)
        assert metric(server, "torpor_tag_bytes", tag="weights", place="engine") == 7
        assert metrics_by(server, "torpor_state", "state")["awake"] == 1

    run(scene())
