# SPDX-License-Identifier: Apache-2.0
"""Loads of torpor's KV connector from host memory: within the step that plans them, beside steps, and beside steps
with an engine that does not wait for transfers but takes empty steps.

    tools/dev bench within_step [--tokens=64,256,1024] [--streams=4] [--rounds=5] [--json]

Real engines on the CPU, in turns. For each length of a prompt that is in host memory and not on the device: steps, wall
and CPU time to its first token, alone and beside streams that decode; and the longest step of these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from connector_serve import Engine

from bench_options import count, counts

WAYS = {
    "within": {"sync_load_budget_bytes": "1GiB"},
    "beside": {"sync_load_budget_bytes": 0},
    "spinning": {"sync_load_budget_bytes": 0},
}
STREAM_TOKENS = 400


class Loads(Engine):
    def first(self, number: int, tokens: int, streams: int, spins: bool) -> dict:
        """Return what it takes to the first token of a prompt that is in host memory alone."""
        from torpor.vllm import connector_scheduler

        self.forget()
        if spins:
            connector_scheduler._WAIT_SECONDS = 0.0
        running = [self._ask(10**6 + 1000 * number + each, STREAM_TOKENS, 32) for each in range(streams)]
        for _ in range(3 if streams else 0):
            self.engine.step()
        steps, longest, found = 0, 0.0, None
        began, cpu = time.perf_counter(), time.process_time()
        asked = self._ask(number, 1, tokens)
        while found is None:
            before = time.perf_counter()
            outputs = self.engine.step()
            steps, longest = steps + 1, max(longest, time.perf_counter() - before)
            found = next((each for each in outputs if each.request_id == asked), None)
        took = {
            "steps": steps,
            "ms": (time.perf_counter() - began) * 1e3,
            "cpu_ms": (time.process_time() - cpu) * 1e3,
            "longest_step_ms": longest * 1e3,
            "found": found.num_cached_tokens or 0,
        }
        self.engine.abort_request(running)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.settle()
        return took


def measure(model: str, lengths: list[int], streams: int, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            way: Loads(
                model, max(*lengths, STREAM_TOKENS + 64), streams + 1, Path(folder) / way, {"host_bytes": "1GiB"} | own
            )
            for way, own in WAYS.items()
        }
        try:
            seen: dict = {}
            for length in lengths:
                for beside in (0, streams):
                    for number in range(rounds):
                        for way, engine in engines.items():
                            arguments = {"number": 100 * length + number, "tokens": length, "spins": way == "spinning"}
                            engine.order("first_token", number=arguments["number"], tokens=length)  # computes it
                            one = engine.order("first", streams=beside, **arguments)
                            seen.setdefault((length, beside, way), []).append(one)
                    print(f"{length} tokens beside {beside} streams", file=sys.stderr, flush=True)
        finally:
            for engine in engines.values():
                engine.kill()
    return {
        "rounds": rounds,
        "loads": [
            {"tokens": length, "streams": beside, "way": way} | {name: [one[name] for one in each] for name in each[0]}
            for (length, beside, way), each in seen.items()
        ],
    }


def show(result: dict) -> None:
    names = ("steps", "ms", "cpu_ms", "longest_step_ms", "found")
    print(f"{'tokens':>8}{'streams':>9}  {'load':<10}" + "".join(f"{name:>26}" for name in names))
    for load in result["loads"]:
        figures = [f"{statistics.median(load[n]):.4g} ({min(load[n]):.4g} to {max(load[n]):.4g})" for n in names]
        print(
            f"{load['tokens']:>8}{load['streams']:>9}  {load['way']:<10}" + "".join(f"{each:>26}" for each in figures)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--tokens", type=counts, default="64,256,1024", help="lengths of prompts")
    parser.add_argument("--streams", type=count, default=4)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.tokens, arguments.streams, arguments.rounds)
    print(json.dumps(result)) if arguments.json else show(result)


if __name__ == "__main__":
    main()
