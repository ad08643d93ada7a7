# SPDX-License-Identifier: Apache-2.0
"""What a server does unasked: sleep when idle, wake for a request. Without an engine, and without waiting."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from server_stubs import Engine, build, client, metric, metrics_by, no_settings, run, started  # noqa: F401
from torpor.errors import NotEnoughRoom
from torpor.vllm.server.automatic import pause_between

COMPLETIONS = [("POST", "/v1/completions")]


class Clock:
    """Stands for the module `time` of torpor.vllm.server.automatic."""

    def __init__(self, monkeypatch):
        from torpor.vllm.server import automatic

        self.now = 100.0
        monkeypatch.setattr(automatic, "time", SimpleNamespace(monotonic=lambda: self.now))

    async def look(self, server, seconds: float) -> None:
        self.now += seconds
        await server._automatic._look()


def test_what_an_operator_did_to_a_sleeping_server_stays(monkeypatch, tmp_path):
    """A wake of some tags is no wake: the server is asleep again. It is not moved to disk beneath its operator."""

    async def scene():
        clock = Clock(monkeypatch)
        settings = {"sleep_after_seconds": 30, "sleep_to_disk_after_seconds": 600}
        _, server = build(monkeypatch, COMPLETIONS, engine=Engine(tmp_path), **settings)
        await started(server)
        await clock.look(server, 30)
        assert server.state == "asleep"
        server.enter("waking")
        server.enter("asleep")
        calls = list(server.engine.calls)
        await clock.look(server, 10_000)
        assert server.engine.calls == calls

    run(scene())


def test_an_idle_server_falls_asleep_and_later_to_disk(monkeypatch, tmp_path):
    async def scene():
        clock = Clock(monkeypatch)
        settings = {"sleep_after_seconds": 30, "sleep_to_disk_after_seconds": 600, "wake_on_request": True}
        app, server = build(monkeypatch, COMPLETIONS, engine=Engine(tmp_path), **settings)
        await started(server)
        await clock.look(server, 29)
        async with client(app) as http:
            await http.post("/v1/completions")
        await clock.look(server, 29)
        server.engine.output_processor.request_states["running"] = object()
        await clock.look(server, 100)
        server.engine.output_processor.request_states.clear()
        await clock.look(server, 29)
        assert server.state == "awake"
        await clock.look(server, 1)
        assert server.state == "asleep" and slept(server) == ["host"]
        await clock.look(server, 599)
        assert slept(server) == ["host"]
        await clock.look(server, 1)
        assert server.state == "asleep" and slept(server) == ["host", "disk"]
        await clock.look(server, 10_000)
        assert slept(server) == ["host", "disk"]
        async with client(app) as http:
            assert (await http.post("/v1/completions")).status_code == 200
        assert server.state == "awake" and automatic(server) == {"sleep": 1, "sleep_to_disk": 1, "wake": 1}

    run(scene())


def slept(server) -> list[str]:
    return [call[3]["to"] for call in server.engine.calls if call[0] == "sleep"]


def automatic(server) -> dict[str, float]:
    return metrics_by(server, "torpor_automatic_operations_total", "operation")


def test_a_sleep_that_was_asked_for_stays_as_it_is(monkeypatch, tmp_path):
    async def scene():
        clock = Clock(monkeypatch)
        _, server = build(
            monkeypatch, [], engine=Engine(tmp_path), sleep_after_seconds=1, sleep_to_disk_after_seconds=1
        )
        await started(server)
        await server.sleep()
        await clock.look(server, 100)
        assert slept(server) == ["host"]

    run(scene())


def test_a_sleep_to_disk_that_fails_on_its_way_leaves_the_truth(monkeypatch, tmp_path):
    async def scene():
        clock = Clock(monkeypatch)
        _, server = build(
            monkeypatch, [], engine=Engine(tmp_path), sleep_after_seconds=1, sleep_to_disk_after_seconds=1
        )
        await started(server)
        await clock.look(server, 1)
        server.engine.fails_with = NotEnoughRoom("another server has the device")
        with pytest.raises(NotEnoughRoom):
            await clock.look(server, 1)
        assert server.state == server.engine.state == "asleep"
        await clock.look(server, 0.5)
        with pytest.raises(NotEnoughRoom):  # tried again
            await clock.look(server, 0.5)
        server.engine.fails_with = None
        monkeypatch.setattr(server, "sleep_now", failing(NotEnoughRoom("the disk is full")))
        with pytest.raises(NotEnoughRoom):
            await server.sleep_deeper()
        assert server.state == server.engine.state == "awake"

    run(scene())


def failing(problem):
    async def call(*args):
        raise problem

    return call


def test_a_request_that_comes_while_it_falls_asleep_wakes_it(monkeypatch):
    async def scene():
        app, server = build(monkeypatch, COMPLETIONS, wake_on_request=True)
        await started(server)
        server.engine.output_processor.request_states["running"] = object()
        falling = asyncio.create_task(server.sleep(1, "wait", False))
        async with client(app) as http:
            await asyncio.sleep(0.05)
            late = asyncio.create_task(http.post("/v1/completions"))
            await asyncio.sleep(0.05)
            assert server.state == "falling asleep"
            assert (await http.get("/torpor/ready")).status_code == 200  # it stays behind its router
            server.engine.output_processor.request_states.clear()
            await falling
            assert (await asyncio.wait_for(late, 60)).status_code == 200 and server.state == "awake"

    run(scene())


def test_a_wake_without_room_is_tried_again_while_a_request_waits(monkeypatch):
    async def scene():
        from torpor.vllm.server import automatic as module

        monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
        app, server = build(monkeypatch, COMPLETIONS, wake_on_request=True)
        await started(server)
        await server.sleep()
        server.engine.fails_with = NotEnoughRoom("another server has the device")
        async with client(app) as http:
            call = asyncio.create_task(http.post("/v1/completions"))
            while sum(each[0] == "wake_up" for each in server.engine.calls) < 3:
                await asyncio.sleep(0.01)
            assert server.state == "asleep" and not call.done()
            assert counted(server, "wake", "host", "no_room") >= 2 and counted(server, "wake", "host", "error") == 0
            server.engine.fails_with = None
            assert (await asyncio.wait_for(call, 60)).status_code == 200
        tries = len(server.engine.calls)
        await asyncio.sleep(0.05)
        assert len(server.engine.calls) == tries  # and not once more

    run(scene())


def counted(server, operation: str, tier: str, outcome: str) -> float | None:
    return metric(server, "torpor_operations_total", operation=operation, tier=tier, outcome=outcome)


def test_what_waits_for_the_device_is_no_failure_and_a_full_disk_is_one(monkeypatch, tmp_path):
    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)
        await server.sleep()
        server.engine.fails_with = NotEnoughRoom("another server has the device")
        for sleep_or_wake in (server.sleep_deeper, server.wake_up):
            with pytest.raises(NotEnoughRoom):
                await sleep_or_wake()
        assert [counted(server, "sleep", "disk", each) for each in ("error", "no_room")] == [0, 1]
        assert [counted(server, "wake", "host", each) for each in ("error", "no_room")] == [0, 1]
        server.engine.fails_with = None

        async def full(*_, **options):
            raise NotEnoughRoom("the volume is full")

        server.engine.sleep = full
        with pytest.raises(NotEnoughRoom):
            await server.sleep_deeper()
        assert [counted(server, "sleep", "disk", each) for each in ("error", "no_room")] == [1, 1]

    run(scene())


def test_an_operator_waits_for_the_servers_own_checkpoint_though_requests_come(monkeypatch, tmp_path):
    async def scene():
        engine = Engine(tmp_path)
        begun, may_end = asyncio.Event(), asyncio.Event()
        stock = engine.checkpoint

        async def slow_checkpoint(**_):
            begun.set()
            await may_end.wait()
            return await stock()

        monkeypatch.setattr(engine, "checkpoint", slow_checkpoint)
        app, server = build(monkeypatch, COMPLETIONS, engine=engine, checkpoint_interval_seconds=0.01)
        await started(server)
        checkpoints = asyncio.create_task(server._automatic.checkpoints())
        await asyncio.wait_for(begun.wait(), 60)
        async with client(app) as http:
            assert (await http.post("/v1/completions")).status_code == 200
        sleep = asyncio.create_task(server.sleep())
        await asyncio.sleep(0)
        assert not sleep.done()
        may_end.set()
        await asyncio.wait_for(sleep, 60)
        checkpoints.cancel()
        assert server.state == "asleep"

    run(scene())


def test_the_metrics_say_when_no_checkpoint_was_due(monkeypatch, tmp_path):
    """Nothing has changed, or the engine sleeps."""
    of, name = "torpor_checkpoint_timestamp_seconds", "torpor_checkpoint_not_due_timestamp_seconds"

    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path), checkpoint_interval_seconds=0.01)
        await started(server)
        checkpoints = asyncio.create_task(server._automatic.checkpoints())

        async def seen_since(moment: float) -> None:
            while (metric(server, name) or 0) <= moment:
                await asyncio.sleep(0.01)

        while metric(server, of) is None:
            assert metric(server, name) is None
            await asyncio.sleep(0.001)
        await asyncio.wait_for(seen_since(metric(server, of)), 60)
        await server.sleep()
        await asyncio.wait_for(seen_since(time.time()), 60)
        checkpoints.cancel()
        assert server.engine.calls.count(("checkpoint",)) == 1

    run(scene())


@pytest.mark.parametrize(
    ("took", "pause"), [(0, 2), (0.5, 1.5), (1, 1), (1.5, 1.5), (2, 2), (10, 2)], ids=lambda value: f"{value} s"
)
def test_the_time_of_a_checkpoint_counts_to_the_interval_as_long_as_half_of_the_time_is_free(took, pause):
    assert pause_between(2, took) == pause


def test_the_pause_to_the_next_checkpoint_is_shorter_by_what_the_last_one_took(monkeypatch, tmp_path):
    """By a clock of the test's own: nobody waits."""

    async def scene():
        from torpor.vllm.server import automatic as module

        engine, pauses, clock = Engine(tmp_path), [], [100.0]
        stock, after_three = engine.checkpoint, asyncio.Event()

        async def checkpoint(**_):
            clock[0] += 0.5
            return await stock()

        async def sleep(seconds):
            pauses.append(seconds)
            clock[0] += seconds
            if len(pauses) == 3:
                after_three.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(engine, "checkpoint", checkpoint)
        _, server = build(monkeypatch, COMPLETIONS, engine=engine)
        await started(server)
        settings = SimpleNamespace(checkpoint_interval_seconds=2)  # set only now: the server itself begins no loop
        monkeypatch.setattr(server._automatic, "_settings", settings)
        monkeypatch.setattr(server, "progress", lambda: object())  # something has changed each time
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
        checkpoints = asyncio.create_task(server._automatic.checkpoints())
        await asyncio.wait_for(after_three.wait(), 600)
        checkpoints.cancel()
        assert pauses == [2, 1.5, 1.5]

    run(scene())


@pytest.mark.parametrize("directory", [True, False])
def test_settings_that_do_not_go_together_are_refused(monkeypatch, tmp_path, directory):
    async def scene():
        settings = (
            {"sleep_to_disk_after_seconds": 5}
            if directory
            else {"sleep_after_seconds": 5, "sleep_to_disk_after_seconds": 5}
        )
        _, server = build(monkeypatch, [], engine=Engine(tmp_path if directory else None), **settings)
        await started(server)
        assert server.state == "failed" and "sleep_to_disk_after_seconds without" in str(server.problem)

    run(scene())
