# SPDX-License-Identifier: Apache-2.0
"""The end of a server, and of one that has failed: what runs goes on in the next one, and no client keeps the process.
With vLLM's HTTP server and output processor, without an engine."""

import asyncio
import dataclasses
import os
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import uvloop
from fastapi.responses import StreamingResponse
from server_stubs import CLIENT, Engine, build, client, client_goes, metric, no_settings, run, started  # noqa: F401
from starlette.datastructures import Headers
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from torpor import _core
from torpor.errors import Aborted, Incompatible, WrongState
from torpor.vllm.server.recorder import tenant_of_call

NAMES = ("a", "b", "c")  # of requests


@pytest.fixture(autouse=True)
def handlers():
    """The signals' handlers of the test runner come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class EngineOfRequests(Engine):
    """Its requests are those of vLLM's own output processor."""

    def __init__(self, directory, shutdown_timeout: int = 0):
        super().__init__(directory)
        self.vllm_config.shutdown_timeout = shutdown_timeout
        self.output_processor = OutputProcessor(None, log_stats=False)

    async def abort(self, request_id, internal: bool = False):
        self.output_processor.abort_requests([request_id] if isinstance(request_id, str) else request_id, internal)

    def add(self, name: str) -> RequestOutputCollector:
        """Return the queue of a request's client."""
        request = EngineCoreRequest(
            request_id=name, external_req_id=name, prompt_token_ids=[1, 2, 3], pooling_params=None, mm_features=None,
            sampling_params=SamplingParams(max_tokens=20, detokenize=False, output_kind=RequestOutputKind.DELTA),
            arrival_time=1.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        collector = RequestOutputCollector(RequestOutputKind.DELTA, name)
        self.output_processor.add_request(request, None, queue=collector)
        return collector

    def give(self, name: str, *tokens: int, finish: FinishReason | None = None) -> None:
        self.output_processor.process_outputs([EngineCoreOutput(name, list(tokens), finish_reason=finish)])


class Http:
    """vLLM's HTTP server and its handlers, which note what they get. It ends at the first signal, unless it drains."""

    def __init__(self, server):
        self.started, self.should_exit, self.force_exit = True, False, False
        self.server_state = SimpleNamespace(connections=set())
        self.signals: list[int] = []
        self.drains = server.engine.vllm_config.shutdown_timeout > 0
        server.app_state.server = self
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._end, number)

    def _end(self, number: int) -> None:
        self.signals.append(number)
        self.should_exit = not self.drains


class Store:
    """An object store that this server owns."""

    def __init__(self, server, pushes: bool = True):
        self._server, self._pushes, self.released, self.stopped = server, pushes, False, False

    async def push(self, checkpoint: str) -> str:
        return "pushed" if self._pushes else ""

    async def release(self) -> None:
        assert self._server.log.closed and not self.released and not self.stopped
        self.released = True

    def stop_copies(self) -> None:
        self.stopped = True


async def ready(monkeypatch, directory, shutdown_timeout: int = 0, **settings):
    """Return a server that serves NAMES, its vLLM's HTTP server, and the queues of its clients."""
    from torpor.vllm.server import ending

    monkeypatch.setattr(ending, "_READING_SECONDS", 0.01)
    monkeypatch.setattr(ending, "_LOOK_SECONDS", 0.001)
    app, server = build(
        monkeypatch, [], "--api-key", CLIENT, engine=EngineOfRequests(directory, shutdown_timeout), **settings
    )
    await started(server)
    tenant_of_call.set(server.tenant(Headers({"Authorization": f"Bearer {CLIENT}"})))
    queues = {name: server.engine.add(name) for name in NAMES}
    for name in NAMES:
        server.engine.give(name, 5, 6)
        await queues[name].get()
    http = Http(server)
    await ending.take_signals(server)
    return app, server, http, queues


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def states(answers) -> dict[str, str]:
    return {name: answers.get(name)["state"] for name in NAMES}


def next_log(directory) -> _core.DeliveryLog:
    """What the next server finds. This one still holds the lock."""
    copy = shutil.copytree(directory / "answers", directory / "copy")
    return _core.DeliveryLog({"directory": str(copy), "engine": {"model": "tiny"}})


