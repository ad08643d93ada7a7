# SPDX-License-Identifier: Apache-2.0
"""A server without a response log: what it refuses, what it keeps, and that it records nothing."""

import asyncio
import contextlib
import gc
import resource
import shutil
import threading
from types import SimpleNamespace

import pytest
from server_stubs import CLIENT, Engine, build, client, no_settings, report, run, started  # noqa: F401
from servers import ALICE, Client, Reading, begin, make_server, of, samples, sampling, start_requests, until
from torpor import _core
from torpor.errors import Busy, Error, Incompatible, InvalidArgument
from torpor.vllm.scheduler_values import unstarted_request
from torpor.vllm.values import sampling_to_value
from vllm import SamplingParams

OFF = {"response_log": "off"}
NEEDS_THE_LOG = [
    ("object_store", "file:///somewhere"), ("advertise_address", "http://here:1"), ("on_disconnect", "continue"),
    ("on_wake_error", "recompute"), ("response_log_seconds", 60.0), ("response_log_sync", "always"),
    ("response_log_sync", "never"), ("response_log_bytes", 1 << 20),
]  # fmt: skip


@pytest.mark.parametrize("name, value", NEEDS_THE_LOG)
def test_what_needs_the_log_is_refused_by_its_name(monkeypatch, name, value):
    from torpor.vllm.serve import take_options
    from torpor.vllm.server.settings import Settings

    Settings(**{name: value})
    flag = f"--torpor-{name.replace('_', '-')}"
    with pytest.raises(InvalidArgument, match=f"{flag} .* needs the response log") as problem:
        Settings(**OFF, **{name: value})
    assert flag in problem.value.next_step
    for variable in ("TORPOR_SERVER_RESPONSE_LOG", f"TORPOR_SERVER_{name.upper()}"):  # so that they are put back
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    with pytest.raises(InvalidArgument, match=flag):  # before the engine's start
        take_options(["model", "--torpor-response-log", "off", flag, str(value)])


def test_what_does_not_need_the_log_goes_with_it():
    from torpor.vllm.server.settings import Settings

    Settings(
        **OFF,
        on_wake_error="discard",
        checkpoint_interval_seconds=3.0,
        wake_on_request=True,
        sleep_after_seconds=1.0,
        response_log_sync="second",
    )


def test_a_word_for_the_log_that_is_neither_is_refused(monkeypatch):
    from torpor.vllm.server.settings import Settings

    monkeypatch.setenv("TORPOR_SERVER_RESPONSE_LOG", "maybe")
    with pytest.raises(InvalidArgument, match=r"TORPOR_SERVER_RESPONSE_LOG is 'maybe'.*'on' or 'off'"):
        Settings.from_environment()


def test_its_routes_say_that_there_is_no_log_and_nothing_listens_to_the_engine(monkeypatch, tmp_path):
    async def scene():
        engine = Engine(tmp_path)
        stock = dict(vars(engine.output_processor))
        app, server = build(monkeypatch, [], "--api-key", CLIENT, engine=engine, **OFF)
        await started(server)
        assert server.state == "awake" and server.recorder is None
        assert dict(vars(engine.output_processor)) == stock
        async with client(app) as http:
            path = "/torpor/requests/r"
            for answer in [await http.get(path), await http.get(f"{path}/stream"), await http.delete(path)]:
                assert answer.status_code == 409, answer.text
                assert answer.json()["error"]["what"] == "this server has no response log"
                assert "--torpor-response-log on" in answer.json()["error"]["next_step"]
            state = (await http.get("/torpor/state")).json()
            assert state["response_log"] == "off" and "answers" not in state
        await server.checkpoint()
        await server.sleep()
        await server.wake_up()
        assert server.state == "awake"

    run(scene())
    assert sorted(path.name for path in (tmp_path / "answers").iterdir()) == ["LOCK", "OWNER"]


def test_periodic_checkpoints_see_what_has_changed_without_the_log(monkeypatch):
    _, server = build(monkeypatch, [], **OFF)
    states, seen = server.engine.output_processor.request_states, [server.progress()]
    tokens = [1]
    states["a"] = SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda: len(tokens)))
    seen.append(server.progress())
    tokens.append(2)
    seen.append(server.progress())
    del states["a"]
    server.begun += 1  # and has ended since
    seen.append(server.progress())
    assert all(one != other for n, one in enumerate(seen) for other in seen[n + 1 :])
    assert server.progress() == seen[-1]


def log_in(directory, **options) -> _core.DeliveryLog:
    return _core.DeliveryLog({"directory": str(directory / "answers"), "engine": {"model": "tiny"}} | options)


