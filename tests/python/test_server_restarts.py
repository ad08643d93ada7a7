# SPDX-License-Identifier: Apache-2.0
"""Clients of a server that sleeps, is drained, is killed and comes back: each gets its whole answer, once."""

import asyncio
import os
import random
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from conftest import IN_PROOF
from servers import (
    ALICE,
    DEFERRED_BY_HAND,
    Client,
    Reading,
    ServerEnded,
    make_server,
    of,
    samples,
    sampling,
    start_requests,
)
from serving import descendants
from tiny_model import make_model

import torpor.console

pytestmark = pytest.mark.slow

CLIENTS, REQUESTS, TOKENS = 32, 200, 40
PROMPTS = [
    "the sea",
    "old bridges",
    "how bread is made",
    "a lighthouse",
    "the moon",
    "a train ride",
    "winter",
    "mountains",
    "a small town",
    "rivers",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("restarts")


@pytest.fixture(scope="module")
def events():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield path


@pytest.fixture(scope="module")
def server(tiny_model, folder, events):
    options = ["--torpor-checkpoint-interval-seconds", "3", "--max-num-seqs", str(CLIENTS)]
    options += ["--torpor-events-dir", events, "--torpor-console", "control"]
    options += ["--torpor-recordings-dir", str(folder / "recordings")]
    server = make_server(tiny_model, folder / "torpor", *options, environment={"VLLM_SERVER_DEV_MODE": "1"})
    server.start()
    server.wait_until_ready()
    yield server
    server.stop()


def prompt(number: int) -> str:
    return f"Write number {number} of your notes about {PROMPTS[number % len(PROMPTS)]}."


async def everybody(client: Client, readings: list[Reading], tokens: int) -> None:
    """All requests, as many at once as there are clients."""
    waiting = list(enumerate(readings))

    async def one_client():
        while waiting:
            number, reading = waiting.pop(0)
            await client.chat(reading, prompt(number), **sampling(number, tokens))

    await asyncio.gather(*(one_client() for _ in range(CLIENTS)))


async def whole_and_once(client: Client, readings: list[Reading]) -> None:
    for reading in readings:
        choice = (await client.whole(reading.request_id))["choices"][0]
        assert choice["text"] == reading.text, reading.request_id
        assert choice["state"] == "finished", (reading.request_id, choice)


async def until_read(readings: list[Reading], share: float, of: list[Reading]) -> None:
    """Until clients have this share of the text that they will have in the end."""
    total = sum(len(reading.text) for reading in of)
    while sum(len(reading.text) for reading in readings) < share * total:
        await asyncio.sleep(0.005)


async def restarted(server, how) -> None:
    await asyncio.to_thread(how)
    server.start()
    await asyncio.to_thread(server.wait_until_ready)


def run(server, scene, seconds=1500):
    async def play():
        client = Client(server.url, ALICE)
        try:
            await asyncio.wait_for(scene(client), seconds)
        finally:
            await client.close()

    asyncio.run(play())


async def pause(client) -> None:
    """It takes no further step until it sleeps, drains or writes a checkpoint; and answers all the same."""
    assert (await client.admin.post("/torpor/console/pause", json={"lease": 300})).json()["stop"] > 0
    assert (await client.http.get("/health")).status_code == 200
    given_up = asyncio.create_task(client.chat(Reading("given-up"), "Count.", **sampling(0, 30)))
    while (await client.http.get("/torpor/requests/given-up")).status_code == 404:
        await asyncio.sleep(0.02)
    assert (await client.http.delete("/torpor/requests/given-up")).json() == {"aborted": 1}
    given_up.cancel()


def slept_by_socket(events: str) -> None:
    """In a thread: plan, sleep and wake through the server's socket, the rest through its engine's."""
    with torpor.console.connect(events) as console:
        console.start_recording("sleep")
        assert console.plan(level=1)["problems"] == []
        assert console.sleep(level=1)["status"] == "sleeping" and console.snapshot()["engine"] == "asleep"
        assert console.wake()["status"] == "awake" and console.stops()["stops"] == []  # a sleep ends each stop
        recorded = console.stop_recording()
    assert recorded["lost"] == 0 and recorded["error"] is None and recorded["events"] > 100
    assert recorded["processes"] >= 2  # the server and its engine


@pytest.mark.long
def test_every_answer_of_200_requests_is_whole_and_identical_over_10_sleeps(server, events):
    """Greedy and seeded requests in float32, whose tokens do not depend on who else is in the batch here.

    Before some sleeps, and before one drain, somebody has stopped the engine to look at it.
    """
    chance = random.Random(5)

    async def scene(client):
        expected = [Reading(f"expected-{n}") for n in range(REQUESTS)]
        await everybody(client, expected, TOKENS)
        readings = [Reading(f"r-{n}") for n in range(REQUESTS)]
        everything = asyncio.create_task(everybody(client, readings, TOKENS))
        restarts = {3, 7}
        for number in range(10):
            await until_read(readings, (number + chance.uniform(0.1, 0.9)) / 11, expected)
            if number in (5, 7):
                await pause(client)
            if number == 5:
                await asyncio.to_thread(slept_by_socket, events)
            elif number in restarts:
                assert await asyncio.to_thread(server.terminate) == 0
                server.start()
                await asyncio.to_thread(server.wait_until_ready)
            else:
                await client.post("/sleep", to="disk" if number % 2 else "host")
                await asyncio.sleep(chance.uniform(0, 0.5))
                await client.post("/wake_up")
        assert not everything.done(), "the requests were over before the sleeps"
        await everything
        await whole_and_once(client, readings)
        assert [reading.text for reading in readings] == [reading.text for reading in expected]
        assert sum(bool(reading.taken_up_at) for reading in readings) > 10
        assert (
            sum(bool(reading.begun_again) for reading in readings) < REQUESTS // 2
        )  # those that came while there was no server

    run(server, scene)


@pytest.mark.longer
def test_a_kill_of_any_process_at_any_moment_loses_nothing(server):
    chance = random.Random(6)
    victims = (["engine core", "front end", "all"] * 7)[: 20 if IN_PROOF else 3]
    begun_at_kills = []

    async def scene(client):
        expected = [Reading(f"k-expected-{n}") for n in range(12)]
        await asyncio.gather(*(client.chat(expected[n], prompt(n), **sampling(n, 150)) for n in range(12)))
        for number, victim in enumerate(victims):
            readings = [Reading(f"k{number}-{n}") for n in range(12)]
            unseeded = {"max_tokens": 150, "temperature": 0.9}
            params = [sampling(n, 150) if n % 3 else unseeded for n in range(12)]
            tasks = [asyncio.create_task(client.chat(readings[n], prompt(n), **params[n])) for n in range(12)]
            await until_read(readings, chance.uniform(0, 0.8), expected)
            began = [n for n, reading in enumerate(readings) if reading.text]
            at_kill = [reading.text for reading in readings]
            await restarted(server, lambda: server.kill(victim))  # noqa: B023
            await asyncio.gather(*tasks)
            await whole_and_once(client, readings)
            for n, reading in enumerate(readings):
                assert reading.text.startswith(at_kill[n])
                if n % 3:
                    assert reading.text == expected[n].text, (victim, n)
            begun_at_kills.append(len(began))
            print(
                f"kill {number + 1}, of {victim}: {len(began)} of {len(readings)} answers had begun; all whole",
                flush=True,
            )
        assert sum(begun > 0 for begun in begun_at_kills) * 2 > len(victims), (
            begun_at_kills
        )  # kills came while answers were read

    run(server, scene, seconds=600 * len(victims))


def test_a_server_that_cannot_wake_says_so_and_keeps_what_is_there(server, real_model, folder):
    """Continues with the directory of the server above, which is drained with requests in the middle."""

    async def scene(client):
        readings = [Reading(f"w-{n}") for n in range(3)]
        expected = [Reading(f"w-expected-{n}") for n in range(3)]
        await asyncio.gather(*(client.chat(expected[n], prompt(n), **sampling(n, 800)) for n in range(3)))
        tasks = [asyncio.create_task(client.chat(readings[n], prompt(n), **sampling(n, 800))) for n in range(3)]
        while not all(reading.text for reading in readings):
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(server.terminate) == 0
        newest = sorted(path for path in (folder / "torpor").iterdir() if path.name.startswith("g-"))[-1]
        shutil.copytree(folder / "torpor", folder / "kept")

        # Another model: both are started at once, to save time.
        another = make_model(folder / "another", real_model, layers=3)
        other = make_server(another, folder / "kept", name="other")
        other.start()
        state = newest / "STATE"
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 1
        state.write_bytes(content)
        server.start()
        with pytest.raises(ServerEnded, match=r"incompatible.*model"):
            await asyncio.to_thread(other.wait_until_ready)
        at_other = Client(other.url, ALICE)
        body = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}
        assert (await at_other.http.post("/v1/chat/completions", json=body)).status_code == 503
        alive = await at_other.http.get("/health")  # a new process of it would meet the same checkpoint
        assert alive.status_code == 200 and alive.json()["error"]["code"] == "incompatible", alive.text
        await at_other.close()
        other.stop()
        with pytest.raises(ServerEnded, match=r"corruption.*STATE"):
            await asyncio.to_thread(server.wait_until_ready)
        assert "use another checkpoint" in server.end_of_log(200)
        assert newest.exists() and (folder / "kept" / newest.name).exists()
        server.stop()

        # As its message says: go on without that checkpoint, from the response log. And no time to save anything.
        server.start(
            "--torpor-on-wake-error=recompute --torpor-sigterm-seconds=0 --torpor-checkpoint-interval-seconds=0".split()
        )
        await asyncio.to_thread(server.wait_until_ready)
        metrics = samples((await client.http.get("/metrics")).text)
        assert start_requests(metrics) == {"added": 3}
        assert metrics["torpor_operations_total", of(operation="wake", tier="response_log", outcome="ok")] == 1
        assert ("torpor_checkpoint_timestamp_seconds", of()) not in metrics  # it goes on from none
        at = [len(reading.text) for reading in readings]
        while any(
            len(reading.text) == before and reading.finish_reason is None
            for reading, before in zip(readings, at, strict=True)
        ):
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(server.terminate) == 0
        assert (
            "no checkpoint on SIGTERM" in server.log.read_text() and "requests was not saved" in server.log.read_text()
        )
        server.start(["--torpor-on-wake-error", "recompute"])
        await asyncio.to_thread(server.wait_until_ready)
        await asyncio.gather(*tasks)
        await whole_and_once(client, readings)
        assert [reading.text for reading in readings] == [reading.text for reading in expected]

    run(server, scene)


