"""Who may call what, and what becomes of a call while the engine is not awake: without an engine."""

import asyncio
import gc
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from fastapi import Request
from server_stubs import (  # noqa: F401
    ADMIN,
    CLIENT,
    OTHER_CLIENT,
    Engine,
    add_echo,
    arguments,
    build,
    client,
    concrete,
    no_settings,
    run,
    started,
)

KEYS = ("--api-key", CLIENT, OTHER_CLIENT)

CHANGES_THE_ENGINE = [
    "/collective_rpc", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/pause", "/resume",
    "/abort_requests", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
    "/weight_checker", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/start_profile",
    "/stop_profile", "/scale_elastic_ep", "/fault_tolerance/apply", "/release_kv_cache_memory",
]  # fmt: skip
BEGINS_A_REQUEST = [
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/systemone", "/inference/v1/generate", "/generative_scoring", "/cohere/v2/chat", "/invocations",
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
    "/v2/rerank", "/v1/audio/transcriptions", "/v1/audio/translations",
]  # fmt: skip
NEEDS_NO_ENGINE = [
    ("POST", "/v1/responses/{response_id}/cancel"), ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/chat/completions/render"), ("POST", "/v1/completions/render"), ("POST", "/v1/responses/render"),
    ("POST", "/v1/messages/render"), ("POST", "/cohere/v2/chat/render"), ("POST", "/v1/chat/completions/derender"),
    ("POST", "/v1/completions/derender"), ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/v1/models"), ("GET", "/version"), ("GET", "/load"), ("MOUNT", "/metrics"),
    ("POST", "/inference/v1/abort_requests"),
]  # fmt: skip
EVERYTHING = [
    *(("POST", path) for path in CHANGES_THE_ENGINE + BEGINS_A_REQUEST), *NEEDS_NO_ENGINE,
    ("WEBSOCKET", "/v1/realtime"),
]  # fmt: skip


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


def routes_of_vllm(monkeypatch) -> set[tuple[str, str]]:
    """Of the application that vLLM builds, with all that can be switched on."""
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


def test_every_route_of_vllm_and_of_torpor_is_in_the_table_and_no_other(monkeypatch):
    from torpor.vllm.server.route_table import ROUTES

    vllm = routes_of_vllm(monkeypatch) | routes_in_the_source()
    assert {("POST", "/v1/chat/completions"), ("MOUNT", "/metrics"), ("POST", "/classify")} <= vllm  # it does look
    app, _ = build(monkeypatch, [])
    own = routes_of(app)
    assert sorted((vllm | own) - set(ROUTES)) == [], "decide in route_table.py what becomes of these while asleep"
    assert sorted(set(ROUTES) - vllm - own) == [], "these are routes of nobody"


def test_no_two_places_of_the_table_are_meant_by_one_path():
    from torpor.vllm.server.route_table import ROUTES, rule_of

    for method, path in ROUTES:
        assert rule_of(method, concrete(path)) is ROUTES[method, path], (method, path)


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


def test_a_large_request_is_not_kept_without_bound_while_it_waits(monkeypatch):
    async def scene():
        from torpor.vllm.server.gate import _MOST_KEPT_BYTES, _Held

        _, server = build(monkeypatch, [])
        await started(server)
        await server.sleep()
        taken = 0

        async def receive():
            nonlocal taken
            taken += 1 << 16
            return {"type": "http.request", "body": b"l" * (1 << 16), "more_body": True}

        held = _Held(receive, True)
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


def test_a_request_that_was_let_in_before_the_sleep_is_told_when_the_server_ends(monkeypatch):
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
            server._enter("falling asleep")
            let_in.set()
            await asyncio.sleep(0.05)
            assert not call.done()  # it was let in: the limit of the queue is not for it
            server._enter("ending")
            with pytest.raises(GracefulHTTPError, match="ending"):
                await asyncio.wait_for(call, 5)

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


# --- who may ---------------------------------------------------------------------------------------------------------

OWN_CHANGES = ["/sleep", "/wake_up", "/torpor/checkpoint"]