def answer(request_id: str) -> dict:
    request = unstarted_request(request_id, [1, 2], sampling_to_value(SamplingParams(max_tokens=4)), 0.0)
    return {"request": request, "response": request_id, "tenant": "", "choice": 0, "front": {"state": {}}}


def server_on(monkeypatch, directory, **settings):
    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(directory), **settings)
        await started(server)
        return server

    return run(scene())


def test_two_servers_do_not_use_one_directory_whichever_has_a_log(monkeypatch, tmp_path):
    first = server_on(monkeypatch, tmp_path, **OFF)
    assert first.state == "awake"
    for settings in (OFF, {}):
        second = server_on(monkeypatch, tmp_path, **settings)
        assert second.state == "failed" and "another server uses" in str(second.problem) and second.restart_may_help()
    first._directory.close()
    logged = server_on(monkeypatch, tmp_path)
    assert logged.state == "awake"
    assert "another server uses" in str(server_on(monkeypatch, tmp_path, **OFF).problem)
    del logged


@pytest.mark.parametrize("ended", [True, False])
def test_answers_that_run_in_an_earlier_log_are_not_lost(monkeypatch, tmp_path, ended):
    log = log_in(tmp_path)
    log.start(answer("a"))
    if ended:
        log.step([{"id": "a", "at": 0, "tokens": [1], "text": "x", "state": "finished", "finish_reason": "stop"}])
    log.sync()
    del log
    server = server_on(monkeypatch, tmp_path, **OFF)
    if ended:
        assert server.state == "awake"
    else:
        assert server.state == "failed" and not server.restart_may_help()
        sent = str(server.problem)
        assert "1 answers that still run" in sent and "--torpor-response-log is off" in sent
    del server
    gc.collect()
    assert log_in(tmp_path).counts()["ended" if ended else "running"] == 1, "the log is not as it was"


OTHER = Incompatible("max_num_seqs: checkpoint has 64, this engine has 32")


@pytest.mark.parametrize(
    "requests, settings, state",
    [((), {}, "awake"), (("a",), {}, "failed"), (("a",), {"on_wake_error": "discard"}, "awake")],
)
def test_a_checkpoint_that_does_not_fit_is_left_only_where_it_has_no_request(
    monkeypatch, tmp_path, requests, settings, state
):
    from torpor.vllm.server import unlogged

    async def scene():
        def read_checkpoint(path, key_file):
            return SimpleNamespace(to_dict=lambda: {"scheduler": {"requests": [{"id": each} for each in requests]}})

        monkeypatch.setattr(unlogged, "_core", SimpleNamespace(read_checkpoint=read_checkpoint))
        _, server = build(monkeypatch, [], engine=Engine(tmp_path, wakes_with=OTHER), **OFF, **settings)
        await started(server)
        assert server.state == state
        assert (server.left_checkpoint is not None) == (requests == ())

    run(scene())


@pytest.mark.parametrize("paused", [False, True])
def test_a_start_says_that_its_engine_is_paused(monkeypatch, tmp_path, paused):
    from torpor.vllm.server import start, unlogged

    class Wakes(Engine):
        async def wake_up(self, tags=None, **options):
            written = {"checkpoint": "/nowhere/g-000001", "checkpoint_bytes": 1}
            return report(
                paused=paused, replayed={"extended": [], "added": [], "dropped": []}, failed_requests=[], **written
            )

    warned = []
    monkeypatch.setattr(unlogged, "has_checkpoint", lambda server: True)
    monkeypatch.setattr(start.logger, "warning", lambda words, *values: warned.append(words % values))

    async def scene():
        _, server = build(monkeypatch, [], engine=Wakes(tmp_path), **OFF)
        await started(server)
        assert server.state == "awake"

    run(scene())
    assert any("POST /resume" in line for line in warned) == paused


@pytest.mark.parametrize(
    "log, recorded, words",
    [
        ("off", False, "the server ends; send it again"),
        ("on", False, "the server ends; send it again"),  # a request that makes no text
        ("on", True, "the server ends; take up this answer at /torpor/requests/chatcmpl-a%2Fb of the next one"),
    ],
)
def test_clients_get_what_they_can_do_when_the_server_ends(monkeypatch, log, recorded, words):
    from torpor.vllm.server import ending

    async def scene():
        _, server = build(monkeypatch, [], response_log=log)
        await started(server)
        sent = []
        queue = SimpleNamespace(put=sent.append)
        server.engine.output_processor.request_states["a"] = SimpleNamespace(queue=queue)
        if recorded:
            server.log.answers.start(answer("a") | {"response": "chatcmpl-a/b"})
        await ending._goodbye(server)
        assert [str(each) for each in sent] == [words]

    run(scene())