async def said_to(queue) -> str:
    with pytest.raises(GracefulHTTPError) as said:
        await queue.get()
    return str(said.value)


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loop", "dies"), [(asyncio.run, False), (uvloop.run, False), (uvloop.run, True)])
def test_a_client_that_reads_nothing_keeps_no_server(monkeypatch, tmp_path, loop, dies):
    from torpor.vllm.server import ending
    from vllm.entrypoints.launchers import launcher

    async def endless():
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0)

    async def scene():
        monkeypatch.setattr(ending, "_READING_SECONDS", 0.5)
        app, server = build(monkeypatch, [], engine=Engine(tmp_path))
        app.add_api_route("/endless", lambda: StreamingResponse(endless()), methods=["GET"])
        app.state.engine_client = None
        await started(server)
        listening = launcher.create_server_socket(("127.0.0.1", 0), reuse_port=False)
        port = listening.getsockname()[1]
        serving = asyncio.create_task(launcher.serve_http(app, listening, host="127.0.0.1", port=port))
        await ending.take_signals(server)
        with socket.create_connection(("127.0.0.1", port)) as stalled:
            stalled.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
            await until(lambda: app.state.server.server_state.connections)
            if dies:  # the engine: vLLM looks for that, and ends its HTTP server
                app.state.server.should_exit = True
            else:
                await server.end()
            await (await serving)
        listening.close()

    loop(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize(
    ("number", "on_sigterm"),
    [(signal.SIGTERM, "stop"), (signal.SIGINT, "stop"), (signal.SIGINT, "checkpoint")],
)
@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_what_vllms_own_way_out_aborts_goes_on_in_the_next_server(monkeypatch, tmp_path, number, on_sigterm, loop):
    async def scene():
        _, server, http, queues = await ready(monkeypatch, tmp_path, on_sigterm=on_sigterm)
        server.remote = Store(server)
        os.kill(os.getpid(), number)
        # The engine may have had the signal, too, and a client may give up, before anything else of this process runs.
        server.engine.give("a", finish=FinishReason.ABORT)
        await client_goes(server.engine, "b")
        assert states(server.log.answers) == dict.fromkeys(NAMES, "running")
        await until(lambda: server.state == "ending")
        await client_goes(server.engine, "c")
        for name in ("a", "c"):  # nobody takes an abort for the end of the answer
            assert await said_to(queues[name]) == (
                f"the server ends; take up this answer at /torpor/requests/{name} of the next one, or send it again "
                "if that has none"
            )
        with pytest.raises(WrongState, match="the next one goes on"):  # nor is one promised
            await server.abort(["c"])
        with pytest.raises(GracefulHTTPError, match="the next one goes on"):
            await server.engine.abort("c")
        await until(lambda: http.force_exit)
        assert http.signals == [number]
        assert server.remote.stopped  # the process waits for the thread of a push
        assert not server.remote.released  # its directory has more, and may serve again before the term is over
        assert states(next_log(tmp_path)) == dict.fromkeys(NAMES, "running")

    loop(asyncio.wait_for(scene(), 60))


def test_a_drain_of_vllm_records_what_ends_and_tells_the_others_when_it_is_over(monkeypatch, tmp_path):
    async def scene():
        _, server, http, queues = await ready(monkeypatch, tmp_path, shutdown_timeout=30, on_sigterm="stop")
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: server.state == "ending")
        server.engine.give("a", 7, finish=FinishReason.LENGTH)
        assert (await queues["a"].get()).outputs[0].finish_reason == "length"
        server.engine.give("b", 7)
        await asyncio.sleep(0.1)
        assert (await queues["b"].get()).outputs[0].token_ids == [7] and not server.log.closed
        server.engine.give("b", finish=FinishReason.ABORT)  # its time is over
        http.should_exit = True
        assert "the server ends" in await said_to(queues["b"])
        await until(lambda: http.force_exit)
        found = next_log(tmp_path)
        assert states(found) == {"a": "finished", "b": "running", "c": "running"}
        assert found.part("b", 0, 0)["tokens"] == [5, 6, 7]

    run(scene(), 60)


def test_a_ctrl_c_while_the_checkpoint_is_written_ends_the_server_and_a_second_one_at_once(monkeypatch, tmp_path):
    from torpor.vllm.server import ending

    async def scene():
        _, server, http, queues = await ready(monkeypatch, tmp_path)
        sleeps, exits = asyncio.Event(), []

        async def sleep(*_args, **_options):
            sleeps.set()
            await asyncio.Event().wait()

        server.engine.sleep = sleep
        monkeypatch.setattr(ending, "_READING_SECONDS", 0.2)
        monkeypatch.setattr(ending.os, "_exit", exits.append)
        os.kill(os.getpid(), signal.SIGTERM)
        await sleeps.wait()
        assert http.signals == [] and not server.leaving
        os.kill(os.getpid(), signal.SIGINT)
        server.engine.give("a", finish=FinishReason.ABORT)
        assert "take up this answer" in await said_to(queues["a"])
        assert http.signals == [signal.SIGINT] and not exits
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: exits)
        assert exits == [130]
        await until(lambda: http.force_exit)
        assert states(next_log(tmp_path)) == dict.fromkeys(NAMES, "running")

    run(scene(), 60)


def test_a_server_that_has_saved_begins_vllms_way_out_once(monkeypatch, tmp_path):
    async def scene():
        _, server, http, queues = await ready(monkeypatch, tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: http.force_exit)
        assert http.signals == [signal.SIGINT] and any(call[0] == "sleep" for call in server.engine.calls)
        for queue in queues.values():
            assert "take up this answer" in await said_to(queue)

    run(scene(), 60)


