# SPDX-License-Identifier: Apache-2.0
"""The server without an engine: its real life, gate and routes over routes that only say that they were reached."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from prometheus_client import CollectorRegistry
from vllm.utils.counter import AtomicCounter

from torpor.errors import NotFound

CLIENT, OTHER_CLIENT, ADMIN = "key-of-a-client", "key-of-another", "key-of-the-operator"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TORPOR_") and name != "TORPOR_TEST_MODEL"]:
        monkeypatch.delenv(name)


class Engine:
    """What life.Server asks of an AsyncLLM. `wakes_with`: the error of a wake in a new process. `unseen`: that of ranks
    on two hosts which do not share the directory."""

    def __init__(self, directory=None, wakes_with: Exception | None = None, unseen: Exception | None = None):
        options = {"torpor": {"checkpoint_dir": None if directory is None else str(directory)}}
        parallel = SimpleNamespace(data_parallel_size=1, world_size=1 if unseen is None else 2)
        self.vllm_config = SimpleNamespace(
            additional_config=options, parallel_config=parallel, kv_transfer_config=None,
            observability_config=SimpleNamespace(otlp_traces_endpoint=None), shutdown_timeout=0,
            structured_outputs_config=SimpleNamespace(reasoning_parser=""),
        )  # fmt: skip
        self._client_count = 1
        self.wakes_with, self.unseen = wakes_with, unseen
        if wakes_with is not None and directory is not None:  # a checkpoint, as far as a list of names goes
            (Path(directory) / "g-000001").mkdir(mode=0o700, parents=True, exist_ok=True)
        self.fails_with: Exception | None = None  # the next sleep or wake
        self.alive, self.errored, self.paused = True, False, False
        self.tags = {"weights": "attached", "kv_cache": "attached"}
        self.state = "awake"
        self.changes = True  # what its reports of sleeps and wakes say
        self.late = 0  # blocks that a post-copy wake leaves to come, one with each look
        self.calls: list[tuple] = []
        self.torpor = SimpleNamespace(call=self._torpor)
        self.output_processor = SimpleNamespace(
            request_states={}, parent_requests={}, external_req_ids={},
            add_request=None, process_outputs=None, abort_requests=None, propagate_error=None,
        )  # fmt: skip

    async def _torpor(self, method: str, options: dict | None = None):
        self.calls.append((method, options))
        if method == "fingerprint":
            return {"model": "tiny"}
        if method == "wake_up" and self.wakes_with is not None:
            raise self.wakes_with
        if method == "check_directory" and self.unseen is not None:
            raise self.unseen
        if method == "state":
            return {"engine": self.state, "tags": dict(self.tags), "checkpoint": None}
        if method == "wake_up":
            raise NotFound("there is no checkpoint")
        if method == "continue_wake":
            self.late = max(0, self.late - 1)
            return {"pending": self.late}
        return [] if method == "ledger" else {}

    async def checkpoint(self, *, metadata=None, progress=None):
        self.calls.append(("checkpoint",))
        return report(checkpoint="g-000001", checkpoint_bytes=1)

    async def sleep(self, level, mode="abort", **options):
        self.calls.append(("sleep", level, mode, options))
        self._fail()
        self.state, self.tags = "asleep", dict.fromkeys(self.tags, "detached")
        written = {"checkpoint": "g-000001", "checkpoint_bytes": 1} if options.get("to") == "disk" else {}
        return report(freed_bytes=1, changed=self.changes, **(written if self.changes else {}))

    async def wake_up(self, tags=None, **options):
        self.calls.append(("wake_up", tags, options))
        self._fail()
        if "from_checkpoint" in options:
            raise self.wakes_with or NotFound("there is no checkpoint")
        self.tags |= dict.fromkeys(tags or self.tags, "attached")
        awake = set(self.tags.values()) == {"attached"}
        self.state = "awake" if awake else "asleep"
        return report(fully_awake=awake, changed=self.changes, deferred_blocks=self.late if options.get("early") else 0)

    def _fail(self):
        if self.fails_with is not None:
            raise self.fails_with

    async def check_health(self):
        from vllm.v1.engine.exceptions import EngineDeadError

        if not self.alive:
            raise EngineDeadError

    async def is_paused(self):
        return self.paused

    async def is_sleeping(self):
        return self.paused or self.state != "awake"

    async def release_kv_cache_memory(self):
        self._fail()
        self.state, self.paused = "asleep", False
        self.tags["kv_cache"] = "detached"

    async def add_request(self, *args, **kwargs):
        self.calls.append(("add_request", *args))

    async def _add_request(self, request, *_):
        """AsyncLLM's add_request() calls it: it notes the request, and sends it to the engine core."""

    async def abort(self, *args, **kwargs):
        self.calls.append(("abort", *args))


