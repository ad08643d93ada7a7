# SPDX-License-Identifier: Apache-2.0
"""POST /torpor/switch without an engine: what is refused, and what becomes of an owner whose standby does not go on."""

import asyncio
import http.server
import json
import os
import subprocess
import threading
from types import SimpleNamespace

import pytest
from inspector import BINARY
from server_stubs import Engine, build, client_goes, no_settings, report, run, started  # noqa: F401
from torpor import _core
from torpor.errors import (
    Aborted,
    Busy,
    Damaged,
    FileError,
    Incompatible,
    InvalidArgument,
    NotEnoughRoom,
    TimedOut,
    Unsupported,
    WrongState,
)

from torpor.vllm.scheduler_values import unstarted_request
from torpor.vllm.values import sampling_to_value
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import SamplingParams

REQUEST = "one"


class Other:
    """The standby as the owner asks it. A standby that commits opens the log, as a real one does, and has it until it
    is ended."""

    url = "http://127.0.0.1:8001"

    def __init__(self, directory):
        self.directory = directory
        self.answers = {"prepare": {"process": 7, "room": True, "kv": "restored"}, "cancel": {}, "commit": {}}
        self.asked: list[str] = []
        self.log = None
        self.opens = True  # the log, when it is to commit
        self.gives: list[dict] = []  # steps that it records there
        self.says = "awake"
        self.done: int | None = 0  # its progress
        self.ended = 0

    async def take_over(self, step: str, asked: dict) -> dict:
        assert asked == {"owner": os.getpid(), "fingerprint": {"model": "tiny"}}
        self.asked.append(step)
        if step == "commit" and self.opens:
            log = {"directory": f"{self.directory}/answers", "engine": {"model": "tiny"}}
            self.log = _core.DeliveryLog(log)  # Busy: the owner has not released it
            if self.gives:
                self.log.step(self.gives)
        if isinstance(answer := self.answers[step], Exception):
            raise answer
        return answer

    async def state(self) -> str:
        return self.says

    async def progress(self) -> int | None:
        return self.done

    def end(self, _seconds: float = 0) -> None:
        self.log = None
        self.ended += 1


def answer_of(name: str) -> dict:
    request = unstarted_request(name, [1, 2, 3], sampling_to_value(SamplingParams(max_tokens=9)), 0.0)
    return {"response": name, "tenant": "", "choice": 0, "request": request, "front": {"state": None}}


def step_of(at: int) -> dict:
    return {"id": REQUEST, "at": at, "tokens": [5], "text": "x"}


def play(monkeypatch, directory, scene, **settings) -> None:
    """Run scene(server, other, switch) with a server that is awake and gives an answer. `server.stops`: the calls that
    its engine and its process got."""
    from torpor.vllm.server import ending, loopback, switching

    async def whole() -> None:
        _, server = build(monkeypatch, [], engine=Engine(directory), **settings)
        await started(server)
        assert server.state == "awake", server.problem
        if server.has_log:
            server.recorder.answers.start(answer_of(REQUEST))
        other, look, stops = Other(directory), {"state": "serves", "pid": 7, "why": "", "address": Other.url}, []
        watch = SimpleNamespace(wait=lambda _: look, end_owner=other.end)
        owner = {"state": "serves", "pid": 9, "why": "", "address": "http://127.0.0.1:8009"}
        third = SimpleNamespace(wait=lambda _: owner)

        async def checkpoint(_side, _values, stay) -> dict:
            assert stay and server.state == "handing over"
            stops.append("stopped")
            return report(checkpoint="g-000001", checkpoint_bytes=1, stopped_since=0.0, requests=1)

        async def go_on(_side) -> None:
            stops.append("goes on")

        async def checked(to: str) -> str:
            return to

        monkeypatch.setattr(switching, "_core", SimpleNamespace(OwnerWatch=lambda *role: watch if role[1:] else third))
        monkeypatch.setattr(switching, "Other", lambda *_: other)
        for name in ("_LOOK_SECONDS", "_PROGRESS_SECONDS"):
            monkeypatch.setattr(switching, name, 0.001)
        front = SimpleNamespace(checkpoint=checkpoint, go_on=go_on, AsyncSide=lambda engine: engine)
        monkeypatch.setattr(switching, "frontend", front)
        monkeypatch.setattr(loopback, "checked", checked)
        monkeypatch.setattr(ending, "os", SimpleNamespace(kill=lambda *_: stops.append("ended"), getpid=os.getpid))
        server.stops, server.look = stops, look
        await scene(server, other, lambda: switching.switch(server, None, {}))

    run(whole())


