# SPDX-License-Identifier: Apache-2.0
"""Two servers of one directory: when the owner was killed or stopped its standby goes on. No request is lost, and no
client gets a token twice."""

import asyncio
import math
import os
import random
import resource
import signal
import time
from dataclasses import dataclass, field
from statistics import median

import httpx
import pytest
from conftest import IN_PROOF
from servers import ALICE, Client, make_server, of, samples, until
from serving import ADMIN_KEY, command_of, descendants
from standbys import (
    CLIENTS, HEADERS, SECONDS, TERM_SECONDS, TOKENS, TOKENS_OVER_A_SWITCH, Pair, everybody, running, switched,
    until_state,
)  # fmt: skip

pytestmark = pytest.mark.slow

TOKENS_OF_DEMO = 40  # with the demo's model
# In tools/dev proof 170 with the tiny model, and 30 with the demo's.
TAKE_OVERS = int(os.environ.get("TORPOR_TAKE_OVERS", "170" if IN_PROOF else "2"))
MOST_IN_A_TEST = 30  # take-overs: a test has a time limit
TAKE_OVERS_OF_DEMO = int(os.environ.get("TORPOR_TAKE_OVERS_OF_DEMO", "30"))
SEED = int(os.environ.get("TORPOR_TAKE_OVERS_SEED", "1"))  # of phases and faults


def processes_of(server) -> dict[str, list[int]]:
    """Return the processes that a fault can hit, by the name of a fault. One that begins or ends meanwhile may hide
    others."""
    commands = {pid: command_of(pid) for pid in descendants(server.pid)}
    core, worker = ([pid for pid, command in commands.items() if word in command] for word in ("EngineCore", "Worker"))
    return {"front end": [server.pid], "engine core": core, "worker": worker, "all": [server.pid, *core, *worker]}


@dataclass(frozen=True)
class Fault:
    what: str  # of processes_of()
    signal: signal.Signals
    full_disk: bool = False  # no file of the owner grows any more, some time before

    def __str__(self) -> str:
        return f"{self.signal.name} of {self.what}{', the disk full' if self.full_disk else ''}"


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS = [
    Fault("all", KILL, full_disk=True),
    Fault("engine core", STOP),
    Fault("front end", KILL),
    Fault("engine core", KILL),
    Fault("all", KILL),
    Fault("front end", STOP),
    Fault("all", STOP),
    Fault("front end", KILL, full_disk=True),
    Fault("worker", KILL),
    Fault("worker", STOP),
]


def faults(rounds: int, chance: random.Random) -> list[Fault]:
    """Return faults of so many rounds: each kind as often as any other, in an order of their own in each turn."""
    if not IN_PROOF:
        return FAULTS[:rounds]
    drawn = list[Fault]()
    while len(drawn) < rounds:
        drawn += chance.sample(FAULTS, len(FAULTS))
    return drawn[:rounds]


@dataclass
class TakeOvers:
    """What became of all requests."""

    requests: int = 0
    interrupted: int = 0
    lost: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)  # a token that is missing, or there twice, makes another text
    by_fault: dict[str, list[float]] = field(default_factory=dict)  # seconds from what was noticed until it served

    def __str__(self) -> str:
        seconds = sorted(one for each in self.by_fault.values() for one in each)
        kinds = "; ".join(
            f"{fault}: {len(each)}, {median(each):.2f} s" for fault, each in sorted(self.by_fault.items())
        )
        return (
            f"{len(seconds)} take-overs of {self.requests} requests, {self.interrupted} of them interrupted: "
            f"{len(self.lost)} lost, {len(self.differing)} with other text; {median(seconds):.2f} s at the median, "
            f"{seconds[math.ceil(0.95 * len(seconds)) - 1]:.2f} s at the 95th percentile ({kinds})"
        )


