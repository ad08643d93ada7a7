# SPDX-License-Identifier: Apache-2.0
"""A server starts, without an engine: it checks what it finds before it has one, and its checkpoint may not fit."""

import asyncio
import contextlib
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from server_stubs import Engine, arguments, build, metric, no_settings, report, run, started  # noqa: F401
from servers import ServerEnded, make_server
from torpor import _core
from torpor.errors import Aborted, Busy, Damaged, Error, Incompatible, InvalidArgument, WrongState
from torpor.vllm.scheduler_values import unstarted_request
from torpor.vllm.values import sampling_to_value
from vllm import SamplingParams

OTHER = Incompatible("max_num_seqs: checkpoint has 64, this engine has 32")


def answer(request_id: str) -> dict:
    request = unstarted_request(request_id, [1, 2], sampling_to_value(SamplingParams(max_tokens=4)), 0.0)
    return {"request": request, "response": request_id, "tenant": "", "choice": 0, "front": {"state": {}}}


def outcome(monkeypatch, directory, wakes_with, in_checkpoint=(), ended=(), running=(), **settings):
    """State of a server that found this at its start, and what it left."""

    async def scene():
        from torpor.vllm.server import life, start

        def read_checkpoint(path, key_file):
            assert path == str(directory)
            values = {"scheduler": {"requests": [{"id": each} for each in in_checkpoint]}}
            return SimpleNamespace(to_dict=lambda: values)  # as EngineCheckpoint has it

        there = SimpleNamespace(read_checkpoint=read_checkpoint, list_checkpoints=lambda *_: ["g-000001"])
        monkeypatch.setattr(start, "_core", there)
        engine = Engine(directory, wakes_with=wakes_with)
        _, server = build(monkeypatch, [], engine=engine, **settings)
        stock = life.Recorder

        def recorder(processor, answers, *others):
            found = stock(processor, answers, *others)
            for each in (*ended, *running):
                answers.start(answer(each))
            for each in ended:
                found.end(each, "finished", "stop", None)
            return found

        monkeypatch.setattr(life, "Recorder", recorder)
        await started(server)
        states = {each["request"]["id"]: each["state"] for each in server.recorder.answers.all()}
        return server, states

    return run(scene())


@pytest.mark.parametrize("in_checkpoint", [(), ("a", "b")])
def test_it_serves_without_one_that_holds_no_running_request(monkeypatch, tmp_path, in_checkpoint):
    server, _ = outcome(monkeypatch, tmp_path, OTHER, in_checkpoint, ended=("a", "b", "c"))
    assert server.state == "awake" and server.problem is None
    assert server.left_checkpoint == {"path": str(tmp_path), "why": str(OTHER)}
    wakes = [options for method, options in server.engine.calls if method == "wake_up"]
    assert len(wakes) == 1, "it has computed requests again"


@pytest.mark.parametrize(
    "found",
    [
        {"in_checkpoint": ("a",)},  # no record says that it has ended
        {"running": ("a",)},
        {"in_checkpoint": ("a", "b"), "ended": ("a",)},
    ],
)
def test_it_does_not_serve_without_one_that_would_lose_a_request(monkeypatch, tmp_path, found):
    server, _ = outcome(monkeypatch, tmp_path, OTHER, **found)
    assert server.state == "failed" and server.problem is OTHER and server.left_checkpoint is None


def test_damage_says_nothing_of_requests(monkeypatch, tmp_path):
    server, _ = outcome(monkeypatch, tmp_path, Damaged("STATE"))
    assert server.state == "failed"


def test_discard_ends_only_those_that_run(monkeypatch, tmp_path):
    server, states = outcome(monkeypatch, tmp_path, OTHER, running=("a",), ended=("b",), on_wake_error="discard")
    assert server.state == "awake" and states == {"a": "failed", "b": "finished"}
    assert metric(server, "torpor_start_requests", result="failed") == 1