def mounted(volume: Path) -> None:
    """As kubelet leaves the volume of a pod that has an fsGroup, at each mount."""
    for path in (volume, *volume.rglob("*")):
        os.chown(path, -1, os.getegid())
        path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))


def test_a_volume_that_was_given_to_the_group_of_the_pod_goes_on(server, folder):
    """Answers, their tenants and the checkpoint are found."""

    async def scene(client):
        expected, reading = Reading("g-expected"), Reading("g")
        await client.chat(expected, prompt(1), **sampling(1, 400))
        task = asyncio.create_task(client.chat(reading, prompt(1), **sampling(1, 400)))
        while not reading.text:
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(server.terminate) == 0
        assert reading.finish_reason is None
        for _ in range(2):
            mounted(folder / "torpor")
        server.start()
        await asyncio.to_thread(server.wait_until_ready)
        await task
        assert reading.text == expected.text and reading.taken_up_at
        assert "take up this answer at /torpor/requests/chatcmpl-g of the next one" in reading.errors[0]
        await whole_and_once(client, [reading, expected])
        line = server.log.read_text().split("torpor: directory ")[-1].splitlines()[0]
        assert "g-0" in line and " with 1 request, 1 running answer in the response log" in line

    run(server, scene)


def test_answers_go_on_after_the_ctrl_c_of_a_terminal(server):
    """The engine's processes get it, too."""

    async def scene(client):
        expected, reading = Reading("c-expected"), Reading("c")
        await client.chat(expected, prompt(2), **sampling(2, 400))
        task = asyncio.create_task(client.chat(reading, prompt(2), **sampling(2, 400)))
        while not reading.text:
            await asyncio.sleep(0.05)
        for pid in (server.pid, *descendants(server.pid)):
            os.kill(pid, signal.SIGINT)
        assert await asyncio.to_thread(server.ended) == 0
        assert reading.finish_reason is None
        server.start()
        await asyncio.to_thread(server.wait_until_ready)
        await task
        assert reading.text == expected.text and reading.taken_up_at
        assert "take up this answer at /torpor/requests/chatcmpl-c of the next one" in reading.errors[0]
        await whole_and_once(client, [reading, expected])

    run(server, scene)