@pytest.fixture(scope="module")
def pair(tiny_model, tmp_path_factory):
    yield from running(Pair(tiny_model, tmp_path_factory.mktemp("standby")))


async def hit(
    pair: Pair, expected: list[str], prefix: str, fault: Fault, at: tuple[float, float], tokens: int, seen: TakeOvers
) -> dict:
    """Let the owner be hit in the middle of its answers. Return how its standby took over.

    at: the shares of all text that clients have read when the disk gets full, and when the signal comes.
    """
    client = Client(pair.owner.url, ALICE)
    client.also_at.append(pair.standby.url)
    try:
        readings, answering = await everybody(client, prefix, tokens)

        async def until_read(share: float) -> None:
            characters = share * sum(map(len, expected))
            await until(lambda: sum(len(reading.text) for reading in readings) >= characters, SECONDS)

        await until_read(at[0])
        processes: dict[str, list[int]] = {}

        def are_found() -> bool:
            processes.update(processes_of(pair.owner))
            return all(processes.values())

        await until(are_found, SECONDS)
        if fault.full_disk:  # no file grows any more, as on a disk that is full
            for pid in processes["all"]:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            failed = ("responses", "log_failures")
            await asyncio.to_thread(until_state, pair.owner, lambda state: state[failed[0]][failed[1]] > 0)
        await until_read(at[1])
        for pid in processes[fault.what]:
            os.kill(pid, fault.signal)
        how = await asyncio.to_thread(pair.taken_over)
        await answering
        seen.requests += len(readings)
        seen.interrupted += sum(bool(reading.taken_up_at) for reading in readings)
        seen.differing += [
            reading.request_id for reading, text in zip(readings, expected, strict=True) if reading.text != text
        ]
        for reading in readings:
            # After a full disk the standby goes on with what its client has read to the end already.
            url = f"{pair.owner.url}/torpor/requests/{reading.request_id}"
            whole = await asyncio.to_thread(httpx.get, url, headers=HEADERS, timeout=SECONDS)
            deadline = time.monotonic() + SECONDS
            while '"state":"running"' in whole.text and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
                whole = await asyncio.to_thread(httpx.get, url, headers=HEADERS, timeout=SECONDS)
            choice = whole.json()["choices"][0] if whole.status_code == 200 else {}
            if (choice.get("text"), choice.get("state")) != (reading.text, "finished"):
                seen.lost.append(f"{reading.request_id}: {whole.text}")
        return how
    finally:
        await client.close()


async def take_overs(pair: Pair, rounds: int, tokens: int, part: int = 0) -> TakeOvers:
    """Let owners be hit, one after the other. Who was hit comes back as the standby of the one that took over."""
    before = await asyncio.to_thread(until_state, pair.owner, lambda state: state["last_checkpoint"])
    client = Client(pair.owner.url, ALICE)
    readings, answering = await everybody(client, f"undisturbed-{tokens}-{part}", tokens)
    await answering
    await client.close()
    # A fast machine answers before the next checkpoint is due: without one, no block comes behind a take-over.
    path = before["last_checkpoint"]["path"]
    await asyncio.to_thread(until_state, pair.owner, lambda state: state["last_checkpoint"]["path"] != path)
    expected = [reading.text for reading in readings]
    seen, chance = TakeOvers(), random.Random(SEED + part)
    for number, fault in enumerate(faults(rounds, chance)):
        if number > 0:
            await asyncio.to_thread(pair.start_standby)
        await asyncio.to_thread(
            until_state, pair.standby, lambda state, pid=pair.owner.pid: state["standby"]["owner"]["pid"] == pid
        )
        latest = 0.3 if fault.full_disk else 0.6  # answers go on until the log has failed
        owner, first = pair.owner.pid, chance.uniform(0.05, latest) if IN_PROOF else 0.2
        at = first, chance.uniform(first, 0.7) if IN_PROOF else 0.4
        how = await hit(pair, expected, f"hit-{tokens}-{part}-{number}", fault, at, tokens, seen)
        print(f"took over, {number + 1}: {fault}, at {at[0]:.2f} and {at[1]:.2f}: {how}", flush=True)
        assert how["process"] == owner
        stops = fault.signal == signal.SIGSTOP
        word = "has ended" if not stops else f"for {TERM_SECONDS:g} s" if fault.what == "front end" else "is stopped"
        assert word in how["why"], how
        assert how["seconds"] == pytest.approx(sum(how["parts"].values()))
        assert {"restore", "reconnect"} <= how["phases"]["memory_woken"].keys()
        for part, phases in how["phases"].items():
            assert sum(phases.values()) <= how["parts"][part]
        assert not seen.lost and not seen.differing, seen
        seen.by_fault.setdefault(str(fault), []).append(how["seconds"])
        # Prefixes of requests that have ended came behind the take-over.
        state = await asyncio.to_thread(
            until_state, pair.owner, lambda state: state["engine"]["deferred"]["pending"] == 0
        )
        assert state["engine"]["deferred"]["arrived"] + state["engine"]["deferred"]["skipped"] > 0
    print(seen, flush=True)
    return seen


