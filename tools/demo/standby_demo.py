# SPDX-License-Identifier: Apache-2.0
"""`tools/dev demo --standby`: `torpor pair` runs a server and its standby, clients stream, the server's processes are
killed with SIGKILL, the standby goes on. Every answer is compared with one that was never interrupted."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median

import httpx
from ports import free_ports
from screen import MARK, Screen, size
from server_demo import kinds_of
from serving import KEY, START_SECONDS, Client, Reading, Server, ServerEnded, command_of, descendants

TORPOR = os.environ.get("TORPOR_BINARY") or Path(__file__).resolve().parents[2] / "build/release/tools/torpor/torpor"
CHECKPOINT_SECONDS = 2
_REPAINT_SECONDS = 0.2
_LOOK_SECONDS = 0.05
# Requests arrive at other moments in each run and meet in other batches: in float32 that rounds no token otherwise.
OPTIONS = ["--dtype", "float32", "--torpor-checkpoint-interval-seconds", f"{CHECKPOINT_SECONDS}"]


class Pair(Server):
    """`torpor pair`: its clients' port, and a port of each of its two servers."""

    def __init__(self, model: Path, directory: Path):
        super().__init__(model, directory, OPTIONS, name="pair")
        self.own_urls = [f"http://127.0.0.1:{port}" for port in free_ports(2)]

    def _launch(self, command: list[str], out):
        ports = ",".join(url.rpartition(":")[2] for url in self.own_urls)
        words = [str(TORPOR), "pair", "--python", sys.executable, "--own-ports", ports, "--", *command[3:]]
        return super()._launch(words, out)

    def state(self, url: str) -> dict:
        """Return what this server says of itself; nothing: it does not answer."""
        try:
            answer = httpx.get(f"{url}/torpor/state", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
            return answer.json()
        except httpx.TransportError:
            return {}

    def with_standby(self) -> tuple[str, int]:
        """Wait until a standby follows the owner. Return its URL, and the owner's process."""
        deadline = time.monotonic() + 2 * START_SECONDS  # one starts after the other
        while time.monotonic() < deadline and self.running():
            for url in self.own_urls:
                state = self.state(url)
                if state.get("state") == "standby" and state["standby"]["owner"]["state"] == "serves":
                    return url, state["standby"]["owner"]["pid"]
            time.sleep(_LOOK_SECONDS)
        raise ServerEnded(f"no standby follows the owner. The end of {self.log}:\n{self.end_of_log()}")


def device_bytes(state: dict) -> int:
    return sum(tag["physical_bytes"] for rank in state["ledger"] for tag in rank["tags"].values())


async def play(options: argparse.Namespace, prompts: list[str], directory: Path, screen: Screen) -> dict:
    pair = Pair(options.model, directory / "torpor")
    single = Server(options.model, directory / "torpor", OPTIONS, name="single")
    client = Client(pair.url)
    single._port, single.url = pair._port, pair.url
    try:
        screen.stage("1. torpor pair starts a standby, and when that sleeps the server")
        began = time.monotonic()
        pair.start()
        url, _ = await asyncio.to_thread(pair.with_standby)
        await asyncio.to_thread(pair.wait_until_ready)
        states = {each: await asyncio.to_thread(pair.state, each) for each in pair.own_urls}
        both = sum(map(device_bytes, states.values()))
        screen.line(
            f"{pair.url}, {time.monotonic() - began:.0f} s; of device memory the standby has "
            f"{size(device_bytes(states[url]))}, both {size(both)}; log: {pair.log}"
        )

        async def everybody(prefix: str) -> tuple[list[Reading], asyncio.Future]:
            readings = [Reading(f"{prefix}-{number}") for number in range(len(prompts))]
            chats = [
                client.chat(reading, prompt, max_tokens=options.max_tokens, **kinds_of(number, options.seed)[1])
                for number, (reading, prompt) in enumerate(zip(readings, prompts, strict=True))
            ]
            return readings, asyncio.gather(*chats)

        async def until_read(readings: list[Reading], expected: list[Reading], share: float) -> None:
            while sum(len(one.text) for one in readings) < sum(len(one.text) for one in expected) * share:
                screen.chats({str(n): reading.text for n, reading in enumerate(readings)})
                await asyncio.sleep(_REPAINT_SECONDS)

        screen.stage("2. Its clients' answers when nothing happens, to compare with")
        expected, answering = await everybody("undisturbed")
        await answering
        screen.line(f"{len(prompts)} answers")

        rounds, readings = [], list[Reading]()
        before: dict[str, int] = {}
        for number in range(options.kills):
            again = f" ({number + 1} of {options.kills})" if options.kills > 1 else ""
            screen.stage(f"3. The same clients again; kill -9 to all processes of the server{again}")
            standby, owner = await asyncio.to_thread(pair.with_standby)
            readings, answering = await everybody(f"kill-{number}")
            await until_read(readings, expected, options.drain_at)
            before = {str(n): len(one.text) for n, one in enumerate(readings) if one.finish_reason is None}
            family = [owner, *(pid for pid in descendants(owner) if "resource_tracker" not in command_of(pid))]
            killed = time.monotonic()
            for pid in family:
                os.kill(pid, signal.SIGKILL)
            while not answering.done():
                screen.chats({str(n): reading.text for n, reading in enumerate(readings)}, before)
                await asyncio.sleep(_REPAINT_SECONDS)
            await answering
            done = (await asyncio.to_thread(pair.state, standby))["standby"]["failover"]
            rounds.append(figures(readings, expected, killed, done))
            screen.line(
                f"each client had its next token after {rounds[-1]['dark_seconds']:.2f} s; "
                f"{rounds[-1]['identical']} of {len(prompts)} identical"
            )

        screen.stage("4. Without a standby: all is killed, and a new server starts")
        last, answering = await everybody("cold")
        await until_read(last, expected, options.drain_at)
        killed = time.monotonic()
        pair.kill()
        single.start()
        await answering
        cold = max(waits_of(last, killed))
        screen.line(f"each client had its next token after {cold:.1f} s")
        identical_cold = same(last, expected)
    finally:
        await client.close()
        pair.stop()
        single.stop()

    screen.stage(f"5. The answers; {MARK} is where the server was killed")
    screen.answers({str(n): reading.text for n, reading in enumerate(readings)}, before)
    darks = sorted(each["dark_seconds"] for each in rounds)
    names = rounds[0]["parts"]
    return {
        "requests": len(prompts) * (len(rounds) + 1),
        "identical": sum(each["identical"] for each in rounds) + identical_cold,
        "kills": len(rounds),
        "interrupted": sum(each["interrupted"] for each in rounds),
        "dark_seconds": median(darks),
        "dark_seconds_95": darks[math.ceil(0.95 * len(darks)) - 1],
        "first_token_seconds": median(each["first_token_seconds"] for each in rounds),
        "parts": {name: median(each["parts"][name] for each in rounds) for name in names},
        "phases": medians_of([each["phases"] for each in rounds]),
        "cold_seconds": cold,
        "device_bytes_both": both,
        "rounds": rounds,
        "log": str(pair.log),
    }


def medians_of(phases: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """`phases`: of each take-over, the seconds of the engine's phases by part."""
    return {
        part: {name: median(each[part][name] for each in phases) for name in names} for part, names in phases[0].items()
    }


def waits_of(readings: list[Reading], killed: float) -> list[float]:
    """Return for each client that was interrupted the seconds from `killed` to its first token afterwards.

    What a killed server had sent before is read after its end, too; it counts for nothing here.
    """
    waits = [
        reading.times[reading.pieces_before[0]] - killed
        for reading in readings
        if reading.pieces_before and len(reading.times) > reading.pieces_before[0]
    ]
    if not waits:
        raise ServerEnded("the server had sent all answers before it was killed; use a smaller --drain-at")
    return waits


def same(readings: list[Reading], expected: list[Reading]) -> int:
    return sum(one.text == other.text for one, other in zip(readings, expected, strict=True))


def figures(readings: list[Reading], expected: list[Reading], killed: float, done: dict) -> dict:
    """`done`: the standby's report."""
    waits = waits_of(readings, killed)
    parts = {"noticed": done["noticed_at"] - killed} | done["parts"]
    return {
        "dark_seconds": max(waits),
        "first_token_seconds": min(waits),
        "parts": parts | {"next_token": max(waits) - sum(parts.values())},
        "phases": done["phases"],
        "identical": same(readings, expected),
        "interrupted": len(waits),
        "why": done["why"],
    }


def run(options: argparse.Namespace, prompts: list[str], screen: Screen) -> dict:
    return asyncio.run(play(options, prompts, options.dir, screen))


def show(result: dict, screen: Screen) -> None:
    screen.stage("6. What happened")
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in result["parts"].items())
    ninety_five = f", 95th percentile {result['dark_seconds_95']:.2f} s" if result["kills"] > 1 else ""
    screen.table([
        ("identical to undisturbed answers", f"{result['identical']} of {result['requests']}"),
        ("kill -9 until each client had its next token", f"{result['dark_seconds']:.2f} s{ninety_five}"),
        ("", parts),
        ("without a standby", f"{result['cold_seconds']:.1f} s"),
        ("device memory of both", size(result["device_bytes_both"])),
    ])  # fmt: skip
