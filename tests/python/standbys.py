# SPDX-License-Identifier: Apache-2.0
"""A server that owns its directory, its standby, and clients: what tests of standbys share."""

import asyncio
import time

import httpx
from servers import ALICE, Client, Reading, make_server, sampling
from serving import ADMIN_KEY

CLIENTS, TOKENS, TERM_SECONDS = 6, 120, 6.0
TOKENS_OVER_A_SWITCH = 4 * TOKENS  # so that no answer ends while the standby is asked
HEADERS = {"Authorization": f"Bearer {ALICE}"}
SECONDS = 600  # that something may take that happens


class Pair:
    """A server that owns its directory, and its standby. Whichever ended comes back as the new standby."""

    def __init__(self, model, folder, *options: str, environment: dict[str, str] | None = None):
        self.directory = folder / "torpor"
        options = ("--torpor-checkpoint-interval-seconds", "1", *options)
        options += ("--torpor-ownership-term-seconds", f"{TERM_SECONDS}")
        self.owner, self.standby = (
            make_server(model, self.directory, *options, name=name, environment=environment)
            for name in ("first", "second")
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


def running(pair: Pair):
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


async def everybody(clients: Client, prefix: str, tokens: int = TOKENS) -> tuple[list[Reading], asyncio.Future]:
    readings = [Reading(f"{prefix}-{number}") for number in range(CLIENTS)]
    chats = [
        clients.chat(reading, f"Write note {number}.", **sampling(number, tokens))
        for number, reading in enumerate(readings)
    ]
    return readings, asyncio.gather(*chats)


def switched(pair: Pair) -> httpx.Response:
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return httpx.post(f"{pair.owner.url}/torpor/switch", headers=admin, timeout=SECONDS)
