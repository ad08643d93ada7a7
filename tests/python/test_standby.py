# SPDX-License-Identifier: Apache-2.0
"""A standby when something else comes between: another server, its own end, a slow disk, an error. Without an engine
and without an owner."""

import asyncio
import errno
import logging
import os
import socket
import threading
from types import SimpleNamespace

import pytest
from server_stubs import Engine, build, metrics_by, no_settings, run  # noqa: F401
from torpor import _core
from torpor.errors import (
    Aborted,
    Busy,
    DeviceError,
    FileError,
    Incompatible,
    InvalidArgument,
    NotEnoughRoom,
    NotFound,
    Unsupported,
    WrongState,
)

ENDED = {"state": "ended", "pid": 7, "why": "its server has ended (process 7)"}
NONE = {"state": "none", "pid": 0, "why": "the last owner has ended"}
SERVES = {"state": "serves", "pid": 8, "why": ""}
SILENT = {"state": "silent", "pid": 7, "why": "its server (process 7) gave no heartbeat for 6 s"}


class Watch:
    """Sees these, one with each look, and the last one for ever."""

    def __init__(self, *looks: dict):
        self.looks, self.looked_times, self.ended_owners = list(looks), 0, 0
        self.looked = lambda: None
        self.ends_with: Exception | None = None

    def wait(self, _seconds: float) -> dict:
        self.looked()
        self.looked_times += 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def end_owner(self, _seconds: float) -> None:
        self.ended_owners += 1
        if self.ends_with is not None:
            raise self.ends_with


class Ahead:
    def __init__(self):
        self.calls, self.may_end, self.stopped = 0, threading.Event(), threading.Event()
        self.may_end.set()

    def follow(self) -> dict:
        self.calls += 1
        self.may_end.wait(600)
        if self.stopped.is_set():
            raise Aborted("reading a checkpoint ahead was stopped")
        raise NotFound("there is no checkpoint")

    def stop(self) -> None:
        self.stopped.set()
        self.may_end.set()


def standby_of(monkeypatch, directory, watch: Watch, **settings):
    """A server in the state "standby", whose own() says with what it fails, call by call."""
    from torpor.vllm.server import standby

    monkeypatch.setattr(standby, "_LOOK_SECONDS", 0.01)
    stand_ins = SimpleNamespace(
        OwnerWatch=lambda *_: watch, ReadAhead=lambda *_: Ahead(),
        check_same_engine=_core.check_same_engine, check_portable=_core.check_portable,
    )  # fmt: skip
    monkeypatch.setattr(standby, "_core", stand_ins)
    _, server = build(monkeypatch, [], engine=Engine(directory), standby_of=str(directory), **settings)
    server.standby = standby.Standby(server, {})
    server.enter("standby")
    server.owns_with = []

    async def own(_fingerprint, _parts, _wake) -> None:
        if server.owns_with and (problem := server.owns_with.pop(0)) is not None:
            raise problem
        server.enter("awake")

    server.own = own
    return server


def failovers(server) -> dict[str, float]:
    return metrics_by(server, "torpor_failovers_total", "outcome")


def test_where_another_one_was_faster_and_lets_go_it_tries_again(monkeypatch, tmp_path):
    async def scene():
        watch = Watch(ENDED, NONE)
        server = standby_of(monkeypatch, tmp_path, watch)
        server.owns_with = [Busy("another server uses the directory"), Busy("another server uses the directory")]
        await server.standby.follow()
        assert server.state == "awake" and watch.ended_owners == 3
        assert server.standby.failover["process"] == 7 and server.standby.failover["why"] == ENDED["why"]
        assert failovers(server) == {"ok": 1, "lost": 1, "failed": 0}

    run(scene())


def test_a_checkpoint_that_is_still_being_written_is_waited_for(monkeypatch, tmp_path):
    async def scene():
        watch = Watch(ENDED, NONE)
        watch.ends_with = Busy("another process writes there")
        server = standby_of(monkeypatch, tmp_path, watch)

        def looked() -> None:
            if watch.ended_owners == 2:
                watch.ends_with = None

        watch.looked = looked
        await server.standby.follow()
        assert server.state == "awake" and watch.ended_owners == 3

    run(scene())


