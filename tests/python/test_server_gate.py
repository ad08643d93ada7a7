# SPDX-License-Identifier: Apache-2.0
"""What becomes of a call while the engine is not awake: without an engine."""

import asyncio
import logging
import re
from pathlib import Path

import pytest
from fastapi import Request
from server_calls import BEGINS_A_REQUEST, NEEDS_NO_ENGINE, EVERYTHING
from server_stubs import (  # noqa: F401
    ADMIN,
    CLIENT,
    OTHER_CLIENT,
    Engine,
    arguments,
    build,
    client,
    concrete,
    no_settings,
    run,
    started,
)

KEYS = ("--api-key", CLIENT, OTHER_CLIENT)
# The release of vLLM that began to have each of these routes; the others are in all that torpor knows.
BEGAN_WITH = {
    ("POST", "/inference/v1/abort_requests"): (0, 32),
    ("POST", "/shutdown_weight_transfer_engine"): (0, 32),
    ("POST", "/v1/systemone"): (0, 32),
    ("POST", "/weight_checker"): (0, 32),
    ("POST", "/v1/decisions"): (0, 33),
}

# --- every route of vLLM ---------------------------------------------------------------------------------------------


def routes_of(app) -> set[tuple[str, str]]:
    from starlette.routing import Mount, WebSocketRoute

    found = set()
    for route in app.routes:
        if isinstance(route, Mount):
            found.add(("MOUNT", route.path))
        elif isinstance(route, WebSocketRoute):
            found.add(("WEBSOCKET", route.path))
        else:
            found |= {(method, route.path) for method in route.methods if method != "HEAD"}
    return found


def test_at_a_path_that_vllm_has_too_torpor_answers():
    """As /sleep in vLLM's development mode, which vLLM 0.31 puts before what is added; other methods stay vLLM's."""
    from fastapi import APIRouter, FastAPI
    from fastapi.testclient import TestClient
    from torpor.vllm.server import include

    app, router = FastAPI(), APIRouter()
    app.add_api_route("/sleep", lambda: "vLLM", methods=["GET", "POST"])
    app.add_api_route("/wake_up", lambda: "vLLM", methods=["POST"])
    router.add_api_route("/sleep", lambda: "torpor", methods=["POST"])
    router.add_api_route("/wake_up", lambda: "torpor", methods=["POST"])
    include(app, router)
    http = TestClient(app)
    assert [http.post("/sleep").json(), http.get("/sleep").json()] == ["torpor", "vLLM"]
    assert http.post("/wake_up").json() == "torpor"


def routes_of_vllm(monkeypatch) -> set[tuple[str, str]]:
    """Of the application that vLLM builds, with all that can be switched on."""
    from vllm import envs

    # Once an engine was made in a process, vLLM no longer reads the environment there, but what it noted of it.
    monkeypatch.setattr(envs, "__getattr__", envs.__getattr__)
    envs.disable_envs_cache()
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_COHERE_API"):
        monkeypatch.setenv(name, "1")
    from vllm import plugins
    from vllm.config import ProfilerConfig
    from vllm.entrypoints.launchers.app import build_app

    monkeypatch.setattr(plugins, "load_endpoint_plugins", lambda tasks: [])
    found = set()
    for words in (["--enable-offline-docs"], ["--tokens-only"], []):
        args = arguments("--enable-scale-out", "--enable-tokenizer-info-endpoint", "--enable-fault-tolerance", *words)
        args.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp")
        found |= routes_of(build_app(args, ("generate", "render", "transcription", "realtime")))
    return found


def routes_in_the_source() -> set[tuple[str, str]]:
    """As vLLM's source declares them: also those that are behind a switch that the tests do not know."""
    import vllm.entrypoints

    own_applications = {"dp_supervisor.py", "preload.py"}  # servers of their own, without an engine
    declared = re.compile(r"@(?:\w*router|app)\.(get|post|put|patch|delete|websocket)\(\s*\"([^\"]+)\"")
    added = re.compile(r"\.add_api_route\(\s*\"([^\"]+)\"[^)]*methods=\[\"(\w+)\"\]")
    found = set()
    for path in Path(vllm.entrypoints.__file__).parent.rglob("*.py"):
        if path.name not in own_applications:
            text = path.read_text()
            found |= {(method.upper(), route) for method, route in declared.findall(text)}
            found |= {(method, route) for route, method in added.findall(text)}
    return found