def report(**values):
    from torpor.vllm.frontend import Report

    usual = {"changed": True, "fully_awake": True, "seconds": 0.1, "phases": [], "ledgers": [], "requests": 0}
    moved = {"saved_bytes": 0, "restored_bytes": 0, "freed_bytes": 0, "checkpoint": None}
    return Report(usual | moved | values)


def arguments(*words: str):
    from torpor.vllm.compat import lookup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = lookup("vllm.entrypoints.launchers.cli_args", "make_arg_parser")(FlexibleArgumentParser())
    return parser.parse_args(["--additional-config", '{"torpor": {}}', *words])


def build(monkeypatch, routes: list[tuple[str, str]], *words: str, engine: Engine | None = None, **settings):
    """An application with torpor's gate and routes, layered as vLLM does it, and its life.Server."""
    from torpor.vllm.server import ServerPlugin, life, metrics
    from torpor.vllm.server.settings import Settings
    from vllm import plugins
    from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
    from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

    monkeypatch.setattr(plugins, "load_endpoint_plugins", lambda tasks: [ServerPlugin()])
    monkeypatch.setattr(life, "Metrics", lambda model: metrics.Metrics(model, CollectorRegistry()))
    monkeypatch.setattr(life, "holds_memory_of", lambda config: True)
    app = FastAPI()
    app.state.args = arguments(*words)
    app.root_path = app.state.args.root_path
    for method, path in routes:
        add_echo(app, method, path)
    attach_endpoint_plugins(app, ("generate",))
    init_entrypoints_middleware(app.state.args, app, ("generate",))
    app.state.openai_serving_models = SimpleNamespace(lora_id_counter=AtomicCounter())
    app.state.torpor = life.Server(engine or Engine(), app.state, Settings(**settings), "model")
    return app, app.state.torpor


def add_echo(app: FastAPI, method: str, path: str) -> None:
    if method == "WEBSOCKET":

        @app.websocket(path)
        async def accept(websocket: WebSocket):
            await websocket.accept()
            await websocket.close()

    elif method == "MOUNT":
        inner = FastAPI()
        inner.add_api_route("/{rest:path}", lambda: {"reached": path}, methods=["GET"])
        app.mount(path, inner)
    else:
        app.add_api_route(path, lambda: {"reached": path}, methods=[method])


OF_ENGINE = {"model_name": "model", "engine": "0"}  # the labels of all metrics of build()'s server


def metric(server, name: str, **labels: str) -> float | None:
    """None: there is no such series."""
    return server.metrics.registry.get_sample_value(name, OF_ENGINE | labels)


def metrics_by(server, name: str, label: str) -> dict[str, float]:
    """The values of a metric with one label of its own."""
    samples = [sample for family in server.metrics.registry.collect() for sample in family.samples]
    return {sample.labels[label]: sample.value for sample in samples if sample.name == name}


async def started(server) -> None:
    """As the plugin starts it, without its tasks."""
    server.tasks.run = lambda coroutine, name=None: coroutine.close()
    server.tasks.keep = lambda loop, name: None
    await server.start()
    del server.tasks.run, server.tasks.keep


def client(app, key: str | None = CLIENT, **headers) -> httpx.AsyncClient:
    authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://server", headers=authorization | headers)


def run(scene, seconds: float = 600):
    return asyncio.run(asyncio.wait_for(scene, seconds))


async def client_goes(engine, request_id: str) -> None:
    """As generate() of vLLM notices it."""
    try:
        raise asyncio.CancelledError
    except asyncio.CancelledError:
        await engine.abort(request_id, internal=True)


def concrete(path: str) -> str:
    """A path that the template matches."""
    return path.replace("{response_id}", "resp_1").replace("{adapter_name}", "one").replace("{response}", "r")