ASKED = {"owner": SERVES["pid"], "fingerprint": {}}


async def following(server) -> asyncio.Task:
    """Return the task that follows the owner, once it has seen that owner."""
    task = asyncio.create_task(server.standby.follow())
    while server.standby.owner["state"] != "serves":
        await asyncio.sleep(0.001)
    return task


def test_an_owner_that_lives_hands_over(monkeypatch, tmp_path):
    async def scene():
        watch = Watch(SERVES)
        server = standby_of(monkeypatch, tmp_path, watch)
        task, standby = await following(server), server.standby
        await server.engine.sleep(1, "abort")
        assert await standby.take_over_from("prepare", ASKED) == {
            "process": os.getpid(), "room": True, "kv": "restored",
        }  # fmt: skip
        assert server.engine.state == "awake" and server.state == "standby"
        await standby.take_over_from("cancel", ASKED)
        assert server.engine.state == "asleep"
        await standby.take_over_from("prepare", ASKED)
        server.owns_with = [Busy("another server uses the directory")]
        with pytest.raises(Busy):  # the owner did not release it
            await standby.take_over_from("commit", ASKED)
        assert server.state == "standby" and not task.done()
        done = await standby.take_over_from("commit", ASKED)
        await task
        assert server.state == "awake" and done["served_at"] > 0 and watch.ended_owners == 0
        assert standby.failover["process"] == SERVES["pid"] and standby.failover["why"] == "it handed over"
        assert failovers(server) == {"ok": 1, "lost": 0, "failed": 0}
        with pytest.raises(WrongState, match="awake, and no standby"):
            await standby.take_over_from("prepare", ASKED)

    run(scene())


def test_without_room_for_both_its_memory_stays_asleep(monkeypatch, tmp_path):
    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(SERVES))
        task = await following(server)
        await server.engine.sleep(1, "abort")
        server.engine.fails_with = NotEnoughRoom("the owner has it")
        assert (await server.standby.take_over_from("prepare", ASKED))["room"] is False
        assert server.engine.state == "asleep" and server.state == "standby"
        server.enter("ending")
        await task

    run(scene())


def test_memory_that_was_woken_for_an_owner_that_does_not_come_sleeps_again(monkeypatch, tmp_path):
    from torpor.vllm.server import standby

    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(SERVES))
        monkeypatch.setattr(standby, "_AHEAD_SECONDS", 0.0)
        task = await following(server)
        await server.engine.sleep(1, "abort")
        await server.standby.take_over_from("prepare", ASKED)
        while server.engine.state != "asleep":
            await asyncio.sleep(0.001)
        server.enter("ending")
        await task

    run(scene())


@pytest.mark.parametrize(
    ("asked", "settings", "problem"),
    [
        (ASKED | {"owner": 9}, {}, WrongState("follows process 8, and process 9 wants to hand over")),
        (ASKED | {"fingerprint": {"model": "other"}}, {}, Incompatible("another engine: model")),
        (ASKED | {"fingerprint": {"model": "other"}}, {"on_wake_error": "discard"}, Incompatible("another engine")),
        ({"owner": 8}, {}, InvalidArgument("names no fingerprint")),
    ],
)
def test_an_owner_whose_requests_would_not_go_on_is_refused(monkeypatch, tmp_path, asked, settings, problem):
    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(SERVES), **settings)
        task = await following(server)
        with pytest.raises(type(problem), match=problem.what):
            await server.standby.take_over_from("prepare", asked)
        assert server.state == "standby" and server.engine.calls == []
        server.enter("ending")
        await task

    run(scene())


def test_an_owner_with_another_engine_hands_over_where_kv_may_be_computed_anew(monkeypatch, tmp_path):
    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(SERVES), on_wake_error="recompute")
        task = await following(server)
        ready = await server.standby.take_over_from("prepare", ASKED | {"fingerprint": {"model": "other"}})
        assert ready["kv"] == "recomputed"
        server.enter("ending")
        await task

    run(scene())


