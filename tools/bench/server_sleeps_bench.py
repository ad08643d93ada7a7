#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A server's sleep to host and its wake, beside the same two calls of an engine in one process with its caller.

Both run the same requests, on one core, as vLLM's server does on two: it leaves one to its front end. Seconds from the
call to its answer, and what the operation says that it took (own). The server's call goes over HTTP, through its front
end to the engine core and its worker, and first waits for the step that is under way; the other's (baseline, and
ceiling: there is nothing in between) is made between two steps.

The seconds of the two are not compared themselves: where memory comes from the system, as it does for each sleep
without a GPU, some cost several times as much as others, on either side. What a call takes beyond the operation is.

Each round runs both, after one that only warms; medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
from engine_process import best_dtype
from serving import Client, Reading, Server, folder_for_logs

from bench_options import count

STREAMS = 8
PROMPT = "Count up from {}. " + "One, two, three, four, five, six, seven, eight, nine, ten. " * 30
ANSWER_TOKENS = 1200
STEPS_BETWEEN = 10
ONE_CORE = {"VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


def other_process(options: argparse.Namespace) -> None:
    """Sleeps and wakes once for each line of standard input, and answers with what it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own words
    os.environ |= ONE_CORE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as directory:
        llm = LLM(
            str(options.model), dtype=best_dtype(), enforce_eager=True, block_size=32, max_model_len=2048,
            max_num_seqs=64, max_num_batched_tokens=512, additional_config={"torpor": {"checkpoint_dir": directory}},
        )  # fmt: skip
        number = 0
        for _ in sys.stdin:
            engine = llm.llm_engine
            while engine.get_num_unfinished_requests() < STREAMS:
                params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
                engine.add_request(str(number), PROMPT.format(number % STREAMS), params)
                number += 1
            for _ in range(2 * STREAMS + STEPS_BETWEEN):
                engine.step()
            began = time.monotonic()
            slept = llm.sleep(level=1, preserve_state=True)
            asleep = time.monotonic()
            woken = llm.wake_up()
            ended = time.monotonic()
            print(json.dumps(times(began, asleep, ended, slept, woken)), file=answers, flush=True)


def times(began: float, asleep: float, ended: float, slept: dict, woken: dict) -> dict[str, float]:
    found = {"bytes": slept["saved_bytes"] + slept["reused_bytes"]}
    for way, seconds, report in (("sleep", asleep - began, slept), ("wake", ended - asleep, woken)):
        found |= {way: seconds, f"{way}_own": report["seconds"], f"{way}_of_own": seconds / report["seconds"]}
    return found


class OneProcess:
    def __init__(self, options: argparse.Namespace, log):
        command = [sys.executable, __file__, "--model", str(options.model), "--one-process"]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1)

    def once(self) -> dict[str, float]:
        self._child.stdin.write("\n")
        return json.loads(self._child.stdout.readline())

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()


async def of_server(client: Client, turn: int) -> dict[str, float]:
    readings = [Reading(f"{turn}-{number}") for number in range(STREAMS)]
    sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
    streams = [
        asyncio.create_task(client.chat(reading, PROMPT.format(number), **sampling))
        for number, reading in enumerate(readings)
    ]
    while not all(len(reading.times) > STEPS_BETWEEN for reading in readings):
        await asyncio.sleep(0.05)
    began = time.monotonic()
    slept = await client.post("/sleep")
    asleep = time.monotonic()
    woken = await client.post("/wake_up")
    ended = time.monotonic()
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await asyncio.sleep(0.5)  # for the aborts
    gaps = [b - a for reading in readings for a, b in pairwise(reading.times) if b < began]
    return times(began, asleep, ended, slept, woken) | {"step": statistics.median(gaps)}


async def play(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    server = Server(options.model, folder / "server", ["--dtype", best_dtype()], ONE_CORE)
    with open(folder / "one-process.log", "w") as log:
        baseline = OneProcess(options, log)
    try:
        server.start()
        await asyncio.to_thread(server.wait_until_ready)
        client = Client(server.url)
        found: dict[str, list[dict]] = {"one process": [], "server": []}
        for turn in range(options.rounds + 1):
            found["one process"].append(await asyncio.to_thread(baseline.once))
            found["server"].append(await of_server(client, turn))
        await client.close()
    finally:
        server.stop()
        baseline.stop()
    return {
        name: {key: statistics.median(item[key] for item in items[1:]) for key in items[0]}
        for name, items in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--model", type=Path, default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None:
        parser.error("--model (or TORPOR_TEST_MODEL) names a folder with a model")
    if options.one_process:
        other_process(options)
        return 0
    with folder_for_logs("torpor-bench-") as folder:
        result = asyncio.run(play(options, folder))
    ratios = {
        way: result["server"][f"{way}_of_own"] / result["one process"][f"{way}_of_own"] for way in ("sleep", "wake")
    }
    if options.json:
        print(json.dumps(result | {"rounds": options.rounds, "server_of_one_process": ratios}, indent=2))
        return 0
    print(f"sleep to host and wake under {STREAMS} requests, medians of {options.rounds} rounds")
    for name, item in result.items():
        ways = "   ".join(
            f"{way} {item[way] * 1000:.0f} ms (own {item[f'{way}_own'] * 1000:.0f}, {item[f'{way}_of_own']:.3f} of it)"
            for way in ratios
        )
        print(f"  {name:<12} {item['bytes'] / 1e6:.0f} MB   {ways}")
    print(f"  a step of the server takes {result['server']['step'] * 1000:.0f} ms")
    print("  server / one process: " + ", ".join(f"{way} {ratio:.3f}" for way, ratio in ratios.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