def test_an_owner_hands_over_and_ends(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        other.answers["commit"] = {"served_at": 1.5, "parts": {"log_read": 0.5}}
        result = await switch()
        assert (result["to"], result["process"], result["pause_seconds"]) == (other.url, 7, 1.5)
        assert list(result["parts"]) == ["checkpoint", "log_released", "log_read"] and result["kv"] == "restored"
        assert server.state == "ending" and other.asked == ["prepare", "commit"]
        while "ended" not in server.stops:
            await asyncio.sleep(0.001)
        assert server.stops == ["stopped", "ended"] and other.log is not None

    play(monkeypatch, tmp_path, scene)


def test_without_room_for_both_the_owner_sleeps_first(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        other.answers["prepare"] = other.answers["prepare"] | {"room": False}
        result = await switch()
        assert "slept" in result["parts"] and server.engine.state == "asleep" and server.state == "ending"

    play(monkeypatch, tmp_path, scene)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"state": "none", "pid": 0, "why": "the last standby has ended"}, WrongState("the last standby has ended")),
        ({"pid": os.getpid()}, WrongState("the last standby is this server")),
        ({"address": ""}, InvalidArgument("recorded no address")),
        ({"pid": 8}, InvalidArgument("the recorded standby 8")),
    ],
)
def test_without_a_standby_nothing_changes(monkeypatch, tmp_path, change, problem):
    async def scene(server, other, switch):
        server.look |= change
        with pytest.raises(type(problem), match=problem.what):
            await switch()
        assert server.state == "awake" and server.stops == [] and "commit" not in other.asked

    play(monkeypatch, tmp_path, scene)