def test_a_hand_over_that_breaks_with_the_directory_in_its_hands_has_failed(monkeypatch, tmp_path):
    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(SERVES))
        task = await following(server)

        async def own(*_) -> None:
            server._directory = object()
            raise FileError("no space", native=28)

        server.own = own
        with pytest.raises(FileError, match="no space") as raised:
            await server.standby.take_over_from("commit", ASKED)
        await task
        assert raised.value.state_changed and server.state == "failed" and server.restart_may_help()
        assert failovers(server) == {"ok": 0, "lost": 0, "failed": 1}

    run(scene())


def test_a_standby_that_must_end_while_it_takes_over_leaves_the_owner_to_serve(monkeypatch, tmp_path):
    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(SERVES))
        task = await following(server)

        async def own(*_) -> None:
            server.enter("ending")
            server.enter("awake")  # as the real one does at its end

        server.own = own
        with pytest.raises(WrongState, match="ending") as raised:
            await server.standby.take_over_from("commit", ASKED)
        await task
        assert raised.value.state_changed and server.standby.failover is None

    run(scene())


def test_it_follows_the_one_that_was_faster(monkeypatch, tmp_path):
    async def scene():
        watch = Watch(ENDED, SERVES, NONE)
        server = standby_of(monkeypatch, tmp_path, watch)
        server.owns_with = [Busy("another server uses the directory")]
        following = asyncio.create_task(server.standby.follow())
        while watch.looked_times < 6:  # it has seen NONE for some times
            await asyncio.sleep(0.01)
        assert server.state == "standby" and watch.ended_owners == 1  # that one had named itself: it is looked for anew
        server.enter("ending")
        await following

    run(scene())


@pytest.mark.parametrize("problem", [Busy("the engine's scheduler is busy"), ZeroDivisionError("no error of torpor's")])
def test_a_take_over_that_breaks_with_the_directory_in_its_hands_has_failed(monkeypatch, tmp_path, problem):
    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(ENDED))

        async def own(*_) -> None:
            server._directory = object()
            raise problem

        server.own = own
        await server.standby.follow()
        assert server.state == "failed" and str(problem) in str(server.problem) and server.restart_may_help()
        assert failovers(server) == {"ok": 0, "lost": 0, "failed": 1}

    run(scene())


@pytest.mark.parametrize("packed", ["keep", "release"])
def test_it_keeps_packed_weights_over_its_sleeps_where_the_operator_wants_it(monkeypatch, tmp_path, packed):
    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(NONE), standby_packed_weights=packed)

        async def generate(*_):
            yield None

        server.engine.generate = generate
        server.engine.reset_prefix_cache = lambda: asyncio.sleep(0)
        sleeps = ["keep_derived", "sleep"] if packed == "keep" else ["sleep"]
        await server.standby.begin()
        assert [call[0] for call in server.engine.calls] == sleeps
        server.engine.calls.clear()
        assert await server.standby._wake_ahead()  # for an owner that does not hand over after all
        await server.standby._cancel()
        assert [call[0] for call in server.engine.calls] == ["wake_up", *sleeps]

    run(scene())


@pytest.mark.parametrize("elsewhere", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}])
def test_workers_that_it_could_not_end_are_refused(monkeypatch, tmp_path, elsewhere):
    from torpor.vllm.server import standby

    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(NONE))
        vars(server.engine.vllm_config.parallel_config).update(elsewhere)
        with pytest.raises(Unsupported, match="other machines"):
            standby.Standby(server, {})

    run(scene())


def test_one_that_ends_takes_nothing_over(monkeypatch, tmp_path):
    async def scene():
        loop = asyncio.get_running_loop()
        watch = Watch(ENDED)
        server = standby_of(monkeypatch, tmp_path, watch)
        watch.looked = lambda: asyncio.run_coroutine_threadsafe(enter_ending(), loop).result()

        async def enter_ending() -> None:
            server.enter("ending")

        await server.standby.follow()
        assert server.state == "ending" and watch.ended_owners == 0

    run(scene())