@pytest.mark.parametrize("pushes", [True, False])
def test_a_drain_whose_push_fails_says_what_another_machine_lacks(monkeypatch, tmp_path, pushes):
    async def scene():
        from torpor.vllm.server import ending

        said = {"info": [], "error": []}
        for level, lines in said.items():
            monkeypatch.setattr(ending.logger, level, lambda text, *words, lines=lines, **_: lines.append(text % words))
        _, server, http, queues = await ready(monkeypatch, tmp_path)
        server.settings = dataclasses.replace(server.settings, object_store="s3://bucket")
        server.remote = Store(server, pushes)
        assert [metric(server, "torpor_pushes_total", outcome=each) for each in ("ok", "error")] == [0, 0]
        os.kill(os.getpid(), signal.SIGTERM)
        to_client = await said_to(queues["a"])
        await until(lambda: http.force_exit)
        assert [metric(server, "torpor_pushes_total", outcome=each) for each in ("ok", "error")] == [pushes, not pushes]
        assert (metric(server, "torpor_push_timestamp_seconds") is None) == (not pushes)
        assert metric(server, "torpor_operations_total", operation="sleep", tier="disk", outcome="ok") == 1
        assert server.remote.released and server.remote.stopped
        assert to_client.endswith("of the next one" if pushes else "or send it again if that has none")
        assert any("not pushed to s3://bucket" in line for line in said["error"]) == (not pushes)
        assert ("to go on in a server with this directory" in said["info"][-1]) == (not pushes)

    run(scene(), 60)


def test_copies_end_when_they_are_stopped_beside_a_store_that_takes_connections_and_answers_nothing(
    monkeypatch, tmp_path
):
    with socket.create_server(("127.0.0.1", 0)) as mute, ThreadPoolExecutor(1) as threads:
        endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
        for name, text in (("ENDPOINT_URL", endpoint), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
            monkeypatch.setenv(f"AWS_{name}", text)
        home = _core.RemoteHome("s3://bucket/p", 30.0)
        fetching = threads.submit(home.fetch, str(tmp_path), {})
        with mute.accept()[0]:
            home.stop_copies()
            with pytest.raises(Aborted):
                fetching.result(20)  # without a stop after minutes


# --- one that has failed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["at its start", "while it serves"])
def test_a_failed_server_keeps_no_reader_waiting_and_its_answers_for_the_next_one(monkeypatch, tmp_path, fails):
    async def failed():
        """Return a server with a running answer "a" and an ended one "c", and its application."""
        app, server, _, queues = await ready(monkeypatch, tmp_path)
        server.engine.give("c", 7, finish=FinishReason.STOP)
        if fails == "while it serves":
            async with client(app) as asking:
                reading = asyncio.create_task(asking.get("/torpor/requests/a/stream?from=2"))
                await until(lambda: server.log._changed)
                server.fail(WrongState("the engine is unrecoverable", "restart the server"), True)
                events = (await reading).text
            assert "event: error" in events and "the engine is unrecoverable" in events
            assert await said_to(queues["a"]) == (
                "the server is failed; take up this answer at /torpor/requests/a of the next one"
            )
            return app, server
        await asyncio.to_thread(server.log.answers.hand_over)  # as the end of its process does
        engine = EngineOfRequests(tmp_path)
        engine.wakes_with = Incompatible("the model is another one")
        (tmp_path / "g-000001").mkdir(mode=0o700)
        app, server = build(monkeypatch, [], "--api-key", CLIENT, engine=engine)
        await started(server)
        Http(server)
        return app, server

    async def scene():
        app, server = await failed()
        assert server.state == "failed"
        async with client(app) as asking:
            for method, path in (("GET", "a"), ("GET", "a/stream"), ("DELETE", "a"), ("GET", "unknown")):
                answer = await asking.request(method, f"/torpor/requests/{path}")
                assert answer.status_code == 503, answer.text
                assert server.problem.what in answer.json()["error"]["message"]
            assert (await asking.get("/torpor/requests/c")).json()["choices"][0]["token_ids"] == [5, 6, 7]
            assert "[DONE]" in (await asking.get("/torpor/requests/c/stream")).text
        await client_goes(server.engine, "a")
        said = []
        queue = SimpleNamespace(put=said.append)
        server.engine.output_processor.request_states["b"] = SimpleNamespace(queue=queue)
        await server.end()
        assert "take up this answer at /torpor/requests/b" in str(said[0])
        assert server.log.closed
        assert states(next_log(tmp_path)) == {"a": "running", "b": "running", "c": "finished"}
        assert not any(call[0] == "sleep" for call in server.engine.calls)

    monkeypatch.setattr(os, "kill", lambda *_: None)
    run(scene(), 60)
