#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A swap of two servers (POST /swap), beside a sleep of one and then a wake of the other.

Both serve the model, each with a stream that goes on whenever its server is awake. In turn one falls asleep and then
the other wakes, or both at once. Seconds from the first call to the last answer. Ceiling: the same bytes copied by all
cores, what goes and what comes at once, beside one after the other: where copies to the device and back share the
memory of the host, as they do without a GPU, both at once take no less.

Each round runs every contestant once, after one that only warms; medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
from engine_process import best_dtype
from serving import Client, Reading, Server, folder_for_logs

from bench_options import count

KINDS = ("apart", "swap")
PIECE = 8 << 20


class Copies:
    """Of so many bytes that go and that come, by all cores."""

    def __init__(self, goes: int, comes: int):
        import numpy

        self._numpy = numpy
        self._ways = [self._pieces(goes), self._pieces(comes)]
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self.seconds(False)  # brings the memory up

    def _pieces(self, total: int) -> list[tuple]:
        source, target = (self._numpy.ones(total, self._numpy.uint8) for _ in range(2))
        return [(target[at : at + PIECE], source[at : at + PIECE]) for at in range(0, total, PIECE)]

    def seconds(self, at_once: bool) -> float:
        began = time.monotonic()
        if at_once:
            mixed = [piece for pair in zip(*self._ways, strict=False) for piece in pair]
            rest = max(self._ways, key=len)[min(map(len, self._ways)) :]
            self._copy(mixed + rest)
        else:
            for way in self._ways:
                self._copy(way)
        return time.monotonic() - began

    def _copy(self, pieces: list[tuple]) -> None:
        list(self._pool.map(lambda piece: self._numpy.copyto(*piece), pieces))


async def stream(client: Client, name: str) -> None:
    for turn in range(10**6):
        await client.chat(
            Reading(f"{name}-{turn}"), "Count up.", max_tokens=1500, temperature=0, extra_body={"ignore_eos": True}
        )


async def exchanged(kind: str, goes: Client, comes: Client) -> tuple[float, dict, dict]:
    began = time.monotonic()
    if kind == "swap":
        report = await goes.post("/swap", to=comes.url)
        slept, woken = report["slept"], report["woken"]
    else:
        slept, woken = await goes.post("/sleep"), await comes.post("/wake_up")
    return time.monotonic() - began, slept, woken


async def play(options: argparse.Namespace, folder: Path) -> dict:
    how = ["--dtype", best_dtype(), "--torpor-cpu-linear", options.cpu_linear]
    servers = [Server(options.model, folder / name, how, name=name) for name in ("first", "second")]
    try:
        for server in servers:
            server.start()
        for server in servers:
            await asyncio.to_thread(server.wait_until_ready)
        awake, asleep = clients = [Client(server.url) for server in servers]
        streams = [asyncio.create_task(stream(client, f"s{n}")) for n, client in enumerate(clients)]
        await asyncio.sleep(2)
        await asleep.post("/sleep")
        seconds: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "copies apart", "copies at once")}
        copies = None
        for number in range(options.rounds + 1):
            for kind in KINDS:
                await asyncio.sleep(options.pause)
                took, slept, woken = await exchanged(kind, awake, asleep)
                awake, asleep = asleep, awake
                seconds[kind].append(took)
            copies = copies or Copies(slept["saved_bytes"], woken["restored_bytes"])
            for kind, at_once in (("copies apart", False), ("copies at once", True)):
                seconds[kind].append(await asyncio.to_thread(copies.seconds, at_once))
            if number == 0:
                seconds = {kind: [] for kind in seconds}
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for client in clients:
            await client.close()
    finally:
        for server in servers:
            server.stop()
    middle = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "rounds": options.rounds,
        "cpu_linear": options.cpu_linear,
        "bytes_that_go": slept["saved_bytes"],
        "bytes_that_come": woken["restored_bytes"],
        "one_after_the_other_seconds": middle["apart"],
        "swap_seconds": middle["swap"],
        "swap_of_one_after_the_other": middle["swap"] / middle["apart"],
        "copies_one_after_the_other_seconds": middle["copies apart"],
        "copies_at_once_seconds": middle["copies at once"],
        "copies_at_once_of_one_after_the_other": middle["copies at once"] / middle["copies apart"],
        "phases": {"slept": slept["phases"], "woken": woken["phases"]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of serving between two exchanges")
    parser.add_argument(
        "--cpu-linear", choices=("plain", "packed"), default="plain", help="packed: they are packed again after a wake"
    )
    parser.add_argument("--model", type=Path, default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.model is None:
        parser.error("--model (or TORPOR_TEST_MODEL) names a folder with a model")
    with folder_for_logs("torpor-bench-") as folder:
        result = asyncio.run(play(options, folder))
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    mb = [result[name] / 1e6 for name in ("bytes_that_go", "bytes_that_come")]
    print(f"two servers, {mb[0]:.0f} MB go and {mb[1]:.0f} MB come; medians of {options.rounds} rounds")
    print(
        f"  one after the other {result['one_after_the_other_seconds']:.3f} s   swap {result['swap_seconds']:.3f} s   "
        f"ratio {result['swap_of_one_after_the_other']:.2f}"
    )
    print(
        f"  copies alone: one after the other {result['copies_one_after_the_other_seconds']:.3f} s   at once "
        f"{result['copies_at_once_seconds']:.3f} s   ratio {result['copies_at_once_of_one_after_the_other']:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