def test_a_pause_that_waits_is_over_when_the_answers_are_beside_checkpoints(server):
    async def scene(client):
        reading = Reading("p-0")
        asked = asyncio.create_task(client.chat(reading, prompt(0), **sampling(0, 1000)))
        while not reading.text:
            await asyncio.sleep(0)
        paused = asyncio.create_task(client.post("/pause", mode="wait"))
        while not (await client.http.get("/is_paused")).json()["is_paused"]:
            await asyncio.sleep(0)
        written = await client.post("/torpor/checkpoint")
        assert written["requests"] == 1, "the answer was over before the checkpoint"
        await paused
        [choice] = (await client.whole("p-0"))["choices"]
        assert choice["state"] == "finished", "the pause was over before the answer was"
        await asked
        await client.post("/resume")
        await whole_and_once(client, [reading])

    run(server, scene)


@pytest.mark.long
def test_a_server_starts_with_another_option_where_nothing_runs_or_its_operator_wants_it(server, folder):
    """As an upgrade of vLLM does: the checkpoint fits the engine no more."""

    def newest() -> list:
        return sorted(path.name for path in (folder / "torpor").iterdir() if path.name.startswith("g-"))[-1:]

    async def started_as(rows: int, *options: str) -> None:
        assert await asyncio.to_thread(server.terminate) == 0
        left = newest()
        server.start(["--max-num-seqs", str(rows), "--torpor-checkpoint-interval-seconds", "0", *options])
        await asyncio.to_thread(server.wait_until_ready)
        assert newest() == left

    async def begun(client, reading: Reading) -> asyncio.Task:
        task = asyncio.create_task(client.chat(reading, prompt(1), **sampling(1, 800)))
        while not reading.text:
            await asyncio.sleep(0.01)
        return task

    async def scene(client):
        await started_as(16)
        left = (await client.admin.get("/torpor/state")).json()["left_checkpoint"]
        assert "max_num_seqs: checkpoint has" in left["why"] and left["path"] == str(folder / "torpor")
        expected = await client.chat(Reading("o-expected"), prompt(1), **sampling(1, 800))

        reading = Reading("o-0")
        task = await begun(client, reading)
        await started_as(12, "--torpor-on-wake-error", "recompute")
        await task
        assert reading.text == expected.text and reading.taken_up_at
        await whole_and_once(client, [reading])

        task = await begun(client, Reading("o-1"))
        await started_as(8, "--torpor-on-wake-error", "discard")
        task.cancel()
        [choice] = (await client.whole("o-1"))["choices"]
        assert choice["state"] == "failed" and "max_num_seqs" in choice["stop_reason"]
        assert choice["text"] and expected.text.startswith(choice["text"])
        aside = (await client.admin.get("/torpor/state")).json()["responses"]["set_aside"]
        assert aside.startswith(str(folder / "torpor/answers/set-aside-")) and Path(aside).stat().st_size > 0
        await client.chat(Reading("o-2"), prompt(1), **sampling(1, 8))

    run(server, scene)


