# SPDX-License-Identifier: Apache-2.0
"""Alive, ready, deploy/, sleeping by vLLM's modes: without an engine."""

import asyncio
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from server_calls import EVERYTHING
from server_stubs import (  # noqa: F401
    ADMIN,
    CLIENT,
    OTHER_CLIENT,
    Engine,
    arguments,
    build,
    client,
    no_settings,
    run,
    started,
)
from torpor.errors import WrongState
from torpor.vllm.server import hosts
from vllm.exceptions import GracefulHTTPError

KEYS = ("--api-key", CLIENT, OTHER_CLIENT)

# --- alive, ready ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "health"), [
    ("incompatible", 200), ("corruption", 200), ("unauthenticated", 200), ("unsupported", 200), ("not_found", 200),
    ("invalid_argument", 200), ("failed_precondition", 200), ("io EROFS", 200), ("io ENOTDIR", 200),
    ("resource_exhausted", 503), ("io", 503), ("io EIO", 503), ("unavailable", 503), ("device", 503),
    ("device ENOENT", 503), ("timeout", 503), ("aborted", 503), ("internal", 503),
])  # fmt: skip
def test_a_server_is_alive_where_a_restart_cannot_help(monkeypatch, tmp_path, code, health):
    async def scene():
        from torpor import errors

        nonlocal code
        code, *name = code.split()
        native = getattr(errno, name[0]) if name else 0
        problem = errors.make(code, "the checkpoint is of another model", "use another one", native=native)
        app, server = build(monkeypatch, EVERYTHING, engine=Engine(tmp_path / "d", problem), wake_from=str(tmp_path))
        await started(server)
        assert server.state == "failed"
        async with client(app) as http:
            alive, ready = await http.get("/health"), await http.get("/torpor/ready")
            assert alive.status_code == health and alive.json()["error"]["code"] == code
            assert ready.status_code == 503 and ready.json()["error"]["next_step"] == "use another one"
            assert (await http.post("/v1/completions")).status_code == 503
            server.engine.alive = False
            assert (await http.get("/health")).status_code == 503

    run(scene())


@pytest.mark.parametrize("settings", [{}, {"checkpoint_interval_seconds": 60}, {"object_store": "file:///nowhere"}])
def test_a_directory_that_another_host_does_not_see_is_warned_of_at_the_start(monkeypatch, tmp_path, settings):
    async def scene():
        said = []
        monkeypatch.setattr(hosts.logger, "error", lambda words, *values: said.append(words % values))
        unseen = WrongState("rank 1: the host b does not see /d/s-000001", "share the directory")
        app, server = build(monkeypatch, EVERYTHING, engine=Engine(tmp_path / "d", unseen=unseen), **settings)
        await started(server)
        async with client(app) as http:
            ready, alive = await http.get("/torpor/ready"), await http.get("/health")
        assert len(said) == 1 and "the host b does not see" in said[0]
        assert (alive.status_code, ready.status_code) == ((200, 503) if settings else (200, 200))
        assert ("ledger" in dict(server.engine.calls)) == (not settings)  # it has begun to serve
        if settings:
            assert "the host b does not see" in ready.json()["error"]["what"]

    run(scene())


def test_asleep_it_is_alive_and_not_ready(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, EVERYTHING)
        await started(server)
        async with client(app) as http:
            assert [(await http.get(path)).status_code for path in ("/health", "/torpor/ready")] == [200, 200]
            await server.sleep()
            assert [(await http.get(path)).status_code for path in ("/health", "/torpor/ready")] == [200, 503]

    run(scene())


def test_an_engine_that_was_lost_asks_for_a_restart(monkeypatch):
    async def scene():
        from torpor.errors import DeviceError

        app, server = build(monkeypatch, EVERYTHING)
        await started(server)
        server.engine.fails_with, server.engine.state = DeviceError("it does not let go"), "unrecoverable"
        with pytest.raises(DeviceError):
            await server.sleep()
        async with client(app) as http:
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/torpor/ready")).status_code == 503
            assert (await asyncio.wait_for(http.post("/v1/completions"), 5)).status_code == 503

    run(scene())


def test_an_engine_that_the_start_has_lost_asks_for_a_restart(monkeypatch, tmp_path):
    """The wake has lost the engine, so going on without the checkpoint does not fit its state."""

    async def scene():
        engine = Engine(tmp_path, WrongState("the engine is unrecoverable", "start a new one"))
        engine.state = "unrecoverable"
        app, server = build(monkeypatch, EVERYTHING, engine=engine, on_wake_error="recompute")
        await started(server)
        async with client(app) as http:
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/torpor/ready")).json()["restart_may_help"] is True

    run(scene())


