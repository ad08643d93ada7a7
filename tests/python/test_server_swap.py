# SPDX-License-Identifier: Apache-2.0
"""POST /swap without an engine: whom it asks, what that one may answer, and what becomes of this server then."""

import asyncio
import contextlib
import json
import re
import ssl
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
from aiohttp import web
from s3_server import make_certificate
from server_stubs import (  # noqa: F401
    ADMIN,
    CLIENT,
    build,
    client,
    no_settings,
    run,
    started,
)
from torpor.errors import Aborted, DeviceError, InvalidArgument, TimedOut, WrongState
from torpor.vllm.server import swapping

KEYS = ("--api-key", CLIENT)
KEY, PLAIN = {"Authorization": f"Bearer {ADMIN}"}, Namespace(ssl_certfile=None)
AWAKE = {"error": {"code": "failed_precondition", "what": "swap: it is awake", "next_step": "", "state_changed": False}}
WOKEN = {"status": "awake", "restored_bytes": 7}


class Channel:
    """As exchange.channel() makes it, where the other one has come at once."""

    def __init__(self, here: bool = True):
        self.here, self.by, self.peer_timeout = here, "", 0.0

    @contextlib.contextmanager
    def made(self, peer_timeout: float):
        self.peer_timeout = peer_timeout
        yield self, "/a/channel"

    def has_joined(self, side: str) -> bool:
        return self.here

    def stop(self, side: str) -> None:
        self.by = self.by or side

    def stopped_by(self) -> str:
        return self.by


@contextlib.asynccontextmanager
async def other_server(answer, certificate: Path | None = None) -> AsyncIterator[tuple[str, list]]:
    """Address of a server that answers so, and what it was asked. `certificate`: of s3_server.make_certificate()."""
    asked = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(f"{certificate}.crt", f"{certificate}.key")
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"{'http' if context is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


async def a_server(monkeypatch, channel: Channel | None = None, *words: str):
    monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
    app, server = build(monkeypatch, [], *KEYS, *words)
    await started(server)
    if channel is not None:
        monkeypatch.setattr(swapping.exchange, "channel", channel.made)
    return app, server


def slept(server) -> list:
    return [call for call in server.engine.calls if call[0] == "sleep"]


async def breaks_off(request):
    request.transport.abort()
    return web.Response()


async def hangs(request):
    while request.transport is not None:
        await asyncio.sleep(0.001)
    return web.Response()


def answers(status: int, content=None, **headers):
    async def answer(request):
        return web.Response(status=status, text=json.dumps(content) if content else "<html>", headers=headers)

    return answer


@pytest.mark.parametrize(("answer", "status", "words"), [
    (answers(409, AWAKE), 409, "swap: it is awake"),
    (answers(401, {"error": {"message": "Unauthorized"}}), 409, "refuses this admin key"),
    (answers(403, {"error": {"message": "no"}}), 409, "same admin key"),
    (answers(500, {"error": {"message": "the engine is dead", "code": 500}}), 500, "answers 500: the engine is dead"),
    (answers(503, {"error": {"message": "it ends", "code": 503, "what": "it ends"}}), 500, "answers 503: it ends"),
    (answers(200), 500, "no server of torpor"),
    (answers(307, Location="http://127.0.0.1:1/"), 500, "answers 307"),
    (answers(404, {"detail": "Not Found"}), 500, "answers 404"),
    (breaks_off, 500, "broke off"),
    (hangs, 500, "has not come"),
])  # fmt: skip
def test_where_the_other_one_does_not_come_nothing_has_happened(monkeypatch, answer, status, words):
    async def scene():
        monkeypatch.setattr(swapping, "_COMES_SECONDS", 0.2 if answer is hangs else 60)
        app, server = await a_server(monkeypatch)
        async with other_server(answer) as (url, asked), client(app, ADMIN, traceparent="00-a-b-01") as http:
            response = await http.post("/swap", params={"to": url})
        assert response.status_code == status and words in response.text, response.text
        assert f"the server at {url}" in response.text and "this server" not in response.text
        assert server.state == "awake" and not slept(server) and not server.operating()
        assert len(asked) == 1 and asked[0].path == "/wake_up" and asked[0].query["swap_in_from"].endswith("/channel")
        assert asked[0].headers["Authorization"] == f"Bearer {ADMIN}" and asked[0].headers["traceparent"] == "00-a-b-01"

    run(scene())


def test_nobody_listens_there(monkeypatch):
    async def scene():
        app, server = await a_server(monkeypatch)
        async with other_server(hangs) as (url, _):
            pass
        async with client(app, ADMIN) as http:
            response = await http.post("/swap", params={"to": url})
        assert response.status_code == 500 and f"the server at {url} cannot be reached" in response.text
        assert server.state == "awake" and not slept(server)

    run(scene())


