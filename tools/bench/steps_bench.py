#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What torpor adds to the steps of an engine that does not sleep.

    tools/dev bench steps [--streams=4] [--steps=100] [--rounds=21] [--json]

Real engines on the CPU with one layer of the model and dummy weights, so that a step is short and what torpor adds to
it is seen. Each has a process of its own; they decode the same streams, in turns. The unit is microseconds of a step by
the clock and of a core: the median over the steps of a round, and the least of the rounds, as whatever else runs on the
machine only adds to them. Baseline: vLLM alone. Beside it the same engine of vLLM a second time: so far apart are two
that do not differ.
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

from bench_options import count

PROMPT_TOKENS = 64
WARM_STEPS = 20
# The options of torpor of each engine; none: vLLM alone.
ENGINES: dict[str, dict | None] = {
    "vLLM alone": None,
    "vLLM alone, again": None,
    "torpor": {"offload": None},
    "torpor, sessions": {"offload": None, "sessions": True},
    "torpor, offload": {"offload": "eager", "host_bytes": "256MiB"},
}


class Steps(Engine):
    def decode(self, first: int, streams: int, steps: int) -> dict:
        """Return the medians of `steps` steps in which all streams decode, in microseconds."""
        self.forget()
        asked = [self._ask(first + each, WARM_STEPS + steps + 1, PROMPT_TOKENS) for each in range(streams)]
        for _ in range(WARM_STEPS):
            self.engine.step()
        clock, core = [], []
        for _ in range(steps):
            began, busy = time.perf_counter(), time.process_time()
            self.engine.step()
            clock.append((time.perf_counter() - began) * 1e6)
            core.append((time.process_time() - busy) * 1e6)
        self.engine.abort_request(asked)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.settle()
        return {"clock": statistics.median(clock), "core": statistics.median(core)}


def measure(model: str, streams: int, steps: int, rounds: int) -> dict:
    layer = {"hf_overrides": {"num_hidden_layers": 1}, "load_format": "dummy"}
    tokens = PROMPT_TOKENS + WARM_STEPS + steps
    found: dict[str, list[dict]] = {name: [] for name in ENGINES}
    engines: dict[str, Steps] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, (name, torpor) in enumerate(ENGINES.items()):
                directory = None if torpor is None else Path(folder) / str(number)
                engines[name] = Steps(model, tokens, streams, directory, torpor, **layer)
            for number in range(rounds + 1):  # the first one warms
                for name, engine in engines.items():
                    took = engine.order("decode", first=1000 * number, streams=streams, steps=steps)
                    if number > 0:
                        found[name].append(took)
                print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
        finally:
            for engine in engines.values():
                engine.kill()
    return {"streams": streams, "steps": steps, "rounds": rounds, "engines": found}


def show(result: dict) -> None:
    print(f"microseconds of a step, {result['streams']} streams, least of {result['rounds']} rounds (median, most)")
    print(f"{'engine':<20}{'clock':>24}{'added':>8}{'of a core':>24}{'added':>8}")
    baseline: dict[str, float] = {}
    for name, rounds in result["engines"].items():
        cells = ""
        for unit in ("clock", "core"):
            times = [each[unit] for each in rounds]
            added = min(times) - baseline.setdefault(unit, min(times))
            cells += f"{f'{min(times):.0f} ({statistics.median(times):.0f}, {max(times):.0f})':>24}{added:>8.0f}"
        print(f"{name:<20}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--streams", type=count, default=4)
    parser.add_argument("--steps", type=count, default=100, help="of each round")
    parser.add_argument("--rounds", type=count, default=21)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.streams, arguments.steps, arguments.rounds)
    print(json.dumps(result)) if arguments.json else show(result)


if __name__ == "__main__":
    main()