class Steps(Engine):
    """Has a checkpoint without requests, and takes steps from the end of the hold on: it would answer between two."""

    async def _torpor(self, method: str, options: dict | None = None):
        if method != "wake_up":
            return await super()._torpor(method, options)
        self.calls.append((method, options))
        there = {"restored": [], "outputs": {"requests": []}, "failed_requests": [], "paused": self.paused}
        replayed = {"extended": [], "added": [], "dropped": []}
        return report(checkpoint="/nowhere/g-000001", checkpoint_bytes=1, replayed=replayed, **there)

    async def is_paused(self):
        self.calls.append(("is_paused",))
        return self.paused

    def _run_output_handler(self) -> None: ...


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_that_goes_on_is_asked_nothing_before_the_server_serves(monkeypatch, tmp_path, paused):
    from torpor.vllm.server import start

    async def scene():
        monkeypatch.setattr(start, "has_checkpoint", lambda server: True)
        monkeypatch.setattr(start.logger, "warning", lambda words, *values: warned.append(words % values))
        engine = Steps(tmp_path)
        engine.paused = paused
        _, server = build(monkeypatch, [], engine=engine)
        await started(server)
        assert server.state == "awake" and server.last_checkpoint["path"] == "/nowhere/g-000001"
        methods = [call[0] for call in engine.calls]
        assert methods.index("ledger") < methods.index("wake_up") and methods[-1] == "end_hold"

    warned = []
    run(scene())
    assert any("the engine is paused" in line for line in warned) == paused


class Store:
    """What is newest in the object store does not fit: only its answers came."""

    unfit = OTHER

    def __init__(self, *_):
        pass

    async def arrive(self, _fingerprint) -> str:
        return ""

    async def release(self) -> None:
        pass

    async def disowned(self) -> None:
        pass


@pytest.mark.parametrize(("running", "state"), [((), "awake"), (("a",), "failed")])
def test_one_in_an_object_store_is_left_there_where_no_answer_runs(monkeypatch, tmp_path, running, state):
    from torpor.vllm.server import life

    monkeypatch.setattr(life, "Remote", Store)
    store = "s3://bucket/prefix"
    server, _ = outcome(monkeypatch, tmp_path, None, ended=("b",), running=running, object_store=store)
    assert server.state == state
    assert server.left_checkpoint == (None if running else {"path": store, "why": str(OTHER)})


TERM_SECONDS, FETCH_SECONDS = 1.5, 2.0


def in_store(folder: Path):
    """What a server with this directory has in an object store, which is empty."""
    from torpor.vllm.options import Options
    from torpor.vllm.server import remote
    from torpor.vllm.server.settings import Settings

    (folder / "store").mkdir()
    store = Settings(object_store=f"file://{folder}/store", ownership_term_seconds=TERM_SECONDS)
    return remote.Remote(store, Options(checkpoint_dir=str(folder / "d")))


def test_it_goes_on_owning_while_it_fetches_for_longer_than_a_term(monkeypatch, tmp_path):
    async def scene():
        home = in_store(tmp_path)
        monkeypatch.setattr(home, "_fetch", lambda _: time.sleep(FETCH_SECONDS) or "/d/pulled")
        assert await home.arrive({}) == "/d/pulled"
        assert home._home.owns()
        await home.release()
        await home.disowned()

    run(scene())


def test_a_term_counts_from_before_the_call_that_took_the_ownership(monkeypatch, tmp_path):
    async def scene():
        from torpor.vllm.server import remote

        home, clock, renewed, owns = in_store(tmp_path), [0.0], threading.Event(), [True]

        def take() -> bool:
            clock[0] += TERM_SECONDS / 3  # as long as it may
            return True

        monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(home, "_fetch", lambda _: "")
        home._home = SimpleNamespace(take=take, renew=renewed.set, owns=lambda: owns[0])
        await home.arrive({})
        assert await asyncio.to_thread(renewed.wait, 20)
        owns[0] = False
        await home.disowned()

    run(scene())