# --- deploy/ ----------------------------------------------------------------------------------------------------------

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_page_for_operators_names_every_alert_and_only_metrics_that_exist():
    import yaml
    from prometheus_client import CollectorRegistry
    from torpor.vllm import connector_stats
    from torpor.vllm.server.metrics import Metrics

    page = (DEPLOY.parent / "docs/operations.md").read_text()
    alerts = yaml.safe_load((DEPLOY / "helm/torpor/files/alerts.yaml").read_text())["groups"][0]["rules"]
    assert set(re.findall(r"\[`(Torpor\w+)`\]", page)) == {each["alert"] for each in alerts}
    registry = CollectorRegistry()
    Metrics("model", registry)
    offloading = set(re.findall(r'"(torpor_offload_\w+)"', Path(connector_stats.__file__).read_text()))
    names = {metric.name for metric in registry.collect()} | offloading
    documented = {name.removesuffix("_total") for name in re.findall(r"`(torpor_\w+)", page)}
    assert len(documented) > 15 and documented - names == set()


def test_the_kustomize_base_is_made_from_the_present_chart():
    sys.path.insert(0, str(DEPLOY.parent / "tests/deploy"))
    import chart

    head = (DEPLOY / "kustomize/base/torpor.yaml").read_text().splitlines()[0]
    assert head.endswith(chart.digest()), "the chart has changed: run tools/dev deploy"


def test_a_pod_starts_a_server_that_keeps_its_promises(monkeypatch):
    import yaml
    from torpor.vllm import serve
    from torpor.vllm.server.settings import Settings

    documents = list(yaml.safe_load_all((DEPLOY / "kustomize/base/torpor.yaml").read_text()))
    stateful = next(each for each in documents if each["kind"] == "StatefulSet")
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python3", "-m", serve.__name__]
    monkeypatch.setattr(os, "environ", dict(os.environ))
    rest = arguments(*serve.take_options(container["args"]))
    settings = Settings.from_environment()
    assert rest.model_tag == "/models/llm" and rest.port == container["ports"][0]["containerPort"]
    assert settings.wake_on_request and os.environ["TORPOR_CHECKPOINT_DIR"].startswith("/state/")
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"  # the volume's modes stay
    delay = container["lifecycle"]["preStop"]["exec"]["command"]
    assert delay[:2] == ["/bin/sh", "-c"] and re.fullmatch(r"sleep \d+", delay[2])
    assert pod["terminationGracePeriodSeconds"] >= int(delay[2].split()[1]) + settings.sigterm_seconds + 25
    paths = {name: container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")}
    assert paths == {"livenessProbe": "/health", "readinessProbe": "/torpor/ready"}
    # A start that failed succeeds here, so that /health decides whether a restart may help.
    assert container["startupProbe"]["tcpSocket"] == {"port": "http"} and "httpGet" not in container["startupProbe"]
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 300
    assert {each["name"] for each in container["env"]} >= {
        "VLLM_API_KEY",
        "TORPOR_ADMIN_KEY",
    }  # not among the arguments


def test_nobody_connects_to_a_server_that_starts():
    """vLLM binds its port before it loads the model, and listens after the start, which a startupProbe waits for."""
    import socket

    from vllm.entrypoints.launchers import launcher

    bound = launcher.create_server_socket(("127.0.0.1", 0), reuse_port=False)
    with bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname())