@pytest.mark.parametrize("path", CHANGES_THE_ENGINE + OWN_CHANGES)
def test_only_the_admin_key_changes_the_engine(monkeypatch, path):
    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app) as of_client, client(app, None) as nobody, client(app, ADMIN) as admin:
            answer = await of_client.post(path)
            assert answer.status_code == 403 and "admin key" in answer.text
            assert (await nobody.post(path)).status_code == 401
            assert not any(call[0] in ("sleep", "wake_up") for call in server.engine.calls)
            assert (await admin.post(path)).status_code not in (401, 403)

    run(scene())


def test_without_an_admin_key_no_key_of_a_client_changes_the_engine(monkeypatch):
    async def scene():
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # opens the routes, not who may use them
        app, server = build(monkeypatch, EVERYTHING, *KEYS, allow_unauthenticated=True)
        await started(server)
        async with client(app) as http:
            for path in CHANGES_THE_ENGINE + OWN_CHANGES:
                answer = await http.post(path)
                assert answer.status_code == 403 and "--torpor-admin-key" in answer.text, path
            assert (await http.post("/v1/chat/completions")).status_code == 200

    run(scene())


@pytest.mark.parametrize("opened_by", ["nothing", "dev mode", "allow_unauthenticated"])
def test_without_any_key_it_is_open_only_where_the_operator_said_so(monkeypatch, opened_by, caplog):
    async def scene():
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1" if opened_by == "dev mode" else "0")
        if opened_by == "allow_unauthenticated":
            monkeypatch.setenv("TORPOR_SERVER_ALLOW_UNAUTHENTICATED", "1")
        app, server = build(monkeypatch, EVERYTHING)
        await started(server)
        async with client(app, None) as http:
            statuses = {(await http.post(path)).status_code for path in CHANGES_THE_ENGINE + OWN_CHANGES[:1]}
            assert statuses == ({403} if opened_by == "nothing" else {200})

    caplog.set_level(logging.WARNING)
    logging.getLogger("vllm").addHandler(caplog.handler)
    run(scene())
    said = any("whoever reaches this server" in record.getMessage() for record in caplog.records)
    assert said == (opened_by != "nothing")


def test_an_admin_key_alone_leaves_clients_as_they_were(monkeypatch):
    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING)
        await started(server)
        async with client(app, None) as nobody, client(app, ADMIN) as admin:
            assert (await nobody.post("/v1/chat/completions")).status_code == 200
            assert (await nobody.post("/sleep")).status_code == 401
            assert (await nobody.get("/torpor/state")).status_code == 401
            assert (await admin.get("/torpor/state")).status_code == 200
            assert (await nobody.get("/torpor/requests/r")).status_code == 404  # may ask; there is none
            assert (await admin.post("/sleep")).status_code == 200

    run(scene())


def test_the_admin_may_do_what_clients_may(monkeypatch):
    """One header is enough: vLLM's own guard of /v1 lets the admin key in."""

    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app, ADMIN) as admin:
            for path in ("/v1/load_lora_adapter", "/v1/chat/completions", "/tokenize"):
                assert (await admin.post(path)).status_code == 200, path

    run(scene())