def test_one_that_loses_its_ownership_while_it_fetches_says_so_and_does_not_wait(monkeypatch, tmp_path):
    async def scene():
        from torpor.vllm.server import life

        home, fetched, owns = in_store(tmp_path), threading.Event(), [True, True, False]
        monkeypatch.setattr(home, "_fetch", lambda _: fetched.wait(20))
        calls = {"take": lambda: True, "renew": lambda: None, "release": lambda: None, "stop_copies": fetched.set}
        home._home = SimpleNamespace(owns=lambda: owns.pop(0), **calls)
        monkeypatch.setattr(life, "Remote", lambda *_: home)
        _, server = build(monkeypatch, [], engine=Engine(tmp_path / "d"), object_store="file:///nowhere")
        await started(server)
        assert (
            fetched.is_set()
            and server.state == "failed"
            and isinstance(server.problem, Aborted)
            and server.restart_may_help()
        )
        assert "lost the ownership" in server.problem.what and "while it fetched" in server.problem.what

    run(scene())


def test_one_that_ends_while_it_fetches_ends_the_fetch(monkeypatch, tmp_path):
    async def scene():
        home, began, stopped = in_store(tmp_path), threading.Event(), threading.Event()
        monkeypatch.setattr(home, "_fetch", lambda _: began.set() or stopped.wait(20))
        home._home = SimpleNamespace(take=lambda: True, owns=lambda: True, stop_copies=stopped.set)
        arriving = asyncio.create_task(home.arrive({}))
        assert await asyncio.to_thread(began.wait, 20)
        arriving.cancel()  # as the loop's end does: then the process waits for its threads
        with pytest.raises(asyncio.CancelledError):
            await arriving
        assert stopped.is_set()

    run(scene())


# --- before the engine starts ----------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parents[1] / "golden"
CLIENTS, ADMIN = ("--api-key", "key-of-a-client"), {"admin_key": "key-of-the-operator"}


@pytest.fixture
def logged(monkeypatch):
    """The lines that the check logs, each with its level."""
    from torpor.vllm.server import preflight

    lines = []
    for level in ("info", "warning", "error"):
        monkeypatch.setattr(preflight.logger, level, lambda text, *v, level=level: lines.append((level, text % v)))
    return lines


def check(directory: Path | None, *words: str, options: dict | None = None, **settings) -> None:
    from torpor.vllm.options import Options
    from torpor.vllm.server import preflight
    from torpor.vllm.server.settings import Settings

    given = Options(checkpoint_dir=None if directory is None else str(directory), **(options or {}))
    preflight.check(arguments("--port", "0", *words), given, Settings(**settings))


def open_log(directory: Path, **options) -> _core.DeliveryLog:
    return _core.DeliveryLog({"directory": str(directory / "answers"), "engine": {"model": "tiny"}} | options)


def with_checkpoint(directory: Path) -> Path:
    """Copies one with three requests."""
    copied = shutil.copytree(GOLDEN / "v4-unsealed/g-000001", directory / "g-000001")
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return copied


def key_in(path: Path, byte: bytes = b"k") -> str:
    path.write_bytes(byte * 32)
    path.chmod(0o600)
    return str(path)


def test_without_a_directory_it_says_what_a_drain_ends(logged):
    check(None)
    [(level, line)] = logged
    assert level == "warning" and "--torpor-checkpoint-dir" in line and "SIGTERM ends the streams" in line


def test_one_line_says_what_it_found_and_what_it_will_do(logged, tmp_path):
    directory = tmp_path / "new" / "torpor"
    check(directory)
    log = open_log(directory)
    log.start(answer("a"))
    log.sync()
    del log
    with_checkpoint(directory)
    check(directory, *CLIENTS, on_sigterm="stop", **ADMIN)
    assert logged == [
        ("info", f"torpor: directory {directory}: no checkpoint, 0 running answers in the response log; not sealed; "
         "no keys; on SIGTERM a checkpoint within 25 s"),
        ("info", f"torpor: directory {directory}: checkpoint {directory}/g-000001 with 3 requests, 1 running answer "
         "in the response log; not sealed; keys of clients and of the admin; "
         "on SIGTERM no checkpoint: running answers are computed again"),
    ]  # fmt: skip


def test_the_check_holds_nothing_and_a_server_that_runs_is_seen(tmp_path, logged):
    for _ in range(2):
        check(tmp_path / "d")
    log = open_log(tmp_path / "d")
    with pytest.raises(Busy, match="another server uses"):
        check(tmp_path / "d")
    log.start(answer("a"))
    log.sync()
    del log
    check(tmp_path / "d")
    assert "1 running answer" in logged[-1][1]
    with pytest.raises(InvalidArgument, match="1 answers that still run"):
        check(tmp_path / "d", response_log="off")


