#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What clients of a server notice: the pause over a sleep and over a checkpoint, and tokens a second.

pause:  last piece of text before to the first after, median over clients, at 1, 8 and 32 streams; for a sleep to host
        with the wake at once, and for a checkpoint while serving. Baseline: the usual time between two pieces. Ceiling:
        what the operations themselves took, by their own reports.
tokens: a second, over 16 endless streams, with a checkpoint every 5 s beside without (baseline), and beside vLLM's own
        server without torpor, which records no answers (ceiling).

Each round runs every contestant once, after a warm-up; medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
from engine_process import best_dtype
from serving import Client, Reading, Server

from bench_options import count

STREAMS = (1, 8, 32)
LOAD = 16
WINDOW_SECONDS = 11.0  # two checkpoints
EVERY_SECONDS = 5.0


class Stock(Server):
    """vLLM's own server, for the same calls of the clients."""

    def __init__(self, model: Path, directory: Path):
        super().__init__(model, directory, ["--dtype", best_dtype()], {"VLLM_PLUGINS": ""}, name="stock")
        torpor = self._command.index("--torpor-checkpoint-dir")
        del self._command[torpor : torpor + 2]
        self._command[1:4] = ["-m", "vllm.entrypoints.openai.api_server", "--model", self._command[3]]


class Load:
    """Streams that never end."""

    def __init__(self, client: Client, count: int, name: str):
        self.readings: list[Reading] = []
        self._client, self._name = client, name
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(count)]

    async def _stream(self, number: int) -> None:
        for turn in range(10**6):
            reading = Reading(f"{self._name}-{number}-{turn}")
            self.readings.append(reading)
            await self._client.chat(
                reading, f"Count up from {number}.", max_tokens=700, temperature=0, extra_body={"ignore_eos": True}
            )

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.5)  # for the aborts


async def pauses(client: Client, streams: int, rounds: int) -> dict[str, dict]:
    load = Load(client, streams, f"pause-{streams}-{time.time()}")
    while not all(reading.text for reading in load.readings):
        await asyncio.sleep(0.05)
    gaps: dict[str, list[float]] = {"sleep": [], "checkpoint": []}
    own: dict[str, list[float]] = {"sleep": [], "checkpoint": []}
    usual = []
    for number in range(rounds + 1):
        for kind in gaps:
            await asyncio.sleep(1)
            moment = time.monotonic()
            if kind == "sleep":
                seconds = (await client.post("/sleep"))["seconds"] + (await client.post("/wake_up"))["seconds"]
            else:
                seconds = (await client.post("/torpor/checkpoint"))["seconds"]
            await asyncio.sleep(1)
            if number == 0:
                continue  # the first one warms
            own[kind].append(seconds)
            gaps[kind].append(
                statistics.median(
                    longest_gap(reading, moment - 0.1, moment + seconds + 0.9)
                    for reading in load.readings
                    if reading.times and reading.finish_reason is None
                )
            )
        usual += [b - a for reading in load.readings for a, b in pairwise(reading.times)]
    await load.stop()
    return {
        kind: {
            "pause_seconds": statistics.median(gaps[kind]),
            "own_seconds": statistics.median(own[kind]),
            "usual_gap_seconds": statistics.median(usual),
        }
        for kind in gaps
    }


def longest_gap(reading: Reading, start: float, end: float) -> float:
    """The longest time between two pieces of text that overlaps [start, end]."""
    return max((b - a for a, b in pairwise(reading.times) if b >= start and a <= end), default=0.0)


async def tokens_in(client: Client, checkpoints: bool) -> float:
    """A second, over one window."""
    before, began = await generated(client), time.monotonic()
    while (left := WINDOW_SECONDS - (time.monotonic() - began)) > 0:
        await asyncio.sleep(min(EVERY_SECONDS, left))
        if checkpoints and time.monotonic() - began < WINDOW_SECONDS:
            await client.post("/torpor/checkpoint")
    return (await generated(client) - before) / (time.monotonic() - began)


async def generated(client: Client) -> float:
    text = (await client.http.get("/metrics")).text
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")
    )


async def throughput(server: Server, stock: Server, rounds: int) -> dict[str, float]:
    rates: dict[str, list[float]] = {"with checkpoints": [], "without": [], "stock": []}
    for number in range(rounds + 1):
        for name, which, checkpoints in (
            ("stock", stock, False),
            ("without", server, False),
            ("with checkpoints", server, True),
        ):
            client = Client(which.url)
            load = Load(client, LOAD, f"load-{name}-{time.time()}")
            await asyncio.sleep(2)
            rate = await tokens_in(client, checkpoints)
            await load.stop()
            await client.close()
            if number > 0:
                rates[name].append(rate)
    return {name: statistics.median(values) for name, values in rates.items()}


async def play(options: argparse.Namespace) -> dict:
    directory = Path(tempfile.mkdtemp(prefix="torpor-bench-"))
    server, stock = (
        Server(options.model, directory / "torpor", ["--dtype", best_dtype()], {"TORPOR_INCREMENTAL": "1"}),
        Stock(options.model, directory / "none"),
    )
    try:
        for each in (server, stock):
            each.start()
        for each in (server, stock):
            await asyncio.to_thread(each.wait_until_ready)
        client = Client(server.url)
        result = {
            "rounds": options.rounds,
            "pauses": {streams: await pauses(client, streams, options.rounds) for streams in STREAMS},
        }
        await client.close()
        return result | {"tokens_per_second": await throughput(server, stock, options.rounds)}
    finally:
        server.stop()
        stock.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--model", type=Path, default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.model is None:
        parser.error("--model (or TORPOR_TEST_MODEL) names a folder with a model")
    result = asyncio.run(play(options))
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"pause seen by clients, median of {options.rounds} rounds "
        "(usual: between two pieces of text; own: what the operations report)"
    )
    for streams, kinds in result["pauses"].items():
        for kind, item in kinds.items():
            name = "sleep to host and wake" if kind == "sleep" else "checkpoint while serving"
            print(
                f"  {streams:>3} streams  {name:<25} {item['pause_seconds']:.3f} s   "
                f"usual {item['usual_gap_seconds']:.3f} s   own {item['own_seconds']:.3f} s   "
                f"pause/own {item['pause_seconds'] / item['own_seconds']:.2f}"
            )
    rates = result["tokens_per_second"]
    print(f"tokens a second, {LOAD} streams")
    print(
        f"  with a checkpoint every {EVERY_SECONDS:g} s {rates['with checkpoints']:.0f}   "
        f"without {rates['without']:.0f} (ratio {rates['with checkpoints'] / rates['without']:.2f})   "
        f"vLLM's own server {rates['stock']:.0f} (ratio {rates['with checkpoints'] / rates['stock']:.2f}, "
        f"without checkpoints {rates['without'] / rates['stock']:.2f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