@pytest.mark.parametrize(("to", "why"), [
    ("", "does not begin with http://"), ("127.0.0.1:8001", "does not begin with http://"),
    ("ftp://127.0.0.1:1", "does not begin with http://"), (" http://127.0.0.1:1", "does not begin with http://"),
    ("http://", "no host and port as a URL has them"), ("http://127.0.0.1:", "no host and port"),
    ("http://127.0.0.1:99999", "no port 99999"), ("http://127.0.0.1:0", "no port 0"), ("http://[::1", "no host and"),
    ("http://127.0.0.1\t:1", "no host and port"), ("http://127.0.0.1:1\\x", "no host and port"),
    ("http://me@127.0.0.1:1", "has a user"), ("http://127.0.0.1:1@192.0.2.1", "has a user"),
    ("http://127.0.0.1:1/any/path", "more than a host and a port"), ("http://127.0.0.1:1//", "more than a host"),
    ("http://127.0.0.1:1/?a=b", "more than a host and a port"), ("http://127.0.0.1:1#a", "more than a host and a port"),
    ("http://a..b:1", "neither localhost nor a complete address"), ("http://rebind.test:1", "neither localhost nor"),
    ("http://127.1:1", "neither localhost nor"), ("http://2130706433:1", "neither localhost nor"),
    ("http://localhost.:1", "neither localhost nor"),
    ("http://192.0.2.1:8001", "not a loopback address"), ("http://[2001:db8::1]:1", "not a loopback address"),
    ("http://255.255.255.255:1", "not a loopback address"), ("http://10.0.0.1:1", "not a loopback address"),
    ("http://[::7f00:1]:1", "not a loopback address"), ("http://[fe80::1]:1", "not a loopback address"),
    ("http://224.0.0.1:1", "a multicast address"), ("http://[ff01::1]:1", "a multicast address"),
    ("http://0.0.0.0:1", "where a server listens"), ("http://[::]:1", "where a server listens"),
    ("http://[::ffff:127.0.0.1]:1", "an IPv4 address written as IPv6"),
    ("http://[::ffff:192.0.2.1]:1", "an IPv4 address written as IPv6"),
])  # fmt: skip
def test_only_a_loopback_address_is_that_of_a_server_of_this_host(to, why):
    with pytest.raises(InvalidArgument, match=re.escape(why)) as refused:
        asyncio.run(swapping.loopback.checked(to))
    assert "http://127.0.0.1:8001" in refused.value.next_step


def test_only_a_server_of_this_host_is_sent_the_key(monkeypatch):
    async def scene():
        app, server = await a_server(monkeypatch)
        monkeypatch.setattr(swapping.Other, "wake_up", None)
        async with client(app, ADMIN) as http:
            response = await http.post("/swap", params={"to": "http://192.0.2.1:8001"})
            assert response.status_code == 400 and "stays on this host" in response.json()["error"]["what"], (
                response.text
            )
            assert (await http.post("/swap")).status_code == 400
            for seconds in (0, -1, "inf", "nan", "soon"):
                params = {"to": "http://127.0.0.1:1", "peer_timeout": seconds}
                assert (await http.post("/swap", params=params)).status_code == 400, seconds
        assert not slept(server)

    run(scene())


def test_a_name_is_resolved_once_and_only_what_was_checked_is_asked(monkeypatch):
    """What `localhost` means may change between the check and the call: the key goes where the check looked."""

    async def scene():
        names = []
        await a_server(monkeypatch)
        loop = asyncio.get_running_loop()
        stock = loop.getaddrinfo

        async def resolved(host, port, **options):
            names.append(host)
            return await stock("127.0.0.1" if len(names) == 1 else "127.0.0.2", port, **options)

        async with other_server(answers(409, AWAKE)) as (url, asked):
            monkeypatch.setattr(loop, "getaddrinfo", resolved)
            named = url.replace("127.0.0.1", "LocalHost")
            other = swapping.Other(await swapping.loopback.checked(named), KEY, PLAIN)
            for _ in range(2):
                with pytest.raises(WrongState, match="it is awake"):
                    await other.wake_up("/a/channel")
            assert await other.is_there()
            assert names == ["localhost"] and other.url == url.replace("127.0.0.1", "localhost")
            assert [request.path for request in asked] == ["/wake_up", "/wake_up", "/is_sleeping"]
            monkeypatch.setattr(loop, "getaddrinfo", lambda *_, **__: stock("192.0.2.1", None))
            with pytest.raises(InvalidArgument, match=r"localhost, which is 192.0.2.1 here, is not a loopback address"):
                await swapping.loopback.checked(named)

    run(scene())


