# SPDX-License-Identifier: Apache-2.0
"""Streams while the engine sleeps, without an engine: what their clients get, and when."""

import asyncio
import json

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from server_stubs import build, no_settings, run, started  # noqa: F401
from torpor.errors import NotEnoughRoom

ASLEEP = b": asleep\n\n"
STREAMED = {"model": "model", "prompt": "a", "stream": True}


class Caller:
    """One call as uvicorn makes it: what the server sends is there when it is sent."""

    def __init__(
        self, app, path: str, content: dict, headers: dict[str, str] | None = None, pieces: int = 2, method="POST"
    ):
        body = json.dumps(content).encode()
        at = len(body) // pieces
        parts = [body[:at], body[at:]] if pieces == 2 else [body]
        self._parts = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]
        named = {"content-type": "application/json"} | (headers or {})
        scope = {"type": "http", "method": method, "path": path, "query_string": b""}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in named.items()]
        self.sent: list[dict] = []
        self.gone = asyncio.Event()
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._parts:
            return self._parts.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent if message["type"] == "http.response.body")

    async def until(self, what) -> None:
        while not what():
            await asyncio.sleep(0.001)


def serving(monkeypatch, seconds: float, **settings):
    """A server whose completions are three events, the second one in two halves, each sent when `go` lets it."""
    from torpor.vllm.server import event_stream

    monkeypatch.setattr(event_stream, "SECONDS", seconds)
    app, server = build(monkeypatch, [], **settings)
    go = asyncio.Semaphore(0)

    async def completions(request: Request):
        content = await request.json()
        if content["prompt"] == "refused":
            return JSONResponse({"error": {"message": "no such\nmodel", "code": 404}}, 404)

        async def events():
            for piece in ("data: one\n\n", "data: tw", "o\n\n", "data: [DONE]\n\n"):
                await go.acquire()
                yield piece

        return StreamingResponse(events(), media_type="text/event-stream")

    for path in ("/v1/completions", "/v1/messages", "/v1/embeddings"):
        app.add_api_route(path, completions, methods=["POST"])
    return app, server, go