@pytest.mark.core
@pytest.mark.parametrize("engine_was_made", [False, True])
def test_every_route_of_vllm_and_of_torpor_is_in_the_table_and_no_other(monkeypatch, engine_was_made):
    import vllm as package
    from vllm import envs

    monkeypatch.setattr(envs, "__getattr__", envs.__getattr__)
    if engine_was_made:  # before this test, in the same process
        envs.enable_envs_cache()
        assert not envs.VLLM_SERVER_DEV_MODE and not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING
    from torpor.vllm.server.route_table import ROUTES

    vllm = routes_of_vllm(monkeypatch) | routes_in_the_source()
    assert {("POST", "/v1/chat/completions"), ("MOUNT", "/metrics"), ("POST", "/classify")} <= vllm  # it does look
    app, _ = build(monkeypatch, [])
    own = routes_of(app)
    assert sorted((vllm | own) - set(ROUTES)) == [], "decide in route_table.py what becomes of these while asleep"
    release = tuple(int(number) for number in package.__version__.split(".")[:2])
    later = {route for route, began in BEGAN_WITH.items() if began > release}
    assert sorted(set(ROUTES) - vllm - own) == sorted(later), "routes of nobody, or BEGAN_WITH lacks their release"


def test_no_two_places_of_the_table_are_meant_by_one_path():
    from torpor.vllm.server.route_table import ROUTES, rule_of

    for method, path in ROUTES:
        asked = "GET" if method == "MOUNT" else method
        assert rule_of(asked, concrete(path)) is ROUTES[method, path], (method, path)


def test_a_mount_is_what_lies_below_its_path_and_only_to_be_read():
    from torpor.vllm.server.route_table import ROUTES, rule_of

    for path in ("/metrics", "/metrics/", "/metrics/a/b"):
        assert rule_of("GET", path) == ROUTES["MOUNT", "/metrics"], path
    assert rule_of("HEAD", "/static/a.css") == ROUTES["MOUNT", "/static"]
    for method, path in (
        ("POST", "/metrics_admin/reset"), ("GET", "/metricsx"), ("DELETE", "/staticfiles/x"),
        ("POST", "/metrics/reset"), ("WEBSOCKET", "/static/a"),
    ):  # fmt: skip
        assert rule_of(method, path) is None, path


# --- while the engine sleeps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BEGINS_A_REQUEST)
def test_what_begins_a_request_waits_for_the_wake(monkeypatch, path):
    async def scene():
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app) as http:
            await server.sleep()
            call = asyncio.create_task(http.post(path))
            while server.queued == 0:
                await asyncio.sleep(0)
                assert not call.done(), call.result()
            await server.wake_up()
            assert (await call).json() == {"reached": path}

    run(scene())


@pytest.mark.parametrize("path", BEGINS_A_REQUEST)
def test_what_begins_a_request_is_refused_where_the_operator_wants_that(monkeypatch, path):
    async def scene():
        app, server = build(monkeypatch, EVERYTHING, *KEYS, new_requests="refuse")
        await started(server)
        async with client(app) as http:
            await server.sleep()
            answer = await http.post(path)
            assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0 and "asleep" in answer.text

    run(scene())


@pytest.mark.parametrize(("method", "path"), NEEDS_NO_ENGINE)
def test_what_needs_no_engine_is_served_while_it_sleeps(monkeypatch, method, path):
    async def scene():
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app) as http:
            await server.sleep()
            verb = "GET" if method == "MOUNT" else method
            answer = await asyncio.wait_for(http.request(verb, concrete(path) + ("/" if method == "MOUNT" else "")), 5)
            assert answer.json() == {"reached": path}

    run(scene())


def test_a_call_without_a_key_neither_wakes_the_engine_nor_waits(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, EVERYTHING, *KEYS, wake_on_request=True)
        await started(server)
        async with client(app, None) as http, client(app, "wrong") as wrong:
            await server.sleep()
            for path in BEGINS_A_REQUEST:
                for caller in (http, wrong):
                    assert (await asyncio.wait_for(caller.post(path), 5)).status_code == 401, path
            assert server.state == "asleep" and server.queued == 0

    run(scene())


def test_the_path_below_which_a_proxy_mounts_the_server_is_no_way_around(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, EVERYTHING, *KEYS, "--root-path", "/llm", new_requests="refuse")
        await started(server)
        async with client(app) as http:
            await server.sleep()
            for path in ("/v1/systemone", "/llm/v1/systemone", "/invocations", "/llm/invocations"):
                assert (await http.post(path)).status_code == 503, path
            assert (await http.post("/llm/sleep")).status_code == 403

    run(scene())