def test_a_standby_that_could_not_go_on_is_handed_nothing(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        other.answers["prepare"] = Incompatible("this standby has another engine: vllm_version")
        with pytest.raises(Incompatible, match="vllm_version; this server serves on"):
            await switch()
        assert server.state == "awake" and server.stops == []
        server.recorder.answers.step([step_of(0)])

    play(monkeypatch, tmp_path, scene)


def test_an_engine_that_is_paused_or_asleep_and_a_server_without_a_log_are_refused(monkeypatch, tmp_path):
    async def paused(server, other, switch):
        server.engine.paused = True
        with pytest.raises(WrongState, match="paused"):
            await switch()
        await server.sleep()
        with pytest.raises(WrongState, match="asleep"):
            await switch()
        assert other.asked == []

    async def unlogged(server, other, switch):
        with pytest.raises(Unsupported, match="response log"):
            await switch()

    play(monkeypatch, tmp_path, paused)
    play(monkeypatch, tmp_path / "unlogged", unlogged, response_log="off")


def test_an_owner_that_cannot_write_its_checkpoint_serves_on(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        from torpor.vllm.server import switching

        async def checkpoint(*_, stay) -> None:
            raise NotEnoughRoom("the disk is full")

        switching.frontend.checkpoint = checkpoint
        with pytest.raises(NotEnoughRoom, match="the disk is full; this server serves on"):
            await switch()
        assert server.state == "awake" and server.stops == ["goes on"] and other.asked == ["prepare", "cancel"]

    play(monkeypatch, tmp_path, scene)


def test_an_owner_does_not_wait_without_end_for_a_standby_that_is_to_sleep_again(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        from torpor.vllm.server import switching

        async def checkpoint(*_, stay) -> None:
            raise NotEnoughRoom("the disk is full")

        async def take_over(step: str, asked: dict) -> dict:
            if step == "cancel":
                await asyncio.Event().wait()
            return await stock(step, asked)

        monkeypatch.setattr(switching, "_STALL_SECONDS", 0.05)
        switching.frontend.checkpoint = checkpoint
        stock, other.take_over = other.take_over, take_over
        with pytest.raises(NotEnoughRoom, match="the disk is full; this server serves on"):
            await asyncio.wait_for(switch(), 120)
        assert server.state == "awake" and not server.operating()

    play(monkeypatch, tmp_path, scene)


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("opens", [True, False])
def test_an_owner_whose_standby_fails_goes_on_where_it_stopped(monkeypatch, tmp_path, opens, room):
    """`opens`: the standby owns the directory when it fails, so it is ended. Else it has refused."""

    async def scene(server, other, switch):
        other.answers["prepare"] = other.answers["prepare"] | {"room": room}
        other.opens = opens
        other.answers["commit"] = FileError("no space", state_changed=True) if opens else WrongState("it is no standby")
        with pytest.raises(type(other.answers["commit"]), match="this server serves on"):
            await switch()
        assert server.state == "awake" and server.engine.state == "awake" and other.log is None
        assert server.stops == ["stopped", "goes on"]
        server.recorder.answers.step([step_of(0)])
        assert server.recorder.answers.part(REQUEST, 0)["text"] == "x"
        with pytest.raises(Busy):  # it owns the directory
            _core.DeliveryLog({"directory": f"{tmp_path}/answers", "engine": {"model": "tiny"}})
        assert _core.OwnerWatch(str(tmp_path)).wait(0)["pid"] == os.getpid()
        other.opens, other.answers["commit"] = True, {}
        assert (await switch())["status"] == "handed over"  # it can be tried again

    play(monkeypatch, tmp_path, scene)


@pytest.mark.parametrize("state", ["awake", "falling asleep", "asleep", "waking", "handing over"])
def test_a_standby_that_has_taken_over_although_its_answer_was_lost_is_left_alone(monkeypatch, tmp_path, state):
    async def scene(server, other, switch):
        other.answers["commit"], other.says = Aborted("it broke off"), state
        result = await switch()
        assert result["status"] == "handed over" and server.state == "ending" and other.log is not None

    play(monkeypatch, tmp_path, scene)


def test_a_standby_that_restores_for_long_is_waited_for_as_long_as_it_gets_on(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        from torpor.vllm.server import switching

        monkeypatch.setattr(switching, "_STALL_SECONDS", 0.0)  # each look without progress is one too many
        asks, may = held_at_commit(other)
        asked = 0

        async def progress() -> int:
            nonlocal asked
            asked += 1
            if asked == 30 + 3:  # some were for the first step
                may.set()
            return asked

        other.progress = progress
        assert (await switch())["status"] == "handed over" and asked >= 30 and asks.is_set() and other.ended == 0

    play(monkeypatch, tmp_path, scene)


@pytest.mark.parametrize("says", [5, None])
def test_a_standby_that_hangs_is_ended_and_the_owner_goes_on(monkeypatch, tmp_path, says):
    """`says`: its progress, which does not grow; None: it does not answer."""

    async def scene(server, other, switch):
        from torpor.vllm.server import switching

        monkeypatch.setattr(switching, "_STALL_SECONDS", 0.05)
        other.done, other.says = says, "taking over"
        stock = other.take_over

        async def take_over(step: str, asked: dict) -> dict:
            answer = await stock(step, asked)
            if step == "commit":
                await asyncio.Event().wait()
            return answer

        other.take_over = take_over
        with pytest.raises(Aborted, match=r"no progress with the step commit.*; this server serves on"):
            await switch()
        assert server.state == "awake" and server.stops == ["stopped", "goes on"] and other.ended == 1

    play(monkeypatch, tmp_path, scene)


def test_a_standby_whose_answer_was_lost_is_waited_for_as_long_as_it_gets_on(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        from torpor.vllm.server import switching

        monkeypatch.setattr(switching, "_STALL_SECONDS", 0.0)
        other.answers["commit"], other.says = Aborted("it broke off"), "taking over"
        asked = 0

        async def progress() -> int:
            nonlocal asked
            asked += 1
            if asked == 30:
                other.says = "awake"
            return asked

        other.progress = progress
        assert (await switch())["status"] == "handed over" and other.ended == 0

    play(monkeypatch, tmp_path, scene)


@pytest.mark.parametrize("refused", [True, False])
def test_where_a_third_server_owns_the_directory_the_owner_fails_and_names_it(monkeypatch, tmp_path, refused):
    """`refused`: the standby found the directory owned, and waits on. Else it failed, and was ended."""

    async def scene(server, other, switch):
        from torpor.vllm.server import switching

        monkeypatch.setattr(switching, "_LOCK_SECONDS", 0.05)
        stock, third = other.take_over, []

        async def take_over(step: str, asked: dict) -> dict:
            if step == "commit":
                third.append(_core.DeliveryLog({"directory": f"{tmp_path}/answers", "engine": {"model": "tiny"}}))
            return await stock(step, asked)

        other.take_over, other.opens = take_over, False
        what = "another server uses it"
        other.answers["commit"] = Busy(what) if refused else FileError(what, state_changed=True)
        other.says = "standby" if refused else "failed"
        with pytest.raises(type(other.answers["commit"]), match=r"process 9 at .*8009 owns .*this server is failed"):
            await switch()
        assert server.state == "failed" and "process 9" in server.problem.what and server.restart_may_help()
        assert other.ended == (0 if refused else 1) and "goes on" not in server.stops
        assert third[0].find(REQUEST, "")  # it has the request
        with pytest.raises(WrongState, match="has handed over"):
            await server.abort([REQUEST])
        await client_goes(server.engine, REQUEST)
        assert not [call for call in server.engine.calls if call[0] == "abort"]

    play(monkeypatch, tmp_path, scene)


def test_an_owner_whose_hibernated_requests_do_not_come_back_serves_on(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        from torpor.vllm.server import sessions, switching

        monkeypatch.setattr(switching, "_BACK_SECONDS", 0.05)
        monkeypatch.setattr(sessions, "_LOOK_SECONDS", 0.001)
        image = {"id": "image-1", "requests": {REQUEST: 1}, "resuming": True, "preempted": False}
        stock = server.engine.torpor.call

        async def call(method: str, options: dict | None = None):
            return [dict(image)] if method == "images" else await stock(method, options)

        server.engine.torpor.call = call
        with pytest.raises(
            TimedOut, match=r"hibernated requests are not back after .*: image-1; this server serves on"
        ):
            await switch()
        assert server.state == "awake" and server.stops == ["goes on"] and other.asked == ["prepare", "cancel"]
        image["preempted"] = True  # no checkpoint needs it
        assert (await switch())["status"] == "handed over"

    play(monkeypatch, tmp_path, scene)


def test_an_owner_does_not_wait_without_end_for_a_call_of_sessions(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        from torpor.vllm.server import switching

        monkeypatch.setattr(switching, "_BACK_SECONDS", 0.05)
        async with server.sessions._turn:
            with pytest.raises(TimedOut, match=r"a call of /v1/sessions is in progress.*; this server serves on"):
                await switch()
        assert server.state == "awake" and (await switch())["status"] == "handed over"

    play(monkeypatch, tmp_path, scene)


def test_an_owner_whose_engine_does_not_wake_after_a_switch_that_failed_has_failed(monkeypatch, tmp_path):
    """It does not hold its requests for ever: a restart or another standby goes on from the checkpoint and the log."""

    async def scene(server, other, switch):
        other.answers["prepare"] = other.answers["prepare"] | {"room": False}
        other.answers["commit"] = WrongState("it is no standby")
        other.opens = False
        stock, waiting = other.take_over, []

        async def take_over(step: str, asked: dict) -> dict:
            if step == "commit":
                server.engine.fails_with = Damaged("its memory is gone")
                waiting.append(asyncio.ensure_future(server.let_in()))
            return await stock(step, asked)

        other.take_over = take_over
        with pytest.raises(WrongState, match="it is no standby; this server is failed"):
            await switch()
        assert server.state == "failed" and "its memory is gone" in server.problem.what and server.restart_may_help()
        assert "goes on" not in server.stops and await waiting[0] == "the server is failed"

    play(monkeypatch, tmp_path, scene)


def test_an_owner_does_not_go_on_where_its_standby_has_given_more(monkeypatch, tmp_path):
    """It fails, and a restart goes on from the log."""

    async def scene(server, other, switch):
        other.gives = [step_of(0)]
        other.answers["commit"] = FileError("it broke", state_changed=True)
        with pytest.raises(WrongState, match="another server went on"):
            await switch()
        assert server.state == "failed" and server.restart_may_help() and "goes on" not in server.stops

    play(monkeypatch, tmp_path, scene)


def held_at_commit(other) -> tuple[asyncio.Event, asyncio.Event]:
    """Let the standby's "commit" wait. Return what is set when it is asked, and what lets it go on."""
    asks, may = asyncio.Event(), asyncio.Event()
    stock = other.take_over

    async def take_over(step: str, asked: dict) -> dict:
        if step == "commit":
            asks.set()
            await may.wait()
        return await stock(step, asked)

    other.take_over = take_over
    return asks, may


def test_an_owner_that_gets_sigterm_while_it_hands_over_writes_nothing_more(monkeypatch, tmp_path):
    """Its checkpoint would be newer than what the other server has."""
    from torpor.vllm.server import ending

    async def scene(server, other, switch):
        asks, may = held_at_commit(other)
        handing_over = asyncio.ensure_future(switch())
        await asks.wait()
        ended = asyncio.ensure_future(ending.end(server))
        await asyncio.sleep(0)
        may.set()
        assert (await handing_over)["status"] == "handed over"
        await ended
        assert not [call for call in server.engine.calls if call[0] == "sleep"]

    play(monkeypatch, tmp_path, scene)


def test_requests_and_aborts_wait_while_it_hands_over(monkeypatch, tmp_path):
    async def scene(server, other, switch):
        asks, may = held_at_commit(other)
        other.opens, other.answers["commit"] = False, WrongState("it is no standby")
        handing_over = asyncio.ensure_future(switch())
        await asks.wait()
        entering, aborting = asyncio.ensure_future(server.let_in()), asyncio.ensure_future(server.abort([REQUEST]))
        await asyncio.wait({entering, aborting}, timeout=0.05)
        assert not entering.done() and not aborting.done()
        with pytest.raises(Busy, match="handing over"):
            await server.sleep()
        may.set()
        with pytest.raises(WrongState):
            await handing_over
        assert await entering is None
        await aborting
        assert ("abort", [REQUEST]) in [call[:2] for call in server.engine.calls]

    play(monkeypatch, tmp_path, scene)


def test_an_abort_that_comes_once_it_has_handed_over_is_refused(monkeypatch, tmp_path):
    """The request goes on at the other server."""

    async def scene(server, other, switch):
        await switch()
        with pytest.raises(WrongState, match="has handed over"):
            await server.abort([REQUEST])
        with pytest.raises(GracefulHTTPError, match="has handed over"):  # vLLM's own routes
            await server.engine.abort(REQUEST)
        assert not [call for call in server.engine.calls if call[0] == "abort"]

    play(monkeypatch, tmp_path, scene)


def test_kv_of_another_engine_is_used_only_where_readers_have_exactly_its_tokens():
    """A request that comes with its KV goes on from the checkpoint's tokens: readers would get others twice, or miss
    some."""
    from torpor.vllm.server import start

    log = _core.DeliveryLog({"directory": None, "engine": {"model": "tiny"}})
    for name in ("one", "two"):
        log.start(answer_of(name))
    log.step([{"id": "one", "at": 0, "tokens": [5, 6], "text": "x"}])
    one, two = {"id": "one", "token_ids": [5, 6]}, {"id": "two", "token_ids": []}
    assert start._differing(log, [one, two]) == []
    assert start._differing(log, [one | {"token_ids": [5]}, two]) == ["one"]
    assert start._differing(log, [one | {"token_ids": [5, 6, 7]}, two]) == ["one"]
    assert start._differing(log, [one]) == ["two"]
    log.step([{"id": "two", "at": 0, "tokens": [], "text": "", "state": "finished", "finish_reason": "stop"}])
    assert start._differing(log, [one]) == [] and not start._is_running(log, "two")


def test_a_request_that_has_ended_since_the_checkpoint_is_not_counted_among_those_that_go_on(monkeypatch):
    from torpor.vllm.server import start

    log = _core.DeliveryLog({"directory": None, "engine": {"model": "tiny"}})
    for name in ("one", "two"):
        log.start(answer_of(name))
    log.step([{"id": "two", "at": 0, "tokens": [], "text": "", "state": "finished", "finish_reason": "stop"}])
    item = {"prompt_token_ids": [1], "token_ids": [], "sampling": {}, "arrival_time": 0.0, "status": "running"}
    made = {
        "checkpoint": "/tmp/torpor/g-000001", "requests": 2, "failed_requests": [], "seconds": 0.0, "restored_bytes": 0,
        "outputs": {"requests": [{"id": name} | item for name in ("one", "two")]},
    }  # fmt: skip
    calls, counted, taken = [], [], []

    async def call(method: str, options: dict) -> dict:
        calls.append((method, options))
        return dict(made) if method == "wake_portable" else {}

    async def remember_woken(report) -> None:
        counted.append(report.requests)

    metrics = SimpleNamespace(record=lambda *_: None, started=lambda *given: counted.append(given))
    server = SimpleNamespace(
        options=SimpleNamespace(sessions=True, checkpoint_dir="/tmp/torpor", key_file=None),
        recorder=SimpleNamespace(answers=log, take_up=lambda restored, outputs: taken.extend(restored) or []),
        engine=SimpleNamespace(torpor=SimpleNamespace(call=call), _run_output_handler=lambda: None),
        metrics=metrics, remember_woken=remember_woken,
    )  # fmt: skip
    known = [{"path": "/tmp/torpor/g-000001", "bytes": 7}]
    monkeypatch.setattr(start, "_core", SimpleNamespace(list_checkpoints=lambda *_: known))
    report = asyncio.run(start._wake_portable(server, "/tmp/torpor"))
    replayed = {"extended": [], "added": [], "dropped": ["two"]}
    assert counted == [(1, replayed, {}), 1] and report.requests == 1 and report.checkpoint_bytes == 7
    assert taken == [{"id": "one"} | item]
    assert calls[-1][0] == "end_portable" and calls[-1][1]["keep"] and calls[-1][1]["lost"] == ["two"]


class OwnersRoute(http.server.BaseHTTPRequestHandler):
    """Answers POST /torpor/switch as a server does."""

    def do_POST(self):
        keyed = self.headers["Authorization"] == "Bearer the-key"
        if self.path == "/odd/torpor/switch":
            status, content = 200, {"seconds": 0.5, "parts": {"checkpoint": "soon"}}
        elif self.path == "/torpor/switch" and keyed:
            parts = {"checkpoint": 0.05, "log_read": 0.125}
            status, content = 200, {
                "status": "handed over", "to": "http://127.0.0.1:8001", "process": 7, "requests": 6, "kv": "restored",
                "seconds": 0.5, "pause_seconds": 0.25, "parts": parts,
            }  # fmt: skip
        elif keyed:
            error = WrongState("there is no standby: the last one has ended", "start one").to_dict()
            status, content = 409, {"error": error}
        else:
            status, content = 401, {"error": "Unauthorized"}
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


def test_the_command_asks_the_server_of_a_url_or_a_directory(tmp_path):
    def command(*words, key: str = "the-key") -> subprocess.CompletedProcess:
        environment = os.environ | {"TORPOR_ADMIN_KEY": key}
        return subprocess.run([BINARY, "switch", *words], env=environment, capture_output=True, text=True, timeout=600)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OwnersRoute) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            nobody = command(tmp_path)
            assert nobody.returncode == 3 and "no server has named itself as the owner" in nobody.stderr
            record = _core.OwnerRecord(str(tmp_path), 60, url)
            done = command(tmp_path)
            assert done.returncode == 0, done.stderr
            assert "handed 6 requests over to http://127.0.0.1:8001 (process 7)" in done.stdout
            assert "no token for 0.250 s" in done.stdout and "log_read    0.125" in done.stdout
            content = json.loads(command(url, "--json").stdout)
            assert content["url"] == url and content["parts"]["log_read"] == 0.125 and content["kv"] == "restored"
            refused = command(url, "--to", "http://127.0.0.1:9")
            assert refused.returncode == 5 and "there is no standby" in refused.stderr
            assert command(url, key="another").returncode == 7
            odd = command(f"{url}/odd")  # it answers as no server of torpor does
            assert odd.returncode > 0 and "answers 200" in odd.stderr
            del record
        finally:
            server.shutdown()