@pytest.mark.parametrize("harm", ["a file", "below a file", "for others", "answers for others", "unwritable"])
def test_a_directory_that_cannot_be_used_ends_the_start(tmp_path, logged, harm):
    directory = tmp_path / "d"
    if harm in ("a file", "below a file"):
        directory.write_text("")
        directory = directory / "below" if harm == "below a file" else directory
    elif harm == "unwritable":
        directory = Path("/proc/torpor")
    else:
        check(directory)
        logged.clear()
        (directory / "answers" if harm == "answers for others" else directory).chmod(0o777)
    with pytest.raises(Error) as problem:
        check(directory)
    assert str(directory) in str(problem.value) and logged == []
    if "others" in harm:
        assert isinstance(problem.value, WrongState) and "may write to" in str(problem.value)


def test_keys_that_cannot_be_used_end_the_start(tmp_path, logged):
    key = key_in(tmp_path / "key")
    check(tmp_path / "d", options={"key_file": key, "encrypt": True})
    assert f"encrypted with {key}" in logged[-1][1]
    os.chmod(key, 0o644)
    for options, words in (
        ({"key_file": key}, "may be read by others"), ({"key_file": "/none/key"}, "/none/key"),
        ({"encrypt": True}, "encrypt without key_file"),
        ({"wake_latest": True}, "wake_latest"),
    ):  # fmt: skip
        with pytest.raises(Error, match=words):
            check(tmp_path / "d", options=options)
    with pytest.raises(InvalidArgument, match="is a client's key too"):
        check(tmp_path / "d", *CLIENTS, admin_key=CLIENTS[1])
    assert len(logged) == 1


def test_a_standby_touches_nothing_that_its_owner_has(tmp_path, logged):
    held = open_log(tmp_path)
    check(tmp_path, standby_of=str(tmp_path))  # where an owner's start would be refused
    assert logged[-1][1].startswith(f"torpor: standby of {tmp_path}: waits to take over from its owner; ")
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]
    held.close()


@pytest.mark.parametrize("other", [{"object_store": "file:///store"}, {"wake_from": "/checkpoint"}])
def test_a_standby_goes_on_from_its_owners_directory_alone(other):
    from torpor.vllm.server.settings import Settings

    with pytest.raises(InvalidArgument, match="do not go together"):
        Settings(standby_of="/directory", **other)


def test_a_file_descriptor_that_does_not_listen_ends_the_start(tmp_path, logged):
    with open(tmp_path / "file", "w") as file, pytest.raises(InvalidArgument, match="is no socket"):
        check(tmp_path, listen_fd=file.fileno())
    with socket.socket() as quiet, pytest.raises(InvalidArgument, match="does not listen"):
        quiet.bind(("127.0.0.1", 0))
        check(tmp_path, listen_fd=quiet.fileno())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        check(tmp_path, listen_fd=listening.fileno())
        assert listening.getsockname()  # it was not closed


def test_a_file_descriptor_of_states_that_is_no_pipe_ends_the_start(tmp_path, logged):
    with open(tmp_path / "file", "w") as file, pytest.raises(InvalidArgument, match="is no pipe"):
        check(tmp_path, state_fd=file.fileno())
    pipe = os.pipe()
    try:
        check(tmp_path, state_fd=pipe[1])
    finally:
        os.close(pipe[0])
        os.close(pipe[1])
    with pytest.raises(InvalidArgument, match="Bad file descriptor"):
        check(tmp_path, state_fd=pipe[1])


@pytest.mark.parametrize("seconds", ["0", "0.5"])
def test_a_term_in_which_nobody_can_give_a_heartbeat_is_refused(seconds, monkeypatch):
    from torpor.vllm.server.settings import Settings

    monkeypatch.setenv("TORPOR_SERVER_OWNERSHIP_TERM_SECONDS", seconds)
    with pytest.raises(InvalidArgument, match="use 1 or more"):
        Settings.from_environment()


