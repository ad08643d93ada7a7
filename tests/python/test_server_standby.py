# SPDX-License-Identifier: Apache-2.0
"""Two servers of one directory: when the owner was killed or stopped its standby goes on. No request is lost, and no
client gets a token twice."""

import asyncio
import os
import resource
import signal
import time

import httpx
import pytest
from conftest import IN_PROOF
from servers import ALICE, Client, Reading, make_server, of, samples, sampling, until
from serving import ADMIN_KEY, command_of, descendants

pytestmark = pytest.mark.slow

CLIENTS, TOKENS, TERM_SECONDS = 6, 120, 6.0
HEADERS = {"Authorization": f"Bearer {ALICE}"}
SECONDS = 600  # that something may take that happens
TAKE_OVERS = 200 if IN_PROOF else 2


class Pair:
    """A server that owns its directory, and its standby. Whichever ended comes back as the new standby."""

    def __init__(self, model, folder, *options: str):
        self.directory = folder / "torpor"
        options = ("--torpor-checkpoint-interval-seconds", "1", *options)
        options += ("--torpor-ownership-term-seconds", f"{TERM_SECONDS}")
        self.owner, self.standby = (
            make_server(model, self.directory, *options, name=name) for name in ("first", "second")
        )

    def start(self) -> None:
        """The standby first: it sleeps when the owner takes memory."""
        self.start_standby()
        self.owner.start()
        self.owner.wait_until_ready()
        until_state(self.standby, lambda state: state["standby"]["owner"]["state"] == "serves")

    def start_standby(self) -> None:
        self.standby.start(["--torpor-standby-of", str(self.directory)])
        until_state(self.standby, lambda state: state["state"] == "standby")

    def taken_over(self) -> dict:
        """Wait until the standby serves. Return how it took over, once the processes of the owner have ended."""
        state = until_state(self.standby, lambda state: state["state"] == "awake")
        self.owner.stop()
        self.owner, self.standby = self.standby, self.owner
        return state["standby"]["failover"]

    def stop(self) -> None:
        self.standby.stop()
        self.owner.stop()


def until_state(server, condition) -> dict:
    """Ask a server for its state until that is as `condition` wants it. Return it."""
    deadline = time.monotonic() + SECONDS
    while True:
        assert server.running() and time.monotonic() < deadline, server.end_of_log()
        try:
            state = httpx.get(f"{server.url}/torpor/state", headers=HEADERS, timeout=5).json()
            assert state["state"] != "failed", state
            if condition(state):
                return state
        except httpx.TransportError:
            pass
        time.sleep(0.02)


def processes_of(server) -> dict[str, list[int]]:
    """Return the processes that a fault can hit, by the name of a fault."""
    family = descendants(server.pid)
    core = [pid for pid in family if "EngineCore" in command_of(pid)]
    assert core
    return {"front end": [server.pid], "engine core": core, "all": [server.pid, *core]}


FULL_DISK = "all, after the disk was full"
FAULTS = [
    (FULL_DISK, signal.SIGKILL),
    ("engine core", signal.SIGSTOP),
    ("front end", signal.SIGKILL),
    ("engine core", signal.SIGKILL),
    ("all", signal.SIGKILL),
    ("front end", signal.SIGSTOP),
    ("all", signal.SIGSTOP),
]


@pytest.fixture(scope="module")
def pair(tiny_model, tmp_path_factory):
    pair = Pair(tiny_model, tmp_path_factory.mktemp("standby"))
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


async def everybody(clients: Client, prefix: str) -> tuple[list[Reading], asyncio.Future]:
    readings = [Reading(f"{prefix}-{number}") for number in range(CLIENTS)]
    chats = [
        clients.chat(reading, f"Write note {number}.", **sampling(number, TOKENS))
        for number, reading in enumerate(readings)
    ]
    return readings, asyncio.gather(*chats)


async def hit(pair: Pair, expected: list[str], prefix: str, what: str, fault: signal.Signals) -> dict:
    """Let the owner be hit in the middle of its answers. Return how its standby took over."""
    client = Client(pair.owner.url, ALICE)
    client.also_at.append(pair.standby.url)
    try:
        readings, answering = await everybody(client, prefix)

        async def until_read(share: float) -> None:
            characters = share * sum(map(len, expected))
            await until(lambda: sum(len(reading.text) for reading in readings) >= characters, SECONDS)

        await until_read(0.2)
        victims = processes_of(pair.owner)["all" if what == FULL_DISK else what]
        if what == FULL_DISK:  # no file grows any more, as on a disk that is full
            for pid in victims:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            failed = ("responses", "log_failures")
            await asyncio.to_thread(until_state, pair.owner, lambda state: state[failed[0]][failed[1]] > 0)
        await until_read(0.4)
        for pid in victims:
            os.kill(pid, fault)
        how = await asyncio.to_thread(pair.taken_over)
        await answering
        assert [reading.text for reading in readings] == expected
        assert any(reading.taken_up_at for reading in readings)
        for reading in readings:
            url = f"{pair.owner.url}/torpor/requests/{reading.request_id}"
            whole = await asyncio.to_thread(httpx.get, url, headers=HEADERS, timeout=SECONDS)
            choice = whole.json()["choices"][0]
            assert (choice["text"], choice["state"]) == (reading.text, "finished")
        return how
    finally:
        await client.close()


@pytest.mark.longer
def test_a_standby_goes_on_whatever_ends_or_stops_the_owner(pair):
    async def scene():
        client = Client(pair.owner.url, ALICE)
        readings, answering = await everybody(client, "undisturbed")
        await answering
        await client.close()
        expected = [reading.text for reading in readings]
        for number in range(TAKE_OVERS):
            what, fault = FAULTS[number % len(FAULTS)]
            owner = pair.owner.pid
            how = await hit(pair, expected, f"hit-{number}", what, fault)
            assert how["process"] == owner
            word = (
                "has ended"
                if fault == signal.SIGKILL
                else "is stopped"
                if what != "front end"
                else f"for {TERM_SECONDS:g} s"
            )
            assert word in how["why"], how
            assert how["seconds"] == pytest.approx(sum(how["parts"].values()))
            assert {"restore", "reconnect"} <= how["phases"]["memory_woken"].keys()
            for part, phases in how["phases"].items():
                assert sum(phases.values()) <= how["parts"][part]
            print("took over:", what, fault.name, how)
            await asyncio.to_thread(pair.start_standby)

    asyncio.run(scene())


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


def switched(pair: Pair) -> httpx.Response:
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return httpx.post(f"{pair.owner.url}/torpor/switch", headers=admin, timeout=SECONDS)


def test_an_owner_hands_over_and_one_whose_standby_cannot_go_on_serves_on(pair):
    """pytest -s prints the pause in its parts."""

    async def scene():
        client = Client(pair.owner.url, ALICE)
        readings, answering = await everybody(client, "before-a-switch")
        await answering
        expected = [reading.text for reading in readings]
        characters = sum(map(len, expected)) * 0.1

        readings, answering = await everybody(client, "refused")
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
        readings, answering = await everybody(client, "handed-over")
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
