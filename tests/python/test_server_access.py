# SPDX-License-Identifier: Apache-2.0
"""Who may call what, and which tenant a key is: without an engine."""

import gc
import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from server_calls import CHANGES_THE_ENGINE, EVERYTHING
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

KEYS = ("--api-key", CLIENT, OTHER_CLIENT)

# --- who may ---------------------------------------------------------------------------------------------------------

# A plan looks at every request of the engine between two of its steps.
OWN_CHANGES = ["/sleep", "/wake_up", "/torpor/checkpoint", "/swap", "/torpor/plan"]


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
            nothing = await nobody.get("/torpor/requests/r")  # may ask; there is none
            assert nothing.status_code == 404 and nothing.json()["error"]["code"] == "not_found"
            assert "there is no answer r" in nothing.json()["error"]["what"]
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


@pytest.mark.parametrize("words", [["--torpor-wake-on-request", "yes"], ["--torpor-incremental", "0"]])
def test_a_value_of_an_option_that_takes_none_is_not_left_to_vllm(words, capsys):
    from torpor.vllm.serve import take_options

    with pytest.raises(SystemExit):
        take_options([*words, "model"])
    assert f"{words[0]} takes no value: leave out {words[1]!r}" in capsys.readouterr().err


def test_a_setting_that_is_neither_on_nor_off_is_refused(monkeypatch):
    from torpor.errors import InvalidArgument
    from torpor.vllm.options import Options
    from torpor.vllm.server.settings import Settings

    for text, value in (("1", True), ("On", True), ("yes", True), ("no", False), ("FALSE", False), ("0", False)):
        monkeypatch.setenv("TORPOR_SERVER_WAKE_ON_REQUEST", text)
        monkeypatch.setenv("TORPOR_INCREMENTAL", text)
        assert Settings.from_environment().wake_on_request is value
        assert Options.of(SimpleNamespace(additional_config=None)).incremental is value
    for name in ("TORPOR_SERVER_WAKE_ON_REQUEST", "TORPOR_INCREMENTAL", "TORPOR_ENABLED"):
        monkeypatch.setenv(name, "")
    assert Settings.from_environment() == Settings()
    assert Options.of(SimpleNamespace(additional_config=None)) == Options()
    for name, of in (
        ("TORPOR_SERVER_WAKE_ON_REQUEST", Settings.from_environment),
        ("TORPOR_INCREMENTAL", lambda: Options.of(SimpleNamespace(additional_config=None))),
    ):
        monkeypatch.setenv(name, "enabled")
        with pytest.raises(InvalidArgument, match=f"{name} is 'enabled'"):
            of()
        monkeypatch.delenv(name)


# --- tenants ---------------------------------------------------------------------------------------------------------


def tenant_of(server, **headers) -> str:
    from starlette.datastructures import Headers

    return server.tenant(Headers({name.replace("_", "-"): value for name, value in headers.items()}))


def test_tenants_do_not_reveal_keys_and_survive_a_restart(monkeypatch, tmp_path):
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


@pytest.mark.parametrize("harm", ["short", "link", "readable", "directory", "group"])
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
        file.write_bytes(b"x" * (5 if harm == "short" else 32))
        file.chmod({"readable": 0o644, "group": 0o640}.get(harm, 0o600))
        if harm == "group":
            if os.geteuid() != 0:
                pytest.skip("only root can give a file to a group that it is not in")
            os.chown(file, -1, 4711)

    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(directory.parent))
        await started(server)
        assert server.state == "failed" and "tenants.secret" in str(server.problem)

    run(scene())
    assert file.is_symlink() or file.exists()


def test_a_secret_that_kubelet_gave_to_the_group_of_the_pod_is_taken_back(tmp_path):
    from torpor.vllm.server.access import tenant_secret

    file = tmp_path / "tenants.secret"
    secret = tenant_secret(str(tmp_path))
    for _ in range(2):
        os.chown(file, -1, os.getegid())
        file.chmod(0o660)
        assert tenant_secret(str(tmp_path)) == secret
        assert file.stat().st_mode & 0o777 == 0o600


def test_two_that_begin_at_once_get_one_secret(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from torpor.vllm.server.access import tenant_secret

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: tenant_secret(str(tmp_path)), range(64)))
    assert len(found) == 1 and [path.name for path in tmp_path.iterdir()] == ["tenants.secret"]


# --- what is public --------------------------------------------------------------------------------------------------


def listed_as_public() -> set[tuple[str, str]]:
    """The routes that docs/reference/http.md lists as answering without a key."""
    text = (Path(__file__).parents[2] / "docs/reference/http.md").read_text()
    listed = text.split("\n## Public routes\n")[1].split("\n## ")[0]
    return {(method, path.removesuffix("/*")) for method, path in re.findall(r"`(GET|POST) (/[^` ]+)`", listed)}


def path_below(method: str, path: str) -> str:
    from server_stubs import concrete

    return concrete(path).replace("{method}", "snapshot") + ("/anything" if method == "MOUNT" else "")


@pytest.mark.parametrize("state", ["awake", "asleep", "failed"])
def test_the_public_routes_are_exactly_those_listed(monkeypatch, state):
    """Of the routes of the application itself, with all of vLLM's that can be switched on, one by one without a key."""
    from test_server_gate import routes_of, routes_of_vllm
    from torpor.errors import Damaged

    monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
    known_by_vllm = sorted(routes_of_vllm(monkeypatch))

    async def scene():
        app, server = build(monkeypatch, known_by_vllm, *KEYS)
        await started(server)
        if state == "asleep":
            await server.sleep()
        elif state == "failed":
            server.fail(Damaged("STATE"))
        every = routes_of(app)
        assert {("POST", "/sleep"), ("GET", "/torpor/state"), ("POST", "/v1/completions")} <= every
        public = set()
        async with client(app, None) as nobody, client(app, "a wrong key") as stranger:
            for method, path in sorted(every - {("WEBSOCKET", "/v1/realtime")}):
                asked = ("GET" if method == "MOUNT" else method, path_below(method, path))
                answers = [await http.request(*asked) for http in (nobody, stranger)]
                refused = {answer.status_code in (401, 403) for answer in answers}
                assert len(refused) == 1, (method, path)
                if refused == {False}:
                    public.add((asked[0], path))
        assert server.engine.state == ("asleep" if state == "asleep" else "awake"), "somebody changed the engine"
        assert public == listed_as_public(), "decide so in route_table.py, and run tools/dev reference"

    run(scene())