def test_a_unit_of_systemd_starts_a_server_that_keeps_its_promises(monkeypatch, tmp_path):
    from torpor.vllm import serve
    from torpor.vllm.server.settings import Settings

    text = (DEPLOY / "systemd/torpor@.service").read_text()
    lines = [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")]
    unit = dict(line.split("=", 1) for line in lines if "=" in line)
    in_unit = dict(line.split("=", 2)[1:] for line in lines if line.startswith("Environment="))
    python, *words = unit["ExecStart"].replace("%i", "llm").replace("${PORT}", "8000").split()
    assert words[:2] == ["-m", serve.__name__]
    monkeypatch.setattr(os, "environ", os.environ | in_unit)
    given = arguments(*serve.take_options(words[2:]))
    settings = Settings.from_environment()
    assert given.model_tag == "${MODEL}" and given.host == "127.0.0.1" and settings.wake_on_request
    assert os.environ["TORPOR_CHECKPOINT_DIR"] == "/var/lib/" + unit["StateDirectory"]
    assert float(unit["TimeoutStopSec"]) >= settings.sigterm_seconds + 30
    # With ProtectSystem=strict only these can be written to.
    assert in_unit["HOME"] == in_unit["XDG_CACHE_HOME"] == "/var/cache/" + unit["CacheDirectory"]
    in_file = {"TORPOR_SERVER_SIGTERM_SECONDS": "300", "TORPOR_SERVER_WAKE_ON_REQUEST": "0"}
    monkeypatch.setattr(os, "environ", os.environ | in_file)  # systemd's order: EnvironmentFile= wins
    serve.take_options(words[2:])
    settings = Settings.from_environment()
    assert settings.sigterm_seconds == 300 and not settings.wake_on_request
    assert unit["KillMode"] == "mixed" and unit["RestartPreventExitStatus"] == "2"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: systemd's own words were not checked")
    (tmp_path / "torpor@.service").write_text(text.replace(python, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "torpor@.service"], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_alerts_and_board_ask_for_metrics_that_exist(monkeypatch):
    import json

    from prometheus_client import CollectorRegistry
    from torpor.vllm.server.metrics import Metrics

    registry = CollectorRegistry()
    Metrics("model", registry)
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    exist = {family.name + end for family in registry.collect() for end in suffixes[family.type]}
    board = json.loads((DEPLOY / "grafana/torpor.json").read_text())
    assert all(panel["description"].endswith("?") for panel in board["panels"])  # the question that it answers
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked.append((DEPLOY / "helm/torpor/files/alerts.yaml").read_text())
    assert set(re.findall(r"\btorpor_\w+", "\n".join(asked))) - {"torpor_phase_seconds"} <= exist


# --- sleeping by mode -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_the_modes_of_vllm_reach_the_engine(monkeypatch, mode):
    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, [], *KEYS)
        await started(server)
        async with client(app, ADMIN) as http:
            answer = await http.post("/sleep", params={"level": 1, "mode": mode})
            assert answer.status_code == 200, answer.text
        call = next(call for call in server.engine.calls if call[0] == "sleep")
        assert call[2] == ("abort" if mode == "wait" else mode)  # none is left that could be aborted
        assert call[3]["preserve_state"] is False

    run(scene())


def test_by_wait_running_requests_end_first_and_new_ones_wait(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, EVERYTHING)
        await started(server)
        server.engine.output_processor.request_states["running"] = object()
        falling = asyncio.create_task(server.sleep(1, "wait", False))
        async with client(app) as http:
            await asyncio.sleep(0.05)
            late = asyncio.create_task(http.post("/v1/completions"))
            await asyncio.sleep(0.05)
            assert server.state == "falling asleep" and not late.done() and not falling.done()
            assert not any(call[0] == "sleep" for call in server.engine.calls)
            server.engine.output_processor.request_states.clear()
            await falling
            assert server.state == "asleep" and not late.done()
            await server.wake_up()
            assert (await late).status_code == 200

    run(scene())


@pytest.mark.parametrize("still", ["asleep", "paused"])
def test_requests_that_cannot_end_are_not_waited_for(monkeypatch, still):
    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, [])
        await started(server)
        server.engine.output_processor.request_states["running"] = object()
        if still == "asleep":
            await server.sleep()
        server.engine.paused = still == "paused"
        before = server.state
        async with client(app, ADMIN) as http:
            answer = await asyncio.wait_for(http.post("/sleep", params={"mode": "wait"}), 5)
            assert answer.status_code == 409 and "stands still" in answer.text
        assert server.state == before

    run(scene())


def test_a_server_whose_kv_cache_was_released_sleeps(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, [("POST", "/v1/completions")], wake_on_request=True)
        await started(server)
        engine = server.engine
        engine.fails_with = RuntimeError("requires a completed pause first")
        with pytest.raises(RuntimeError, match="pause"):
            await engine.release_kv_cache_memory()
        assert server.state == "awake" and not server.operating()
        engine.fails_with, engine.paused = None, True
        async with server.only_one():
            with pytest.raises(GracefulHTTPError, match="another operation") as refused:
                await engine.release_kv_cache_memory()
            assert refused.value.http_status == 409 and server.state == "awake"
        await engine.release_kv_cache_memory()
        assert server.state == "asleep"
        async with client(app) as http:
            assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await asyncio.wait_for(http.post("/v1/completions"), 5)).status_code == 200
        assert server.state == "awake"

    run(scene())


def test_a_paused_engine_sleeps_as_vllm_has_it(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, [])
        await started(server)
        async with client(app) as http:
            for server.engine.paused in (False, True):
                assert (await http.get("/is_sleeping")).json() == {"is_sleeping": server.engine.paused}

    run(scene())


def test_a_server_that_ends_does_not_wait_for_requests_to_end(monkeypatch):
    async def scene():
        from torpor.errors import WrongState

        _, server = build(monkeypatch, [])
        await started(server)
        server.engine.output_processor.request_states["running"] = object()
        falling = asyncio.create_task(server.sleep(1, "wait", False))
        await asyncio.sleep(0.05)
        server.enter("ending")
        with pytest.raises(WrongState, match="ends"):
            await falling
        assert not server.operation.locked()

    run(scene())


def test_a_post_copy_wake_ends_without_a_step(monkeypatch):
    async def scene():
        from torpor.vllm.server import life

        monkeypatch.setattr(life, "_LATE_SECONDS", 0)
        _, server = build(monkeypatch, [])
        await started(server)

        async def looks(late: int, early: bool, then_sleep: bool) -> int:
            await server.sleep()
            server.engine.late, before = late, len(server.engine.calls)
            await server.wake_up(early=early)
            if then_sleep:
                await server.sleep()
            while server.tasks.running:
                await asyncio.sleep(0)
            return sum(call[0] == "continue_wake" for call in server.engine.calls[before:])

        assert await looks(3, early=True, then_sleep=False) == 3
        assert await looks(3, early=False, then_sleep=False) == 0
        assert await looks(10**9, early=True, then_sleep=True) < 10  # the sleep waits for the rest itself

    run(scene())