@pytest.mark.longer
@pytest.mark.long
def test_two_servers_take_turns_on_one_machine_under_load(server, tiny_model, folder):
    """One sleeps while the other serves; clients of both stream all the time. The second one wakes early, so that it
    falls asleep, and in the end is drained, while KV blocks are still to come."""
    swaps = 20 if IN_PROOF else 8
    count = 2 * swaps  # of requests to each
    other = make_server(
        tiny_model, folder / "second", "--torpor-new-requests", "queue", *DEFERRED_BY_HAND, name="second"
    )
    other.start()
    other.wait_until_ready()

    async def scene(client):
        second = Client(other.url, ALICE)
        pair, ends = [client, second], time.monotonic() + 600
        readings = [[Reading(f"{name}-{n}") for n in range(count)] for name in ("first", "second")]
        expected = [[Reading(f"{name}-expected-{n}") for n in range(count)] for name in ("first", "second")]
        for side in (0, 1):
            await asyncio.gather(
                *(pair[side].chat(expected[side][n], prompt(n), **sampling(n, 80)) for n in range(count))
            )

        async def load(side):
            for start in range(0, count, 4):
                four = range(start, start + 4)
                await asyncio.gather(*(pair[side].chat(readings[side][n], prompt(n), **sampling(n, 80)) for n in four))

        async def woken(side) -> dict:
            return await pair[side].post("/wake_up", early=side == 1)

        await second.post("/sleep")
        loads = [asyncio.create_task(load(side)) for side in (0, 1)]
        awake = 0
        for _ in range(swaps):
            await asyncio.sleep(0.2)
            await pair[awake].post("/sleep")
            awake = 1 - awake
            assert ((await woken(awake))["deferred_blocks"] > 0) == (awake == 1)
            assert time.monotonic() < ends
        await woken(1 - awake)
        await asyncio.gather(*loads)
        for side in (0, 1):
            assert [reading.text for reading in readings[side]] == [reading.text for reading in expected[side]]
            assert {reading.request_id: reading.errors for reading in readings[side] if reading.errors} == {}

        whole, drained = (Reading(f"second-{name}") for name in ("whole", "drained"))
        await second.chat(whole, prompt(0), **sampling(0, 400))
        last = asyncio.create_task(second.chat(drained, prompt(0), **sampling(0, 400)))
        while not drained.text:
            await asyncio.sleep(0.01)
        await second.post("/sleep")
        late = (await woken(1))["deferred_blocks"]
        state = (await second.http.get("/torpor/state")).json()
        assert state["engine"]["deferred"]["pending"] == late > 0 and drained.finish_reason is None
        await restarted(other, other.terminate)
        await last
        assert drained.text == whole.text and drained.taken_up_at
        await second.close()

    try:
        run(server, scene)
    finally:
        other.stop()