@pytest.mark.longer
@pytest.mark.parametrize("part", range(math.ceil(TAKE_OVERS / MOST_IN_A_TEST)))
def test_a_standby_goes_on_whatever_ends_or_stops_the_owner(pair, part):
    """pytest -s prints each take-over, and their sum."""
    rounds = min(MOST_IN_A_TEST, TAKE_OVERS - part * MOST_IN_A_TEST)
    seen = asyncio.run(take_overs(pair, rounds, TOKENS, part))
    assert seen.requests == rounds * CLIENTS and seen.interrupted > seen.requests / 4
    pair.start_standby()


def test_a_standby_refuses_requests_and_operations_and_says_what_it_follows(pair):
    state = until_state(pair.standby, lambda state: state["standby"]["owner"]["state"] == "serves")
    assert state["standby"]["owner"]["pid"] == pair.owner.pid
    assert "attached" not in state["engine"]["tags"].values()
    chat = {"model": "model", "messages": [{"role": "user", "content": "Hello"}]}
    with httpx.Client(base_url=pair.standby.url, headers=HEADERS, timeout=SECONDS) as client:
        refused = client.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 503 and "another one serves" in refused.text and "Retry-After" in refused.headers
        assert client.get("/health").status_code == 200
        ready = client.get("/torpor/ready")
        assert ready.status_code == 503 and ready.json()["state"] == "standby"
        assert client.get("/torpor/requests/any").status_code == 503
        counted = samples(client.get("/metrics").text)
        assert counted["torpor_state", of(state="standby")] == 1
    as_admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=pair.standby.url, headers=as_admin, timeout=SECONDS) as admin:
        for route in ("/sleep", "/wake_up", "/torpor/checkpoint"):
            refused = admin.post(route)
            assert refused.status_code == 409 and "standby" in refused.text, refused.text