def test_one_that_ends_while_it_ends_the_owner_does_not_own(monkeypatch, tmp_path):
    async def scene():
        loop = asyncio.get_running_loop()
        server = standby_of(monkeypatch, tmp_path, watch := Watch(ENDED))

        async def enter_ending() -> None:
            server.enter("ending")

        watch.end_owner = lambda _: asyncio.run_coroutine_threadsafe(enter_ending(), loop).result()

        async def own(*_) -> None:
            raise AssertionError("it must not")

        server.own = own
        await server.standby.follow()
        assert server.state == "ending" and server.standby.failover is None
        assert failovers(server) == {"ok": 0, "lost": 0, "failed": 0}

    run(scene())


def test_without_a_log_one_that_ends_during_a_take_over_writes_no_checkpoint(monkeypatch, tmp_path):
    """It would be the newest one, and without a request."""
    from torpor.vllm.server import ending

    async def scene():
        monkeypatch.setattr(ending, "os", SimpleNamespace(kill=lambda *_: None, getpid=lambda: 0))
        server = standby_of(monkeypatch, tmp_path, Watch(ENDED), response_log="off")
        server.enter("taking over")
        await ending.end(server)
        assert not any(call[0] in ("sleep", "checkpoint", "wake_up") for call in server.engine.calls)

    run(scene())


def test_the_end_of_the_owner_is_noticed_while_a_checkpoint_is_read_ahead(monkeypatch, tmp_path):
    async def scene():
        watch = Watch(SERVES)
        server = standby_of(monkeypatch, tmp_path, watch)
        stops, own = [], server.own

        def looked() -> None:
            if watch.looked_times == 0:
                server.standby._ahead.may_end.clear()
            if server.standby._ahead.calls:
                watch.looks[0] = ENDED

        async def owns(*arguments) -> None:
            stops.append(server.standby._ahead.stopped.is_set())  # before the take-over reads
            await own(*arguments)

        watch.looked, server.own = looked, owns
        try:
            await server.standby.follow()
            assert server.state == "awake" and server.standby._ahead.calls == 1 and stops == [True]
            await server.standby._reading
        finally:
            server.standby._ahead.may_end.set()

    run(scene())


def refuse() -> None:
    raise FileError("answers/STANDBY: read-only file system", native=errno.EROFS)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_silent_owner_is_left_alone_where_no_heartbeat_can_be_written(monkeypatch, tmp_path, recorded):
    from torpor.vllm.server import owning, standby

    async def scene():
        watch, said = Watch(SILENT), []
        server = standby_of(monkeypatch, tmp_path, watch)
        monkeypatch.setattr(standby.logger, "log", lambda level, words, *values: said.append((level, words % values)))
        server.record = SimpleNamespace(beat=refuse) if recorded else None
        monkeypatch.setattr(owning, "_core", SimpleNamespace(OwnerRecord=lambda *_: refuse()))
        task = asyncio.create_task(server.standby.follow())
        while watch.looked_times < 3 and not task.done():
            await asyncio.sleep(0.001)
        assert server.state == "standby" and watch.ended_owners == 0
        [(level, line)] = said
        assert level == logging.ERROR and SILENT["why"] in line and "read-only file system" in line
        server.record = SimpleNamespace(beat=lambda: None)
        looked = watch.looked_times
        while watch.looked_times < looked + 3 and not task.done():
            await asyncio.sleep(0.001)
        assert server.state == "standby" and watch.ended_owners == 0  # an owner that is well beats again within a term
        server.beat_refused_at -= server.settings.ownership_term_seconds
        await task
        assert server.state == "awake" and watch.ended_owners == 1

    run(scene())


def test_a_heartbeat_that_was_refused_counts_as_one_that_the_owner_could_not_give(monkeypatch, tmp_path):
    from torpor.vllm.server import owning

    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(SILENT))
        server.record = SimpleNamespace(beat=refuse)
        with pytest.raises(FileError):
            await owning._beat(server)
        server.record = SimpleNamespace(beat=lambda: None)
        assert "not for 30 s yet" in await owning.why_refused(server)

    run(scene())