def test_a_client_that_goes_gives_its_place_in_the_queue_back(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, [], queue_limit=1)
        await started(server)
        read = []

        async def echo(request: Request):
            read.append(await request.body())

        app.add_api_route("/v1/completions", echo, methods=["POST"])
        await server.sleep()

        async def post(body: list[bytes], gone: asyncio.Event) -> list[int]:
            parts = [{"type": "http.request", "body": part, "more_body": part is not body[-1]} for part in body]
            statuses = []

            async def receive():
                if parts:
                    return parts.pop(0)
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                statuses.append(message.get("status"))

            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
            await app(scope, receive, send)
            return statuses

        goes, stays = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(post([b"a", b"b"], goes))
        while server.queued == 0:
            await asyncio.sleep(0)
        assert 503 in await post([b"x"], stays)  # the queue is full
        goes.set()
        assert await first == [] and server.queued == 0
        second = asyncio.create_task(post([b"c", b"d", b"e"], stays))
        while server.queued == 0:
            await asyncio.sleep(0)
        large = asyncio.create_task(post([b"l" * (1 << 19)] * 4, stays))
        assert 503 in await large
        await server.wake_up()
        assert 200 in await second
        assert read == [b"cde"]  # nothing was sent by those who had gone, and nothing was lost on the way

    run(scene())


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"echo": True}, True), ({"echo": "True"}, True), ({"echo": 1}, True), ({"echo": False}, False), ({}, False),
        ({"echo": "false"}, False), ({"echo": True, "return_token_ids": True}, False), (["echo"], False),
        ({"prompt": '"echo": true'}, False),
    ],
)  # fmt: skip
def test_whether_a_prompt_is_given_back_is_known_to_those_who_record(monkeypatch, body, asked, asleep):
    async def scene():
        from torpor.vllm.server.recorder import echo_of_call

        app, server = build(monkeypatch, [])
        await started(server)
        seen = []

        async def echo(request: Request):
            await request.body()
            seen.append(echo_of_call.get().asked)

        app.add_api_route("/v1/completions", echo, methods=["POST"])
        async with client(app) as http:
            if asleep:
                await server.sleep()
            call = asyncio.create_task(http.post("/v1/completions", json=body))
            while asleep and server.queued == 0:
                await asyncio.sleep(0)
            if asleep:
                await server.wake_up()
            assert (await call).status_code == 200 and seen == [asked]

    run(scene())


def test_a_large_request_is_not_kept_without_bound_while_it_waits(monkeypatch):
    async def scene():
        from starlette.datastructures import Headers
        from torpor.vllm.server.event_stream import EventStream
        from torpor.vllm.server.gate import _MOST_KEPT_BYTES, _Held

        _, server = build(monkeypatch, [])
        await started(server)
        await server.sleep()
        taken = 0

        async def receive():
            nonlocal taken
            taken += 1 << 16
            return {"type": "http.request", "body": b"l" * (1 << 16), "more_body": True}

        scope = {"type": "http", "path": "/v1/completions"}
        held = _Held(receive, EventStream(server, "/v1/completions", None, 1, set()), scope, Headers())
        waiting = asyncio.create_task(held.until_let_in(server))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert taken == _MOST_KEPT_BYTES and not waiting.done()
        await server.wake_up()
        assert await waiting is None
        for _ in range(100):
            assert (await held())["body"]

    run(scene())


def test_a_socket_waits_or_is_refused_like_a_request(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)

        async def connect(key: str) -> list[str]:
            sent, incoming = [], [{"type": "websocket.connect"}]

            async def receive():
                return incoming.pop(0) if incoming else {"type": "websocket.disconnect", "code": 1000}

            async def send(message):
                sent.append(message["type"])

            headers = [(b"authorization", f"Bearer {key}".encode())]
            scope = {"type": "websocket", "path": "/v1/realtime", "query_string": b"", "subprotocols": []}
            await app(scope | {"headers": headers}, receive, send)
            return sent

        assert await connect(CLIENT) == ["websocket.accept", "websocket.close"]
        await server.sleep()
        waiting = asyncio.create_task(connect(CLIENT))
        while server.queued == 0:
            await asyncio.sleep(0)
            assert not waiting.done(), waiting.result()
        await server.wake_up()
        assert await waiting == ["websocket.accept", "websocket.close"]
        object.__setattr__(server.settings, "new_requests", "refuse")
        await server.sleep()
        assert await connect(CLIENT) == ["websocket.close"]

    run(scene())


def test_a_route_that_nobody_knows_is_refused_while_asleep_and_said_once(monkeypatch, caplog):
    async def scene():
        app, server = build(monkeypatch, [("POST", "/other/plugin/{name}")], *KEYS)
        await started(server)
        async with client(app) as http, client(app, None) as nobody:
            assert (await http.post("/other/plugin/a")).status_code == 200
            assert (await nobody.post("/other/plugin/a")).status_code == 401
            await server.sleep()
            for name in ("a", "b"):
                answer = await asyncio.wait_for(http.post(f"/other/plugin/{name}"), 5)
                assert answer.status_code == 503 and "does not know" in answer.text
            assert (await http.post("/nothing/here")).status_code == 404
            assert (await http.put("/other/plugin/a")).status_code == 405

    caplog.set_level(logging.WARNING)
    logging.getLogger("vllm").addHandler(caplog.handler)
    run(scene())
    assert len({id(record) for record in caplog.records if "/other/plugin/{name}" in record.getMessage()}) == 1