def test_an_owner_hands_over_and_one_whose_standby_cannot_go_on_serves_on(pair):
    """pytest -s prints the pause in its parts."""

    async def scene():
        client = Client(pair.owner.url, ALICE)
        readings, answering = await everybody(client, "before-a-switch", TOKENS_OVER_A_SWITCH)
        await answering
        expected = [reading.text for reading in readings]
        characters = sum(map(len, expected)) * 0.1

        readings, answering = await everybody(client, "refused", TOKENS_OVER_A_SWITCH)
        await until(lambda: sum(len(reading.text) for reading in readings) >= characters, SECONDS)
        # The standby cannot write the log, so it fails with the directory in its hands.
        resource.prlimit(pair.standby.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        refused = await asyncio.to_thread(switched, pair)
        assert refused.status_code == 500 and "this server serves on" in refused.text, refused.text
        await answering
        assert [reading.text for reading in readings] == expected
        assert not any(reading.interruptions for reading in readings)  # their streams stayed open
        pair.standby.stop()
        refused = await asyncio.to_thread(switched, pair)
        assert refused.status_code == 409 and "the last standby has ended" in refused.text, refused.text

        await asyncio.to_thread(pair.start_standby)
        await asyncio.to_thread(
            until_state, pair.standby, lambda state: state["standby"]["owner"]["pid"] == pair.owner.pid
        )
        client.also_at.append(pair.standby.url)
        readings, answering = await everybody(client, "handed-over", TOKENS_OVER_A_SWITCH)
        await until(lambda: sum(len(reading.text) for reading in readings) >= characters, SECONDS)
        handed = await asyncio.to_thread(switched, pair)
        assert handed.status_code == 200, handed.text
        print("handed over:", handed.json())
        assert handed.json()["requests"] == CLIENTS and handed.json()["kv"] == "restored"
        assert await asyncio.to_thread(pair.owner.ended, SECONDS) == 0
        how = await asyncio.to_thread(pair.taken_over)
        assert how["why"] == "it handed over"
        await answering
        assert [reading.text for reading in readings] == expected
        assert not any(reading.begun_again for reading in readings)
        assert any(reading.taken_up_at for reading in readings)
        await client.close()

    asyncio.run(scene())


async def switch_in_the_middle(pair: Pair, tokens: int) -> dict:
    """Let the owner hand over in the middle of its answers. Return what it says of that."""
    client = Client(pair.owner.url, ALICE)
    try:
        readings, answering = await everybody(client, "before", tokens)
        await answering
        expected = [reading.text for reading in readings]
        client.also_at.append(pair.standby.url)
        readings, answering = await everybody(client, "handed-over", tokens)
        characters = sum(map(len, expected)) * 0.1
        await until(lambda: sum(len(reading.text) for reading in readings) >= characters, SECONDS)
        handed = await asyncio.to_thread(switched, pair)
        assert handed.status_code == 200, handed.text
        print("handed over:", handed.json(), flush=True)
        assert handed.json()["requests"] == CLIENTS
        await answering
        assert [reading.text for reading in readings] == expected
        assert not any(reading.begun_again for reading in readings)
        return handed.json()
    finally:
        await client.close()


@pytest.mark.long
def test_with_the_demos_model_too(real_model, tmp_path_factory):
    """pytest -s prints each take-over, their sum, and a switch in its parts."""
    for pair in running(Pair(real_model, tmp_path_factory.mktemp("demo"))):
        assert asyncio.run(switch_in_the_middle(pair, TOKENS_OF_DEMO))["kv"] == "restored"
        pair.taken_over()
        pair.start_standby()
        seen = asyncio.run(take_overs(pair, TAKE_OVERS_OF_DEMO, TOKENS_OF_DEMO))
        assert seen.requests == TAKE_OVERS_OF_DEMO * CLIENTS and seen.interrupted > seen.requests / 4


@pytest.mark.long
def test_a_standby_with_another_engine_takes_over_the_kv(tiny_model, tmp_path):
    """As one of another release of vLLM does (tests/tools/test_switch_releases.py)."""
    options = ("--torpor-on-wake-error", "recompute", "--torpor-sessions")
    pair = Pair(tiny_model, tmp_path, *options)
    other_engine = ("--max-num-batched-tokens", "256")
    pair.standby = make_server(tiny_model, pair.directory, *options, *other_engine, name="other-engine")
    for _ in running(pair):
        assert asyncio.run(switch_in_the_middle(pair, TOKENS_OVER_A_SWITCH))["kv"] == "restored", (
            pair.standby.end_of_log(60)
        )
        metrics = samples(httpx.get(f"{pair.standby.url}/metrics", timeout=SECONDS).text)
        assert metrics["torpor_start_requests", of(result="restored")] == CLIENTS