@pytest.mark.parametrize(
    ("flag", "variable"),
    [("sigterm-seconds", "TORPOR_SERVER_SIGTERM_SECONDS"), ("copy-threads", "TORPOR_COPY_THREADS")],
)
def test_a_wrong_value_of_a_flag_is_named_by_the_flag(flag, variable, monkeypatch):
    from torpor.vllm.serve import take_options

    monkeypatch.setenv(variable, "3")  # so that it is as before after the test
    with pytest.raises(InvalidArgument, match=f"^--torpor-{flag} is '-1'"):
        take_options(["MODEL", f"--torpor-{flag}=-1"])


def test_a_port_that_is_in_use_ends_the_start(tmp_path, logged):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(Busy, match=f"port {port} is in use"):
            check(None, "--host", "127.0.0.1", "--port", port)
    check(None, "--host", "127.0.0.1", "--port", port)
    with pytest.raises(InvalidArgument, match=r"cannot listen on 192\.0\.2\.1:"):
        check(None, "--host", "192.0.2.1")
    assert len(logged) == 1


def bound(path: Path, listens: bool = False) -> socket.socket:
    """As vLLM binds a socket: it listens once the model is loaded."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    if listens:
        made.listen(1)
    return made


def test_the_socket_that_an_ended_server_left_is_removed(tmp_path, logged):
    path = tmp_path / "a socket"
    for _ in range(2):
        check(None, "--uds", str(path))
        bound(path).close()
        assert path.is_socket()


@pytest.mark.parametrize("how", ["listens", "listens no more clients", "loads its model"])
def test_the_socket_of_a_server_that_lives_ends_the_start_and_stays(tmp_path, logged, how):
    path = tmp_path / "a socket"
    with bound(path, how != "loads its model"), contextlib.ExitStack() as clients:
        for _ in range(2 if how == "listens no more clients" else 0):
            clients.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        with pytest.raises(Busy, match=f"{path} is in use"):
            check(None, "--uds", str(path))
        assert path.is_socket()


@pytest.mark.parametrize("what", ["a file", "a link", "another user's"])
def test_what_no_server_of_this_user_left_is_kept(monkeypatch, tmp_path, logged, what):
    path, problem = tmp_path / "path", "no socket"
    if what == "a file":
        path.write_text("")
    else:
        bound(path if what != "a link" else tmp_path / "other").close()
        if what == "a link":
            path.symlink_to("other")
        else:
            problem = "another user"
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidArgument, match=problem):
        check(None, "--uds", str(path))
    assert os.path.lexists(path)


@pytest.mark.parametrize("on_wake_error", ["fail", "recompute", "discard"])
@pytest.mark.parametrize("harm", ["damaged", "other key", "not there"])
def test_a_checkpoint_that_cannot_be_used_is_logged_and_left_to_the_start(tmp_path, logged, harm, on_wake_error):
    options, settings = {}, {"on_wake_error": on_wake_error}
    checkpoint = with_checkpoint(tmp_path / "d")
    if harm == "damaged":
        (checkpoint / "STATE").write_bytes(b"x" * 100)
    elif harm == "other key":
        options["key_file"] = key_in(tmp_path / "key")
    else:
        settings["wake_from"] = str(tmp_path / "none")
    check(tmp_path / "d", options=options, **settings)
    then = {"fail": "not be ready", "recompute": "computed again", "discard": "go on without"}[on_wake_error]
    (level, error), (_, line) = logged
    assert level == "error" and then in error and "a checkpoint that cannot be used" in line


def test_a_log_with_another_key_is_logged_and_left_to_the_start(tmp_path, logged):
    log = open_log(tmp_path / "d", key_file=key_in(tmp_path / "one"))
    log.start(answer("a"))
    log.sync()
    del log
    check(tmp_path / "d", options={"key_file": key_in(tmp_path / "other", b"o")})
    assert logged[0][0] == "error" and "a response log that cannot be used" in logged[1][1]


@pytest.mark.slow
def test_the_command_ends_before_its_engine_starts(tiny_model, tmp_path):
    server = make_server(tiny_model, tmp_path / "d")
    held = open_log(tmp_path / "d")
    server.start()
    with pytest.raises(ServerEnded, match="exit code 75"):
        server.wait_until_ready()
    said = server.log.read_text()
    assert "error: another server uses" in said and "EngineCore" not in said
    del held