def test_the_admin_key_comes_from_the_environment_or_a_file_and_is_not_shown(monkeypatch, tmp_path):
    from torpor.errors import InvalidArgument
    from torpor.vllm.server.access import Access
    from torpor.vllm.server.settings import Settings

    file = tmp_path / "key"
    file.write_text(f"  {ADMIN}\n")
    for name, value in (("TORPOR_ADMIN_KEY", ADMIN), ("TORPOR_ADMIN_KEY_FILE", str(file))):
        with monkeypatch.context() as one:
            one.setenv(name, value)
            settings = Settings.from_environment()
            assert ADMIN not in repr(settings)
            assert settings.admin() == ADMIN
            assert ADMIN not in repr(Access.of(arguments(*KEYS), settings))
    for settings, words in (
        (Settings(admin_key=ADMIN, admin_key_file=str(file)), "both"),
        (Settings(admin_key_file=str(tmp_path / "none")), "cannot be read"),
        (Settings(admin_key="a key"), "white space"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            settings.admin()
    file.write_text("\n")
    with pytest.raises(InvalidArgument, match="no key"):
        Settings(admin_key_file=str(file)).admin()
    with pytest.raises(InvalidArgument, match="client"):
        Access.of(arguments(*KEYS), Settings(admin_key=CLIENT))


def test_options_of_the_command_reach_the_server(monkeypatch, tmp_path):
    from torpor.vllm.serve import take_options
    from torpor.vllm.server.settings import Settings

    for name in ("TORPOR_ADMIN_KEY", "TORPOR_SERVER_QUEUE_LIMIT"):  # so that they are put back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert take_options(["model", "--torpor-admin-key", ADMIN, "--torpor-queue-limit", "7"]) == ["model"]
    assert Settings.from_environment().admin() == ADMIN and Settings.from_environment().queue_limit == 7


# --- tenants ---------------------------------------------------------------------------------------------------------


def tenant_of(server, **headers) -> str:
    from starlette.datastructures import Headers

    return server.tenant(Headers({name.replace("_", "-"): value for name, value in headers.items()}))


def test_tenants_cannot_be_told_from_keys_and_survive_a_restart(monkeypatch, tmp_path):
    import hashlib

    async def once(directory) -> str:
        _, server = build(monkeypatch, [], *KEYS, engine=Engine(directory))
        await started(server)
        assert server.state == "awake", server.problem
        return tenant_of(server, Authorization=f"Bearer {CLIENT}")

    async def scene():
        first = await once(tmp_path / "a")
        guesses = (CLIENT, f"Bearer {CLIENT}", f"Bearer {CLIENT}\0", f"bearer {CLIENT}")
        assert first not in [hashlib.sha256(text.encode()).hexdigest() for text in guesses]
        assert CLIENT not in first and len(first) == 64
        return first

    first = run(scene())
    gc.collect()  # the first server lets go of the directory
    assert run(once(tmp_path / "a")) == first  # a restart, a take-over
    assert run(once(tmp_path / "b")) != first
    secrets = [path for path in (tmp_path / "a").rglob("*") if path.name == "tenants.secret"]
    assert len(secrets) == 1 and secrets[0].stat().st_mode & 0o777 == 0o600 and secrets[0].stat().st_size == 32
    assert not any(CLIENT.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_one_key_is_one_tenant_however_it_is_written(monkeypatch):
    _, server = build(monkeypatch, [], tenant_header="X-Tenant")
    one = tenant_of(server, Authorization=f"Bearer {CLIENT}")
    for text in (f"bearer {CLIENT}", f"BEARER   {CLIENT} ", f" Bearer {CLIENT}", f"Bearer\t{CLIENT}"):
        assert tenant_of(server, Authorization=text) == one, text
    assert tenant_of(server, Authorization=f"Bearer {CLIENT.upper()}") != one
    assert tenant_of(server, Authorization=f"Basic {CLIENT}") != one
    of_a = tenant_of(server, Authorization=f"Bearer {CLIENT}", X_Tenant="a")
    assert of_a not in ("", one) and tenant_of(server, Authorization=f"bearer {CLIENT}", X_Tenant=" a ") == of_a
    assert tenant_of(server) == ""


@pytest.mark.parametrize("harm", ["short", "link", "readable", "directory"])
def test_a_secret_that_was_tampered_with_is_refused_and_kept(monkeypatch, tmp_path, harm):
    directory = tmp_path / "torpor" / "answers"
    directory.mkdir(mode=0o700, parents=True)
    directory.parent.chmod(0o700)
    file = directory / "tenants.secret"
    if harm == "link":
        (tmp_path / "elsewhere").write_bytes(b"x" * 32)
        file.symlink_to(tmp_path / "elsewhere")
    elif harm == "directory":
        file.mkdir()
    else:
        file.write_bytes(b"x" * (32 if harm == "readable" else 5))
        file.chmod(0o644 if harm == "readable" else 0o600)

    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(directory.parent))
        await started(server)
        assert server.state == "failed" and "tenants.secret" in str(server.problem)

    run(scene())
    assert file.is_symlink() or file.exists()


def test_two_that_begin_at_once_get_one_secret(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from torpor.vllm.server.access import tenant_secret

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: tenant_secret(str(tmp_path)), range(64)))
    assert len(found) == 1 and [path.name for path in tmp_path.iterdir()] == ["tenants.secret"]


# --- alive, ready ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "health"), [
    ("incompatible", 200), ("corruption", 200), ("unauthenticated", 200), ("unsupported", 200), ("not_found", 200),
    ("resource_exhausted", 503), ("io", 503), ("unavailable", 503), ("device", 503),
])  # fmt: skip
def test_a_server_is_alive_where_a_restart_cannot_help(monkeypatch, tmp_path, code, health):
    async def scene():
        from torpor import errors

        problem = errors.make(code, "the checkpoint is of another model", "use another one")
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
        server.engine.fails_with, server.engine.state = DeviceError("it does not let go"), "lost"
        with pytest.raises(DeviceError):
            await server.sleep()
        async with client(app) as http:
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/torpor/ready")).status_code == 503
            assert (await asyncio.wait_for(http.post("/v1/completions"), 5)).status_code == 503

    run(scene())