def test_whether_the_other_one_is_there_is_asked_without_the_key_and_of_nobody_else(monkeypatch):
    async def scene():
        async with (
            other_server(answers(200, {})) as (elsewhere, asked_there),
            other_server(answers(307, Location=f"{elsewhere}/is_sleeping")) as (url, asked),
        ):
            for proxy in ("http_proxy", "all_proxy"):
                monkeypatch.setenv(proxy, elsewhere)
            other = swapping.Other(await swapping.loopback.checked(url), KEY, PLAIN)
            assert await other.is_there()
            assert len(asked) == 1 and "Authorization" not in asked[0].headers and not asked_there

    run(scene())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """Folder with two certificates, `own` and `another`, which name neither this host nor a known authority, and with a
    chain that begins with the first."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("own", "another"):
        make_certificate(folder / name, "192.0.2.1")
    (folder / "chain.crt").write_text((folder / "own.crt").read_text() + (folder / "another.crt").read_text())
    return folder


@pytest.mark.parametrize("file", ["own.crt", "chain.crt"])
def test_a_server_with_the_same_certificate_is_asked_whatever_names_that_has(monkeypatch, certificates, file):
    async def scene():
        app, _ = await a_server(monkeypatch, Channel(), "--ssl-certfile", str(certificates / file))
        async with other_server(answers(200, WOKEN), certificates / "own") as (url, asked), client(app, ADMIN) as http:
            response = await http.post("/swap", params={"to": url})
        assert response.status_code == 200 and response.json()["woken"] == WOKEN, response.text
        assert [request.headers["Authorization"] for request in asked] == [f"Bearer {ADMIN}"]

    run(scene())


@pytest.mark.parametrize(("file", "problem"), [
    ("chain.crt", WrongState("has another certificate")), (None, Aborted("certificate verify failed")),
    ("own.key", InvalidArgument("own.key: there is no certificate in it")),
    ("none.crt", InvalidArgument("none.crt: No such file")),
])  # fmt: skip
def test_no_other_server_gets_the_key(certificates, file, problem):
    async def scene():
        args = Namespace(ssl_certfile=file and str(certificates / file))
        async with other_server(answers(200, WOKEN), certificates / "another") as (url, asked):
            at = await swapping.loopback.checked(url)
            with pytest.raises(type(problem), match=problem.what):
                await swapping.Other(at, KEY, args).wake_up("/a/channel")
            if isinstance(problem, WrongState):
                assert await swapping.Other(at, KEY, args).is_there()
            assert not asked

    run(scene())


def test_one_that_sleeps_or_is_busy_asks_nobody(monkeypatch):
    async def scene():
        app, server = await a_server(monkeypatch, Channel())
        async with other_server(answers(200, WOKEN)) as (url, asked), client(app, ADMIN) as http:
            async with server.operation:
                assert (await http.post("/swap", params={"to": url})).status_code == 409
            await server.sleep()
            response = await http.post("/swap", params={"to": url})
            assert response.status_code == 409 and "this server is asleep" in response.text and not asked

    run(scene())


@pytest.mark.parametrize("goes_away", [False, True])
def test_both_halves_are_reported(monkeypatch, goes_away):
    async def scene():
        channel = Channel()
        app, server = await a_server(monkeypatch, channel)
        async with other_server(answers(200, WOKEN)) as (url, _), client(app, ADMIN) as http:
            call = asyncio.create_task(http.post("/swap", params={"to": url + "/", "peer_timeout": 7}))
            if goes_away:
                while not server.operating():
                    await asyncio.sleep(0)
                call.cancel()
            else:
                response = (await call).json()
                assert response["status"] == "sleeping" and response["to"] == url and response["woken"] == WOKEN
                assert response["slept"]["freed_bytes"] == 1 and response["seconds"] >= 0
                assert channel.peer_timeout == 7
            while server.state != "asleep" or server.operating():
                await asyncio.sleep(0.001)
            assert slept(server)[0][1:3] == (1, "abort") and slept(server)[0][3]["swap_out_to"] == "/a/channel"
            assert slept(server)[0][3]["preserve_state"] is True

    run(scene())


def test_its_events_are_those_of_a_sleep(monkeypatch):
    async def scene():
        app, _ = await a_server(monkeypatch, Channel())
        events = {"Accept": "text/event-stream"}
        async with other_server(answers(200, WOKEN)) as (url, _), client(app, ADMIN, **events) as http:
            response = (await http.post("/swap", params={"to": url})).text
            assert (
                "event: progress" in response
                and f'event: done\ndata: {{"status": "sleeping", "to": "{url}"' in response
            )
            response = (await http.post("/swap", params={"to": url})).text
            assert "event: error" in response and "this server is asleep" in response

    run(scene())


def test_where_this_half_fails_the_other_one_hears_of_it_and_this_one_serves_on(monkeypatch):
    async def scene():
        from vllm.v1.engine.exceptions import EngineDeadError

        for problem, words in (
            (DeviceError("it does not let go"), "this server: it does not let go"),
            (EngineDeadError(), "this server: its engine core has ended"),
        ):
            channel = Channel()
            app, server = await a_server(monkeypatch, channel)
            server.engine.fails_with = problem

            async def waits(request, channel=channel):
                while not channel.by:
                    await asyncio.sleep(0.001)
                return await answers(409, AWAKE)(request)

            async with other_server(waits) as (url, _), client(app, ADMIN) as http:
                response = await http.post("/swap", params={"to": url})
            assert response.status_code == 500 and words in response.text and channel.by == "out", response.text
            assert server.state == "awake" and not server.operating()

    run(scene())


@pytest.mark.parametrize("ended", [False, True])
def test_where_the_other_one_ends_before_its_last_word_this_one_wakes_again(monkeypatch, ended):
    async def scene():
        app, server = await a_server(monkeypatch, Channel())
        monkeypatch.setattr(swapping.Other, "is_there", lambda self: asyncio.sleep(0, not ended))

        async def late(request):
            while server.state != "asleep":
                await asyncio.sleep(0.001)
            return await breaks_off(request)

        async with other_server(late) as (url, _), client(app, ADMIN) as http:
            response = await http.post("/swap", params={"to": url})
            assert response.status_code == 500 and f"the server at {url} broke off" in response.text
        assert ("this server serves on" in response.text) == ended == (server.state == "awake")
        assert response.json()["error"]["state_changed"] is not ended

    run(scene())


def test_calls_of_an_engine_core_that_has_ended_end():
    from torpor.vllm.front_ends import MPClientMixin
    from torpor.vllm.mixed_in import mix_in
    from vllm.v1.engine.core_client import MPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    async def scene():
        answered, waits, awaited = Future(), Future(), asyncio.get_running_loop().create_future()
        answered.set_result("before")
        client = MPClient.__new__(MPClient)
        mix_in(client, MPClientMixin)
        client._finalizer = SimpleNamespace(detach=lambda: None)
        client.utility_results = dict(enumerate((answered, waits, awaited)))
        client.shutdown()
        for future in (waits, asyncio.wrap_future(waits), awaited):
            with pytest.raises(EngineDeadError):
                future.result(60) if isinstance(future, Future) else await asyncio.wait_for(future, 60)
        assert answered.result() == "before"

    run(scene())


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize(
    ("which", "words"), [(0, "the one that goes does not answer"), (1, "the one that comes does not")]
)
def test_a_swap_ends_where_one_engine_does_not_answer(monkeypatch, awaited, which, words):
    goes_on = threading.Event()

    async def silent():
        await asyncio.sleep(60) if awaited else goes_on.wait(60)

    async def ends(fails: bool):
        if fails:
            raise TimedOut("no heartbeat of the other", "")
        return {}

    def swap():
        result = swapping.exchange._swap_awaited if awaited else swapping.exchange._swap
        result = result(None, None, None, 0.05, None)
        return asyncio.run(result) if awaited else result

    began = time.monotonic()
    for fails in (False, True):
        halves = [ends(fails), silent()][:: 1 if which else -1]
        monkeypatch.setattr(swapping.exchange, "_halves", lambda *_, halves=halves: halves)
        with pytest.raises(TimedOut, match=words if which == 0 or not fails else "no heartbeat of the other"):
            swap()
    goes_on.set()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("asleep", [False, True])
def test_an_engine_that_stays_asleep_takes_no_step(monkeypatch, asleep):
    from torpor.vllm import frontend

    def call(_, method, options=None):
        if method == "sleep":
            raise TimedOut("no heartbeat of the other", "", state_changed=True)
        return {"engine": "asleep" if asleep else "unrecoverable", "level": 1}

    monkeypatch.setattr(frontend, "call", call)
    client = SimpleNamespace(outputs_queue=Queue())
    engine = type("Engine", (), {"logger_manager": None, "engine_core": client})()
    engine.renderer = SimpleNamespace(mm_processor_cache=None, clear_mm_cache=lambda: None)
    with pytest.raises(TimedOut):
        values = {"level": 1, "preserve_state": False}
        frontend.finish(frontend.sleep(frontend.BlockingSide(engine), "abort", values))
    assert frontend.step(engine, lambda: ["waits"]) == ([] if asleep else ["waits"])


@pytest.mark.parametrize(("method", "half"), [("sleep", "swap_out_to"), ("wake_up", "swap_in_from")])
def test_data_parallel_engines_are_no_half_of_a_swap(monkeypatch, method, half):
    from torpor.errors import Unsupported
    from torpor.vllm import data_parallel, frontend

    monkeypatch.setattr(data_parallel, "has_several", lambda client: True)
    with pytest.raises(Unsupported, match="swap of data parallel"):
        asyncio.run(frontend.call_async(SimpleNamespace(engine_core=None), method, {half: "/a/channel"}))
