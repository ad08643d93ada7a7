# SPDX-License-Identifier: Apache-2.0
"""Two engines, each with its engine core in a process of its own, take turns on the memory of one: torpor.swap(), and
POST /swap of servers."""

import asyncio
import contextlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ENGINE
from requests_of_tests import REQUESTS, add_requests, run
from servers import ALICE, Client, Reading, make_server, sampling
from serving import command_of, descendants
from suspend import suspend
from test_other_processes import LONG, in_other_processes, start, stop, written  # noqa: F401
from zygote import MOST_SECONDS

import torpor
from torpor.errors import Aborted, InvalidArgument, TimedOut, WrongState


NAMES = ["greedy", "seeded", "prefix-a", "stops", "long"]


def core_of(engine) -> int:
    (process,) = engine.engine_core.resources.engine_manager.processes
    return process.pid


def begin(llm) -> None:
    llm.reset_prefix_cache()
    add_requests(llm.llm_engine, NAMES, LONG)


@contextlib.contextmanager
def while_stopped(pid: int):
    suspend(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.long
def test_engines_take_turns_and_each_request_has_its_tokens(
    in_other_processes, zygote, tiny_model, tmp_path  # noqa: F811
):  # fmt: skip
    with zygote.spawning():
        awake, asleep = (start(tiny_model, tmp_path / name) for name in ("a", "b"))
    both = (awake, asleep)
    try:
        expected, answers = {}, {}
        for llm in both:
            begin(llm)
            expected[llm] = written(run(llm.llm_engine))
        for llm in (asleep, awake):  # engine cores run ahead of who reads
            begin(llm)
            answers[llm] = run(llm.llm_engine, 6)
            if llm is asleep:
                llm.sleep(level=1, preserve_state=True)
        with pytest.raises(InvalidArgument, match="two engines"):
            torpor.swap(awake, awake)
        with pytest.raises(WrongState, match=r"that is to (go is asleep|come is awake)"):  # both refuse
            torpor.swap(asleep, awake)
        for turn in range(4):
            answers[awake] |= run(awake.llm_engine, 2)
            seen = []
            with pytest.raises(Aborted, match="cancelled"):
                torpor.swap(awake, asleep, progress=lambda _: False)
            assert not awake.is_sleeping() and asleep.is_sleeping()
            report = torpor.swap(awake, asleep, progress=seen.append)
            assert seen[-1].bytes_done == seen[-1].bytes_total
            assert seen[-1].bytes_total == report.slept.saved_bytes + report.woken.restored_bytes
            assert report and report.slept.changed and report.woken.fully_awake
            assert report.slept.requests > 0 or turn > 1
            assert report.slept.saved_bytes > 0 and report.woken.restored_bytes > 0
            assert report.seconds >= max(report.slept.seconds, report.woken.seconds) > 0
            assert all(ledger["device_physical_bytes"] == 0 for ledger in report.slept.ledgers)
            answers[awake] |= run(awake.llm_engine, 1)  # what had arrived before it slept
            assert run(awake.llm_engine, 1) == {}
            awake, asleep = asleep, awake
        for _ in both:
            assert written(answers[awake] | run(awake.llm_engine)) == expected[awake]
            assert awake.llm_engine.torpor.state().recomputed_tokens == 0
            torpor.swap(awake, asleep)
            awake, asleep = asleep, awake

        begin(awake)
        for stopped, which in ((asleep, "wakes"), (awake, "falls asleep")):
            silent = pytest.raises(TimedOut, match=f"no heartbeat of the engine that {which} for 2 s")
            with while_stopped(core_of(stopped.llm_engine)), silent:
                torpor.swap(awake, asleep, peer_timeout=2)
            for half in [thread for thread in threading.enumerate() if thread.name == "torpor-swap"]:
                half.join(MOST_SECONDS)
            assert not awake.is_sleeping() and asleep.is_sleeping()
        assert written(run(awake.llm_engine)) == expected[awake]
        torpor.swap(awake, asleep)
        awake, asleep = asleep, awake

        begin(awake)
        suspend(core_of(awake.llm_engine))
        with ThreadPoolExecutor(1) as other:
            swapping = other.submit(torpor.swap, awake, asleep)
            os.kill(core_of(awake.llm_engine), signal.SIGKILL)
            with pytest.raises(Aborted, match="core of the one that goes has ended"):
                swapping.result(MOST_SECONDS)
        assert asleep.is_sleeping() and asleep.wake_up()
        begin(asleep)
        assert written(run(asleep.llm_engine)) == expected[asleep]
    finally:
        for llm in both:
            stop(llm)


@pytest.mark.slow
@pytest.mark.long
def test_streams_of_two_engines_go_on_where_they_were(in_other_processes, zygote, tiny_model, tmp_path):  # noqa: F811
    asyncio.run(_streams(zygote, tiny_model, tmp_path))


async def _streams(zygote, model, directory) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    def make(name: str) -> AsyncLLM:
        torpor = {"torpor": {"checkpoint_dir": str(directory / name)}}
        arguments = AsyncEngineArgs(model=str(model), additional_config=torpor, disable_log_stats=True, **ENGINE)
        return AsyncLLM.from_engine_args(arguments)

    async def read(engine, name: str, into: list) -> list:
        prompt, params = REQUESTS[name]
        params = params.clone()
        params.max_tokens = LONG
        async for output in engine.generate(prompt, params, f"{name}-{id(into)}"):
            into[:] = output.outputs[0].token_ids
        return into

    with zygote.spawning():
        awake, asleep = make("a"), make("b")
    both = {awake: "greedy", asleep: "seeded"}
    try:
        expected = {engine: await read(engine, name, []) for engine, name in both.items()}
        answers: dict = {engine: [] for engine in both}
        readers = {engine: asyncio.create_task(read(engine, name, answers[engine])) for engine, name in both.items()}
        while not all(answers.values()):
            await asyncio.sleep(0.002)
        await asleep.sleep(level=1, preserve_state=True)
        for _ in range(2):
            report = await torpor.swap(awake, asleep)
            assert report and report.slept.requests == 1
            awake, asleep = asleep, awake
            assert await asleep.is_sleeping() and not await awake.is_sleeping()
        silent = pytest.raises(TimedOut, match=r"no heartbeat of the engine that wakes for 2 s")
        with while_stopped(core_of(asleep)), silent:
            await torpor.swap(awake, asleep, peer_timeout=2)
        assert await asleep.is_sleeping() and not await awake.is_sleeping()
        assert await readers[awake] == expected[awake]
        await torpor.swap(awake, asleep)
        assert await readers[asleep] == expected[asleep]

        last = asyncio.create_task(read(asleep, both[asleep], []))
        os.kill(core_of(awake), signal.SIGKILL)  # the one that is to come
        with pytest.raises(Aborted, match="core of the one that comes has ended"):
            await asyncio.wait_for(torpor.swap(asleep, awake), MOST_SECONDS)
        assert await last == expected[asleep]
    finally:
        for engine in both:
            engine.shutdown()


# --- two servers ------------------------------------------------------------------------------------------------------


LONG_ANSWER = sampling(1, 400) | {"extra_body": {"ignore_eos": True}}


class Side:
    """One server, its client, and one answer of it that is long enough for all that happens."""

    def __init__(self, model: Path, folder: Path, name: str):
        self.name, self.stop_before = name, folder / f"{name}.stop"
        self.server = make_server(
            model, folder / name, "--worker-extension-cls", "stop_by_hand.StopByHand", name=name,
            environment={"TORPOR_TEST_STOP": str(self.stop_before)},
        )  # fmt: skip
        self.server.start()
        self.turns = 0

    def core(self) -> int:
        (pid,) = [each for each in descendants(self.server.pid) if "EngineCore" in command_of(each)]
        return pid

    async def begin(self) -> None:
        self.client = Client(self.server.url, ALICE)
        self.expected = await self.client.chat(Reading(f"{self.name}-whole"), self.prompt(), **LONG_ANSWER)

    def prompt(self) -> str:
        return f"Tell me about {self.name}."

    async def read(self) -> None:
        self.turns += 1
        self.reading = Reading(f"{self.name}-{self.turns}")
        self.task = asyncio.create_task(self.client.chat(self.reading, self.prompt(), **LONG_ANSWER))
        while not self.reading.text:
            await asyncio.sleep(0.002)

    async def read_whole(self, interruptions: int = 0) -> None:
        await asyncio.wait_for(self.task, MOST_SECONDS)
        assert self.reading.text == self.expected.text and self.reading.interruptions == interruptions

    async def until(self, state: str) -> None:
        while (await self.client.http.get("/torpor/state")).json()["state"] != state:
            await asyncio.sleep(0.02)

    async def sleeps(self) -> bool:
        return (await self.client.http.get("/is_sleeping")).json()["is_sleeping"]


async def until_stopped(side: Side) -> int:
    """The process of its worker."""
    while True:
        for pid in descendants(side.server.pid):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return pid
        await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.long
def test_servers_take_turns_and_one_that_is_killed_leaves_the_other(zygote, tiny_model, tmp_path):
    sides = []
    try:
        sides = [Side(tiny_model, tmp_path, name) for name in ("first", "second")]
        for side in sides:
            side.server.wait_until_ready()
        asyncio.run(asyncio.wait_for(_servers(*sides), MOST_SECONDS))
    finally:
        for side in sides:
            side.server.stop()


async def _servers(first: Side, second: Side) -> None:
    await asyncio.gather(first.begin(), second.begin())
    assert (await first.client.http.post("/swap", params={"to": second.server.url})).status_code == 403
    for to, words in ((first, "in progress"), (second, "swap: the engine that is to come is awake")):
        refused = await first.client.admin.post("/swap", params={"to": to.server.url})
        assert refused.status_code == 409 and f"the server at {to.server.url}: " in refused.text, refused.text
        assert words in refused.text and not await first.sleeps() and not await second.sleeps()
    await second.read()
    await second.client.post("/sleep")
    await first.read()

    report = await first.client.post("/swap", to=second.server.url)
    assert report["status"] == "sleeping" and report["slept"]["requests"] == 1 and report["slept"]["freed_bytes"] > 1e9
    assert report["woken"]["status"] == "awake" and report["woken"]["restored_bytes"] > 0
    assert await first.sleeps() and not await second.sleeps()
    text = first.reading.text
    late = asyncio.create_task(first.client.chat(Reading("late"), first.prompt(), **LONG_ANSWER))
    await second.read_whole()
    assert first.reading.text == text

    events = {"Accept": "text/event-stream"}
    response = await second.client.admin.post("/swap", params={"to": first.server.url}, headers=events)
    names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    done = json.loads(response.text.splitlines()[-2].removeprefix("data: "))
    assert names[0] == "progress" and "phase" in names and names[-1] == "done", response.text[-2000:]
    assert done["to"] == first.server.url and done["woken"]["requests"] == 1
    await first.read_whole()
    assert (await late).text == first.expected.text
    assert not await first.sleeps() and await second.sleeps()

    # A worker of the one that comes stops when it has taken memory, until it is given up.
    await first.read()
    second.stop_before.write_text("restore")
    asked = {"to": second.server.url, "peer_timeout": 3}
    swapping = asyncio.create_task(first.client.admin.post("/swap", params=asked))
    worker = await asyncio.wait_for(until_stopped(second), MOST_SECONDS)
    answer = await asyncio.wait_for(swapping, MOST_SECONDS)
    assert "no heartbeat of the engine that wakes for 3 s" in answer.text and answer.status_code == 500, answer.text
    assert not answer.json()["error"]["state_changed"] and not await first.sleeps()
    await first.read_whole()
    os.kill(worker, signal.SIGCONT)
    await second.until("asleep")

    # The one that comes is killed when it has taken memory.
    await first.read()
    second.stop_before.write_text("restore")
    swapping = asyncio.create_task(first.client.admin.post("/swap", params={"to": second.server.url}))
    await asyncio.wait_for(until_stopped(second), MOST_SECONDS)
    second.server.kill()
    answer = await asyncio.wait_for(swapping, MOST_SECONDS)
    assert answer.status_code == 500 and second.server.url in answer.text, answer.text
    assert not await first.sleeps()
    await first.read_whole()

    # The core of the one that goes is killed when it has copied some.
    await asyncio.to_thread(second.server.start)
    await asyncio.to_thread(second.server.wait_until_ready)
    await second.read()
    await second.client.post("/sleep")
    first.stop_before.write_text("detach")
    swapping = asyncio.create_task(first.client.admin.post("/swap", params={"to": second.server.url}))
    worker = await asyncio.wait_for(until_stopped(first), MOST_SECONDS)
    for pid in (first.core(), worker):
        os.kill(pid, signal.SIGKILL)
    answer = await asyncio.wait_for(swapping, MOST_SECONDS)
    assert answer.status_code == 500 and "this server: its engine core has ended" in answer.text, answer.text
    assert await second.sleeps()
    await second.client.post("/wake_up")
    await second.read_whole()
    for side in (first, second):
        await side.client.close()