def test_an_owner_that_ends_is_taken_over_from_whatever_the_engine_does(monkeypatch, tmp_path):
    """Also where memory that is awake for a hand-over does not fall asleep again, and after any error."""

    async def scene():
        watch, failures = Watch(SERVES), []
        server = standby_of(monkeypatch, tmp_path, watch)
        monkeypatch.setattr(server.tasks, "failed", lambda name, problem: failures.append((name, str(problem))))
        task = await following(server)
        server.engine.fails_with = DeviceError("it does not sleep")
        server.standby._awake_until = 0.0
        while len(failures) < 2 and not task.done():
            await asyncio.sleep(0.001)
        assert failures[0] == ("following the owner", "it does not sleep") and not task.done()
        watch.looks[0] = ENDED
        await task
        assert server.state == "awake" and watch.ended_owners == 1

    run(scene())


def test_memory_that_nobody_came_for_does_not_delay_a_take_over(monkeypatch, tmp_path):
    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(ENDED))
        server.standby._awake_until = 0.0
        await server.standby.follow()
        assert server.state == "awake" and server.engine.calls == []

    run(scene())


def test_after_an_error_the_newest_checkpoint_is_read_ahead_again(monkeypatch, tmp_path):
    async def scene():
        watch = Watch(SERVES)
        server = standby_of(monkeypatch, tmp_path, watch)
        watch.looked = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await server.standby.follow()
        watch.looked = lambda: None
        task = asyncio.create_task(server.standby.follow())  # as tasks.keep() does
        while not server.standby._ahead.calls:
            await asyncio.sleep(0.001)
        assert not server.standby._ahead.stopped.is_set()
        server.enter("ending")
        await task
        assert server.standby._ahead.stopped.is_set()

    run(scene())


def test_a_standby_that_failed_before_it_took_over_leaves_clients_to_the_owner(monkeypatch, tmp_path):
    from torpor.vllm.server import listening

    async def scene():
        with socket.create_server(("127.0.0.1", 0)) as clients:
            server = standby_of(monkeypatch, tmp_path, Watch(SERVES), listen_fd=clients.fileno())
            server.app_state.server = SimpleNamespace(started=True)  # nothing that could accept
            waiting = asyncio.create_task(listening.when_awake(server))
            await server.failed_to_go_on(InvalidArgument("it cannot sleep"))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            server.enter("ending")
            await waiting
            assert server.listener is None

    run(scene())


def test_where_it_cannot_listen_the_socket_is_there_for_another_try(monkeypatch, tmp_path):
    from torpor.vllm.server import listening

    async def scene():
        with socket.create_server(("127.0.0.1", 0)) as clients:
            server = standby_of(monkeypatch, tmp_path, Watch(SERVES), listen_fd=clients.fileno())
            server.enter("awake")
            config = SimpleNamespace(ssl=None, backlog=1, http_protocol_class=None)
            server.app_state.server = SimpleNamespace(started=True, config=config, servers=[])
            loop = asyncio.get_running_loop()
            create_server, problems = loop.create_server, [OSError("no")]

            async def fails_once(*arguments, **options):
                if problems:
                    raise problems.pop()
                return await create_server(*arguments, **options)

            monkeypatch.setattr(loop, "create_server", fails_once)
            with pytest.raises(OSError, match="no"):
                await listening.when_awake(server)
            await listening.when_awake(server)
            assert server.listener.is_serving() and server.app_state.server.servers == [server.listener]
            listener = server.listener
            listening.stop(server)  # for a hand-over
            assert not listener.is_serving() and server.app_state.server.servers == []
            server.enter("handing over")
            assert not listening._may_accept(server)
            server.enter("awake")  # it did not come about
            await listening.when_awake(server)
            assert server.listener.is_serving() and server.app_state.server.servers == [server.listener]
            server.listener.close()

    run(scene())


def test_a_standby_that_failed_to_take_over_answers_clients(monkeypatch, tmp_path):
    from torpor.vllm.server import listening

    async def scene():
        server = standby_of(monkeypatch, tmp_path, Watch(ENDED))
        server.owns_with = [InvalidArgument("another key")]
        await server.standby.follow()
        assert server.state == "failed" and listening._may_accept(server)

    run(scene())