WHOLE = b"data: one\n\ndata: two\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_stream_that_waits_gets_its_status_at_once_and_then_comments(monkeypatch, pieces):
    async def scene():
        app, server, go = serving(monkeypatch, 0.05)
        await started(server)
        await server.sleep()
        caller = Caller(app, "/v1/completions", STREAMED, pieces=pieces)
        await caller.until(lambda: caller.body)
        assert caller.status == 200 and caller.body == ASLEEP and server.queued == 1
        assert dict(caller.sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
        await caller.until(lambda: len(caller.body) >= 4 * len(ASLEEP))
        await server.wake_up()
        sent = caller.body
        assert sent.replace(ASLEEP, b"") == b""
        for _ in range(4):
            go.release()
        await caller.task
        assert [message["type"] for message in caller.sent].count("http.response.start") == 1
        assert caller.body == sent + WHOLE and not caller.sent[-1].get("more_body")

    run(scene())


async def streaming(monkeypatch, seconds: float):
    """A server, its caller that has one event of a stream, and what gives the next ones."""
    app, server, go = serving(monkeypatch, seconds)
    await started(server)
    caller = Caller(app, "/v1/completions", STREAMED)
    go.release()
    await caller.until(lambda: caller.body == b"data: one\n\n")
    return server, caller, go


def test_a_stream_that_runs_gets_comments_between_its_events(monkeypatch):
    async def scene():
        server, caller, go = await streaming(monkeypatch, 0.05)
        await asyncio.sleep(0.1)
        assert caller.body == b"data: one\n\n"  # awake, it needs none
        await server.sleep()
        await caller.until(lambda: caller.body.count(ASLEEP) == 3)
        await server.wake_up()
        before = caller.body
        go.release()  # half an event
        await caller.until(lambda: caller.body.endswith(b"tw"))
        await server.sleep()
        await asyncio.sleep(0.2)
        assert caller.body == before + b"data: tw"
        go.release()
        await caller.until(lambda: caller.body.endswith(b"o\n\n" + ASLEEP))
        await server.wake_up()
        go.release()
        await caller.task
        assert caller.body.replace(ASLEEP, b"") == WHOLE and caller.sent[-1]["body"] == b""

    run(scene())


def test_streams_get_comments_while_the_server_hands_over(monkeypatch):
    async def scene():
        app, server, go = serving(monkeypatch, 0.02)
        await started(server)
        running = Caller(app, "/v1/completions", STREAMED)
        go.release()
        await running.until(lambda: running.body == b"data: one\n\n")
        server.enter("handing over")
        waiting = Caller(app, "/v1/completions", STREAMED)
        for caller in (running, waiting):
            await caller.until(lambda caller=caller: caller.body.count(ASLEEP) >= 3)
        assert waiting.status == 200 and server.queued == 1
        server.enter("awake")  # the switch did not come about
        for _ in range(7):
            go.release()
        for caller in (running, waiting):
            await caller.task
            assert caller.body.replace(ASLEEP, b"") == WHOLE

    run(scene(), 120)


def test_a_stream_hears_of_each_sleep_at_once(monkeypatch):
    async def scene():
        server, caller, _ = await streaming(monkeypatch, 1000)
        for count in (1, 2, 3):
            await server.sleep()
            await asyncio.wait_for(caller.until(lambda count=count: caller.body.count(ASLEEP) == count), 60)
            await server.wake_up()
            await asyncio.sleep(0.01)
        caller.gone.set()
        await asyncio.wait_for(caller.task, 60)
        await server.sleep()
        await asyncio.sleep(0.05)
        assert caller.body.count(ASLEEP) == 3  # nobody is there any more

    run(scene())


@pytest.mark.parametrize(
    ("path", "content", "headers"),
    [
        ("/v1/completions", STREAMED | {"stream": False}, {}),
        ("/v1/completions", STREAMED | {"stream": "true"}, {}),
        ("/v1/completions", {"prompt": "a"}, {}),
        ("/v1/completions", STREAMED, {"content-type": "text/plain"}),
        ("/v1/embeddings", STREAMED, {}),
    ],
)
def test_what_is_no_stream_waits_without_a_byte(monkeypatch, path, content, headers):
    async def scene():
        app, server, go = serving(monkeypatch, 0.02)
        await started(server)
        await server.sleep()
        caller = Caller(app, path, content, headers)
        await caller.until(lambda: server.queued == 1)
        await asyncio.sleep(0.1)
        assert caller.sent == []
        await server.wake_up()
        for _ in range(4):
            go.release()
        await caller.task
        assert caller.status == 200 and caller.body == WHOLE

    run(scene())


@pytest.mark.parametrize(("path", "before", "after"), [
    ("/v1/completions", b"data: ", b"data: [DONE]\n\n"), ("/v1/messages", b"event: error\ndata: ", b""),
])  # fmt: skip
def test_a_refusal_after_the_status_is_an_event(monkeypatch, path, before, after):
    async def scene():
        app, server, _ = serving(monkeypatch, 1000)
        await started(server)
        await server.sleep()
        caller = Caller(app, path, STREAMED | {"prompt": "refused"})
        await caller.until(lambda: caller.body)
        await server.wake_up()
        await caller.task
        event = caller.body.removeprefix(ASLEEP)
        assert event.startswith(before) and event.endswith(b"}}\n\n" + after)
        sent = json.loads(event.removeprefix(before).removesuffix(b"\n\n" + after))
        assert sent == {"error": {"message": "no such\nmodel", "code": 404}}
        assert caller.status == 200 and not caller.sent[-1].get("more_body")

    run(scene())


def test_a_server_that_ends_says_so_to_those_who_wait(monkeypatch):
    async def scene():
        app, server, _ = serving(monkeypatch, 1000)
        await started(server)
        await server.sleep()
        caller = Caller(app, "/v1/completions", STREAMED)
        await caller.until(lambda: caller.body)
        server.enter("ending")
        await caller.task
        error = json.loads(caller.body.removeprefix(ASLEEP + b"data: ").split(b"\n\n")[0])["error"]
        assert error["code"] == 503 and "ending" in error["message"]

    run(scene())


def test_a_stream_that_is_refused_at_once_has_its_status(monkeypatch):
    async def scene():
        app, server, _ = serving(monkeypatch, 0.02, queue_limit=0)
        await started(server)
        await server.sleep()
        caller = Caller(app, "/v1/completions", STREAMED)
        await caller.task
        assert caller.status == 503 and ASLEEP not in caller.body

    run(scene())


def test_comments_go_on_while_a_wake_has_no_room(monkeypatch):
    async def scene():
        app, server, go = serving(monkeypatch, 0.02, wake_on_request=True)
        await started(server)
        await server.sleep()
        server.engine.fails_with = NotEnoughRoom("another server holds the device")
        caller = Caller(app, "/v1/completions", STREAMED)
        await caller.until(lambda: caller.body.count(ASLEEP) >= 5)
        server.engine.fails_with = None
        for _ in range(4):
            go.release()
        await caller.task
        assert caller.body.replace(ASLEEP, b"") == WHOLE and server.state == "awake"

    run(scene())


def test_the_interval_of_vllm_is_that_of_comments(monkeypatch):
    async def scene():
        app, server, _ = serving(monkeypatch, 1000)
        app.state.args.sse_keep_alive_interval = 0.02
        await started(server)
        await server.sleep()
        caller = Caller(app, "/v1/completions", STREAMED)
        await asyncio.wait_for(caller.until(lambda: caller.body.count(ASLEEP) >= 3), 60)
        caller.gone.set()
        await caller.task
        assert server.queued == 0

    run(scene())


@pytest.mark.parametrize("state", ["awake", "asleep"])
@pytest.mark.parametrize("on_disconnect", ["abort", "continue"])
def test_a_call_that_outlives_its_connection_says_so(monkeypatch, state, on_disconnect):
    """torpor.client then says when its caller wants no more of it."""

    async def scene():
        app, server, _ = serving(monkeypatch, 60, on_disconnect=on_disconnect)
        await started(server)
        if state == "asleep":
            await server.sleep()
        caller = Caller(app, "/v1/completions", STREAMED)
        await caller.until(lambda: caller.sent)
        said = {name.lower() for name, _ in caller.sent[0]["headers"]}
        assert (b"x-torpor-on-disconnect" in said) == (on_disconnect == "continue")
        caller.task.cancel()
        taker = Caller(app, "/torpor/requests/x/stream", {}, method="GET")
        await taker.task
        said = {name.lower() for name, _ in taker.sent[0]["headers"]}
        assert (b"x-torpor-on-disconnect" in said) == (on_disconnect == "continue")

    run(scene())