# --- deploy/ -----------------------------------------------------------------------------------------------------------

DEPLOY = Path(__file__).parents[2] / "deploy"


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
    assert settings.wake_on_request and os.environ["TORPOR_DIR"].startswith("/state/")
    delay = container["lifecycle"]["preStop"]["exec"]["command"]
    assert delay[:2] == ["/bin/sh", "-c"] and re.fullmatch(r"sleep \d+", delay[2])
    assert pod["terminationGracePeriodSeconds"] >= int(delay[2].split()[1]) + settings.sigterm_seconds + 10
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/torpor/ready"}
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 300
    assert {each["name"] for each in container["env"]} >= {"VLLM_API_KEY", "TORPOR_ADMIN_KEY"}  # not among the arguments


def test_alerts_and_board_ask_for_metrics_that_exist(monkeypatch):
    import json

    from prometheus_client import CollectorRegistry
    from torpor.vllm.server.metrics import Metrics

    registry = CollectorRegistry()
    Metrics(registry)
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    exist = {family.name + end for family in registry.collect() for end in suffixes[family.type]}
    board = json.loads((DEPLOY / "grafana/torpor.json").read_text())
    assert all(panel["description"].endswith("?") for panel in board["panels"])  # the question that it answers
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked.append((DEPLOY / "helm/torpor/files/alerts.yaml").read_text())
    assert set(re.findall(r"\btorpor_\w+", "\n".join(asked))) - {"torpor_phase_seconds"} <= exist


# --- sleeping by mode, metrics ---------------------------------------------------------------------------------------


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


def test_a_server_that_ends_does_not_wait_for_requests_to_end(monkeypatch):
    async def scene():
        from torpor.errors import WrongState

        _, server = build(monkeypatch, [])
        await started(server)
        server.engine.output_processor.request_states["running"] = object()
        falling = asyncio.create_task(server.sleep(1, "wait", False))
        await asyncio.sleep(0.05)
        server._enter("ending")
        with pytest.raises(WrongState, match="ends"):
            await falling
        assert not server._operation.locked()

    run(scene())


def test_counts_are_counters_and_amounts_are_gauges(monkeypatch):
    from prometheus_client import CollectorRegistry
    from torpor.vllm.server.metrics import Metrics

    registry = CollectorRegistry()
    Metrics(registry)
    kinds = {family.name: family.type for family in registry.collect()}
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        "torpor_operations", "torpor_moved_bytes", "torpor_requests_restored", "torpor_requests_refused",
        "torpor_requests_failed", "torpor_requests_rolled_forward", "torpor_answer_log_failures",
        "torpor_automatic_operations",
    }  # fmt: skip
    assert {name for name, kind in kinds.items() if kind == "histogram"} == {
        "torpor_operation_seconds", "torpor_phase_seconds", "torpor_queue_seconds",
    }  # fmt: skip
    assert kinds["torpor_answer_log_bytes"] == "gauge" and kinds["torpor_requests_queued"] == "gauge"


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
            await server.wake_up()
            await call
        return {s.name: s.value for s in next(iter(server.metrics.waited.collect())).samples if "bucket" not in s.name}

    samples = run(scene())
    assert samples["torpor_queue_seconds_count"] == 1  # not the one that did not wait
    assert samples["torpor_queue_seconds_sum"] > 0
