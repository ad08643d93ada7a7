# SPDX-License-Identifier: Apache-2.0
"""What a server does beside its requests survives any failure, and is counted. Without an engine."""

import asyncio
import signal
from types import SimpleNamespace

import pytest
from server_stubs import Engine, build, client, metrics_by, no_settings, run, started  # noqa: F401

PLAIN = Exception("Call to torpor_call method failed: a worker failed")  # as vLLM's client raises it
COMPLETIONS = [("POST", "/v1/completions")]


def failures(server) -> dict[str, float]:
    counted = metrics_by(server, "torpor_task_failures_total", "task")
    return {task: count for task, count in counted.items() if count > 0}


@pytest.fixture
def at_once(monkeypatch):
    from torpor.vllm.server import automatic, tasks

    monkeypatch.setattr(tasks, "_RESTART_SECONDS", 0)
    monkeypatch.setattr(automatic, "_RETRY_AFTER_ERROR_SECONDS", 0)


@pytest.fixture
def killed(monkeypatch) -> list[int]:
    from torpor.vllm.server import ending

    signals: list[int] = []
    monkeypatch.setattr(ending, "os", SimpleNamespace(kill=lambda _, number: signals.append(number), getpid=lambda: 0))
    return signals


def test_a_loop_that_fails_is_begun_anew_and_counted(monkeypatch, at_once):
    async def scene():
        _, server = build(monkeypatch, [])
        attempts = 0

        async def loop() -> None:
            nonlocal attempts
            attempts += 1
            if attempts < 4:
                raise PLAIN

        await server.tasks.keep(loop, "a loop")
        assert attempts == 4 and failures(server) == {"a_loop": 3}
        assert await server.tasks.run(asyncio.sleep(0, "done"), "a task") == "done"
        with pytest.raises(ZeroDivisionError):  # somebody waits for it
            await server.tasks.run(divide())
        assert failures(server) == {"a_loop": 3}
        await asyncio.sleep(0)
        assert not server.tasks.running

    run(scene())


async def divide() -> None:
    1 / 0  # noqa: B018


def test_a_loop_that_is_cancelled_ends(monkeypatch, at_once):
    async def scene():
        _, server = build(monkeypatch, [])
        task = server.tasks.keep(asyncio.Event().wait, "a loop")
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert failures(server) == {}

    run(scene())


def test_periodic_checkpoints_go_on_after_any_failure(monkeypatch, tmp_path, at_once):
    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path), checkpoint_interval_seconds=1e-6)
        await started(server)
        attempts = []
        written = asyncio.Event()

        async def checkpoint(**_):
            attempts.append(server._automatic.checkpointing)
            if len(attempts) > 3:
                written.set()
            raise PLAIN

        server.engine.checkpoint = checkpoint
        task = server.tasks.keep(server._automatic.checkpoints, "periodic checkpoints")
        await written.wait()
        assert not task.done() and failures(server)["periodic_checkpoints"] >= 3 and server.state == "awake"
        task.cancel()

    run(scene())


def test_a_request_wakes_the_engine_after_any_failure(monkeypatch, tmp_path, at_once):
    async def scene():
        app, server = build(monkeypatch, COMPLETIONS, engine=Engine(tmp_path), wake_on_request=True)
        await started(server)
        await server.sleep()
        server.engine.fails_with = PLAIN
        async with client(app) as http:
            asked = asyncio.create_task(http.post("/v1/completions"))
            while sum(call[0] == "wake_up" for call in server.engine.calls) < 4:
                await asyncio.sleep(0)
            server.engine.fails_with = None
            assert (await asked).status_code == 200
        assert server.state == "awake" and failures(server) == {"waking_for_a_request": 1}  # said once

    run(scene())


def test_an_idle_server_tries_a_term_later_after_any_failure(monkeypatch, tmp_path, at_once):
    async def scene():
        settings = {"sleep_after_seconds": 1e-6, "wake_on_request": True}
        _, server = build(monkeypatch, [], engine=Engine(tmp_path), **settings)
        await started(server)
        server.engine.fails_with = PLAIN
        task = server.tasks.keep(server._automatic.watch, "watching for idleness")
        while failures(server).get("watching_for_idleness", 0) < 3:
            await asyncio.sleep(0)
        server.engine.fails_with = None
        while server.state != "asleep":
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

    run(scene())


@pytest.mark.parametrize("how", ["it is lost", "nobody knows"])
def test_a_server_that_may_not_own_its_answers_any_more_ends(monkeypatch, tmp_path, killed, how):
    async def scene():
        from torpor.vllm.server import ending

        _, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)

        async def disowned() -> None:
            if how == "nobody knows":
                raise PLAIN

        server.remote = SimpleNamespace(disowned=disowned)
        server.engine.output_processor.request_states["one"] = None  # the clients cannot be told
        await server.tasks.run(ending.end_when_disowned(server), "keeping ownership")
        assert killed == [signal.SIGINT] and server.state == "ending"
        assert failures(server).get("keeping_ownership", 0) == (how == "nobody knows")

    run(scene())


def test_a_server_ends_whatever_fails_on_the_way(monkeypatch, tmp_path, killed):
    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)

        async def fails(*_args, **_options):
            raise PLAIN

        server.engine.sleep = fails
        server.remote = SimpleNamespace(release=fails)
        server.engine.output_processor.request_states["one"] = None
        monkeypatch.setattr(server.recorder, "close", lambda: divide().send(None))
        await server.end()
        assert killed == [signal.SIGINT] and failures(server) == {"ending": 3}

    run(scene())


def test_an_output_that_cannot_be_delivered_keeps_none_from_others(monkeypatch, tmp_path):
    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)
        delivered = []

        def refuse(_output) -> None:
            raise PLAIN

        recorder = server.recorder
        recorder.deliver_when_durable(refuse, 1)
        recorder.deliver_when_durable(delivered.append, 2)
        await recorder._syncing
        monkeypatch.setattr(recorder, "answers", SimpleNamespace(sync=lambda: divide().send(None)))
        await recorder.sync()
        assert delivered == [2] and recorder.failures == 1

    run(scene())