def test_a_request_that_comes_another_way_waits_in_the_same_bounded_queue(monkeypatch):
    async def scene():
        from vllm.exceptions import GracefulHTTPError

        _, server = build(monkeypatch, [], queue_limit=1)
        await started(server)
        await server.sleep()
        first = asyncio.create_task(server.engine.add_request("first"))
        while server.queued == 0:
            await asyncio.sleep(0)
            assert not first.done()
        with pytest.raises(GracefulHTTPError, match="1 requests wait already"):
            await asyncio.wait_for(server.engine.add_request("second"), 5)
        await server.wake_up()
        await first
        assert ("add_request", "first") in server.engine.calls and ("add_request", "second") not in server.engine.calls

    run(scene())


def test_a_request_that_was_let_in_before_the_sleep_gets_an_error_when_the_server_ends(monkeypatch):
    async def scene():
        from vllm.exceptions import GracefulHTTPError

        app, server = build(monkeypatch, [], queue_limit=0)
        await started(server)
        let_in = asyncio.Event()

        async def handler():
            await let_in.wait()
            await server.engine.add_request("late")

        app.add_api_route("/v1/completions", handler, methods=["POST"])
        async with client(app) as http:
            call = asyncio.create_task(http.post("/v1/completions"))
            await asyncio.sleep(0.05)
            server.enter("falling asleep")
            let_in.set()
            await asyncio.sleep(0.05)
            assert not call.done()  # it was let in: the limit of the queue is not for it
            server.enter("ending")
            with pytest.raises(GracefulHTTPError, match="ending"):
                await asyncio.wait_for(call, 60)

    run(scene())


@pytest.mark.parametrize("path", ["/update_weights", "/collective_rpc", "/weight_checker", "/finish_weight_update"])
def test_weights_can_be_changed_when_they_are_there_and_not_before(monkeypatch, path):
    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app, ADMIN) as http:
            assert (await http.post(path)).status_code == 200
            await server.sleep()
            answer = await http.post(path)
            assert answer.status_code == 409 and "tags=weights" in answer.text
            await server.wake_up(["weights"])
            assert server.state == "asleep" and (await http.post(path)).status_code == 200

    run(scene())


@pytest.mark.parametrize(
    "path", ["/reset_prefix_cache", "/pause", "/resume", "/v1/load_lora_adapter", "/scale_elastic_ep"]
)
def test_what_changes_an_engine_that_sleeps_is_refused(monkeypatch, path):
    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app, ADMIN) as http:
            assert (await http.post(path)).status_code == 200
            await server.sleep()
            answer = await http.post(path)
            assert answer.status_code == 409 and "wake" in answer.text

    run(scene())


ENDS_REQUESTS = [
    ("POST", "/abort_requests"), ("POST", "/inference/v1/abort_requests"),
    ("POST", "/v1/responses/{response_id}/cancel"), ("DELETE", "/torpor/requests/{response}"),
    ("DELETE", "/v1/sessions/{response}"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ENDS_REQUESTS)
def test_what_ends_requests_waits_for_a_hand_over_and_is_refused_after_it(monkeypatch, method, path):
    """The next server has them: 200 would say that they have ended. vLLM answers some of these calls before it ends
    any request."""

    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app, ADMIN) as http:

            async def call():
                return await http.request(method, concrete(path))

            before = await call()
            assert before.status_code not in (409, 500)
            waits, stock = asyncio.Event(), server.has_handed_over

            async def has_handed_over() -> bool:
                waits.set()
                return await stock()

            server.has_handed_over = has_handed_over
            for hands_over in (False, True):
                server.enter("handing over")
                waits.clear()
                calling, waiting = asyncio.create_task(call()), asyncio.create_task(waits.wait())
                await asyncio.wait({calling, waiting}, return_when=asyncio.FIRST_COMPLETED)
                assert waiting.done() and not calling.done()
                server.handed_over = hands_over
                server.enter("ending" if hands_over else "awake")
                answer = await calling
                assert answer.status_code == (409 if hands_over else before.status_code)
                assert ("has handed over" in answer.text) == hands_over, answer.text

    run(scene())


def test_a_server_has_a_request_that_it_is_taking(monkeypatch, tmp_path):
    """Its image is gone a moment before the response log knows it. Who gave it away must not go on with it then."""

    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, *KEYS, engine=Engine(tmp_path))
        await started(server)
        async with client(app, ADMIN) as http:
            assert (await http.get("/torpor/has/x-1")).json() == {"has": False}
            server.engine.output_processor.request_states["x-1"] = object()
            assert (await http.get("/torpor/has/x-1")).json() == {"has": True}

    run(scene())