def test_a_server_may_wake_by_itself_and_go_on_without_its_clients(tiny_model, folder):
    options = [
        "--torpor-wake-on-request",
        "--torpor-sleep-after-seconds",
        "1",
        "--torpor-sleep-to-disk-after-seconds",
        "1",
        "--torpor-on-disconnect",
        "continue",
        "--torpor-response-log-sync",
        "always",
        "--torpor-tenant-header",
        "X-Tenant",
    ]
    server = make_server(tiny_model, folder / "third", *options, name="third")
    server.start()
    server.wait_until_ready()

    async def scene(client):
        await client.post("/sleep")
        assert (await client.http.get("/torpor/ready")).json() == {"ready": True, "state": "asleep"}
        reading = await client.chat(Reading("wakes"), "Hi", max_tokens=5, temperature=0)
        assert reading.interruptions == 0
        assert not (await client.http.get("/is_sleeping")).json()["is_sleeping"]

        body = {
            "model": "model",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 400,
            "stream": True,
            "ignore_eos": True,
        }
        async with client.http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": "left", "X-Tenant": "a"}
        ) as answer:
            async for _ in answer.aiter_lines():
                break  # and goes
        for _ in range(600):
            whole = await client.http.get("/torpor/requests/left", headers={"X-Tenant": "a"})
            if whole.json()["state"] == "ended":
                break
            await asyncio.sleep(0.1)
        assert whole.json()["choices"][0]["state"] == "finished" and len(whole.json()["choices"][0]["token_ids"]) == 400
        for other in ({"X-Tenant": "b"}, {}):
            assert (await client.http.get("/torpor/requests/left", headers=other)).status_code == 404

        while not (await client.http.get("/torpor/checkpoints")).json()["checkpoints"]:  # idle: to host, then to disk
            await asyncio.sleep(0.1)
        while (state := (await client.http.get("/torpor/state")).json())["state"] != "asleep":
            await asyncio.sleep(0.1)
        assert state["engine"]["checkpoint"] and state["ledger"][0]["tags"]["weights"]["backup_host_bytes"] == 0
        again = await client.chat(Reading("wakes again"), "Hi", max_tokens=5, temperature=0)
        assert again.text == reading.text and again.interruptions == 0
        log = server.log.read_text()
        assert len(re.findall(r"torpor: woken in \d+\.\d\d s for [1-9]\d* requests that waited", log)) >= 2
        metrics = samples((await client.http.get("/metrics")).text)
        assert metrics["torpor_operations_total", of(operation="wake", tier="disk", outcome="ok")] >= 1

    try:
        run(server, scene)
    finally:
        server.stop()