@pytest.mark.parametrize("room_comes", [False, True])
def test_a_drain_promises_only_answers_that_the_log_has(monkeypatch, tmp_path, room_comes):
    """The disk takes no byte from some moment on: no answer that ran then is there for the next server."""
    from torpor.vllm.server import ending

    def ask(server, name: str) -> list:
        said: list = []
        server.engine.output_processor.request_states[name] = SimpleNamespace(queue=SimpleNamespace(put=said.append))
        with contextlib.suppress(Error):  # the log cannot be written
            server.log.answers.start(answer(name))
        return said

    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)
        before = ask(server, "before")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            after = ask(server, "after")
            if room_comes:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            await ending._end(server)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return before, after

    ended_with: list = []
    monkeypatch.setattr(ending.logger, "info", lambda words, *values: ended_with.append(words % values))
    [before], [after] = run(scene())
    there = log_in(shutil.copytree(tmp_path, tmp_path / "copy"))  # the server may still hold the lock of its own
    assert there.get("before") is not None and (there.get("after") is not None) == room_comes
    assert "of the next one" in str(before)
    assert ("of the next one" if room_comes else "send it again") in str(after)
    assert f"ended with {2 if room_comes else 1} requests to go on" in ended_with[-1]


@pytest.mark.parametrize("rotates", ["already", "for ever"])
def test_the_last_try_to_write_the_log_waits_for_one_under_way_and_not_for_ever(monkeypatch, rotates):
    from torpor.vllm.server import ending

    missing, calls, go_on = ["a", "of nobody"], [], threading.Event()

    def rotate():
        calls.append("rotate")
        if rotates == "for ever":
            go_on.wait(30)
        elif len(calls) < 3:
            raise Busy("the response log is being written anew", "wait")
        missing.clear()

    monkeypatch.setattr(ending, "_WRITING_SECONDS", 30 if rotates == "already" else 0.1)
    answers = SimpleNamespace(rotate=rotate, unwritten=lambda: list(missing))
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states={"a": None, "b": None}))
    server = SimpleNamespace(recorder=SimpleNamespace(answers=answers), engine=engine, handed_over=False)

    async def scene():
        lost = await ending._unwritten(server)
        go_on.set()
        return lost

    assert run(scene()) == (set() if rotates == "already" else {"a"})
    assert len(calls) == (3 if rotates == "already" else 1)


# --- with a real server -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
def test_requests_go_on_over_sleeps_and_a_restart_and_nothing_is_recorded(tiny_model, tmp_path):
    directory = tmp_path / "torpor"
    server = make_server(tiny_model, directory, "--torpor-response-log", "off", "--max-num-seqs", "16")

    async def scene():
        client = Client(server.url, ALICE)
        try:
            expected = Reading("expected")
            await client.chat(expected, "Tell me about stars.", **sampling(1, 120))
            for to in ("host", "disk"):
                reading = Reading(f"over {to}")
                task = asyncio.create_task(client.chat(reading, "Tell me about stars.", **sampling(1, 120)))
                await until(lambda reading=reading: reading.text)
                assert (await client.post("/sleep", level=1, to=to))["requests"] == 1
                await client.post("/wake_up")
                await task
                assert reading.text == expected.text and reading.interruptions == 0
                assert (await client.http.get(f"/torpor/requests/over {to}")).status_code == 409
            reading, task = begin(client, "drained", max_tokens=1500, extra_body={"ignore_eos": True})
            await until(lambda: reading.text)
            assert await asyncio.to_thread(server.terminate) == 0
            task.cancel()
            server.start()
            await asyncio.to_thread(server.wait_until_ready)
            log = server.log.read_text()
            assert "1 requests go on, without clients (--torpor-response-log off)" in log
            metrics = samples((await client.http.get("/metrics")).text)
            assert start_requests(metrics) == {"restored": 1}
            written, began = (metrics[f"torpor_{each}_timestamp_seconds", of()] for each in ("checkpoint", "start"))
            assert began - 600 < written < began  # by the process before it
            assert metrics["torpor_operations_total", of(operation="wake", tier="disk", outcome="ok")] == 1
        finally:
            await client.close()

    server.start()
    try:
        server.wait_until_ready()
        asyncio.run(asyncio.wait_for(scene(), 600))
        assert sorted(path.name for path in (directory / "answers").iterdir()) == ["LOCK", "OWNER"]
    finally:
        server.stop()
