#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torpor's KV connector beside vLLM's own, on the same work, each engine alone and started anew several times.

    tools/dev bench peers [--starts=5] [--work=return,restart,streams,agents] [--contestants=plain,torpor,…] [--json]

plain: vLLM with its prefix cache alone. torpor: host memory and disk. simple: SimpleCPUOffloadConnector, host memory.
offloading: OffloadingConnector, host memory; offloading_fs: the same with its tier of files. All have as much host
memory: 12 sessions of 900 tokens; the device has room for 6. SmolLM2-135M on one computing thread.

return: first token of a conversation whose KV the device has lost, with 16 new tokens behind it; floor: the device has
its KV. restart: the same after kill -9 and a new process. streams: eight new prompts at once: nothing is ever found.
agents: 24 sessions of 6 turns, 4 at once, in an order that is shuffled anew for each start.

vLLM's connectors refuse a CPU. A stand-in (tests/python/offloading_on_cpu.py) copies for them by memcpy on their own
threads; what they store, evict and load is vLLM's decision. Medians over the starts, which take turns; the last table
has torpor's ratio to the best other contestant, by pairs of one start.
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
from peers_engine import CONTESTANTS, DURABLE, Peer

from bench_options import count, counts, some_of

WORK = ("return", "restart", "streams", "agents")
NEW_TOKENS = 16  # behind a conversation that returns
STREAM_TOKENS, STREAM_ANSWER = 512, 64
SESSIONS, SESSIONS_AT_ONCE = 24, 4


class Bench:
    """One run; `found`: by contestant and work, what each start measured."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.found: dict[str, dict[str, list[dict]]] = {name: {} for name in options.contestants}
        self._began = time.monotonic()

    def run(self) -> None:
        names = self.options.contestants
        for start in range(self.options.starts):
            for name in names[start % len(names) :] + names[: start % len(names)]:
                with tempfile.TemporaryDirectory(prefix="torpor-peers-") as folder:
                    self._one(name, start, Path(folder))

    def _one(self, name: str, start: int, folder: Path) -> None:
        engine = self._start(name, folder)
        try:
            for work in ("return", "streams", "agents"):
                if work in self.options.work:
                    getattr(self, f"_{work}")(engine, name, start)
            if "restart" in self.options.work and name in DURABLE:
                engine = self._restart(engine, name, start, folder)
        finally:
            engine.kill()

    def _start(self, name: str, folder: Path) -> Peer:
        return Peer(name, str(self.options.model), max(self.options.tokens) + NEW_TOKENS, folder)

    def _return(self, engine: Peer, name: str, start: int) -> None:
        for tokens in self.options.tokens:
            asked = {"number": 100 * start + tokens, "tokens": tokens}
            engine.order("returning", more=0, evicted=True, **asked)
            returned = engine.order("returning", more=NEW_TOKENS, evicted=True, **asked)
            floor = engine.order("returning", more=NEW_TOKENS, evicted=False, **asked)
            above = {"floor_ms": floor["ms"], "cpu_above_floor_ms": returned["cpu_ms"] - floor["cpu_ms"]}
            self._note(name, f"return {tokens}", returned | above)

    def _restart(self, engine: Peer, name: str, start: int, folder: Path) -> Peer:
        asked = [{"number": 50_000 + 100 * start + tokens, "tokens": tokens} for tokens in self.options.tokens]
        for each in asked:
            engine.order("returning", more=0, evicted=True, **each)
        engine.kill()
        engine = self._start(name, folder)
        for each in asked:
            returned = engine.order("returning", more=NEW_TOKENS, evicted=True, **each)
            self._note(name, f"restart {each['tokens']}", returned)
        return engine

    def _streams(self, engine: Peer, name: str, start: int) -> None:
        asked = {"first": 100_000 * (start + 1), "tokens": STREAM_TOKENS, "answer": STREAM_ANSWER}
        self._note(name, "streams", engine.order("streams", **asked))

    def _agents(self, engine: Peer, name: str, start: int) -> None:
        engine.order("forget")
        took = engine.order("agents", seed=start + 1, sessions=SESSIONS, at_once=SESSIONS_AT_ONCE)
        self._note(name, "agents", took)

    def _note(self, name: str, work: str, measured: dict) -> None:
        self.found[name].setdefault(work, []).append(measured | {"load": os.getloadavg()[0]})
        shown = ", ".join(f"{k} {v:.4g}" for k, v in measured.items() if isinstance(v, float | int))
        print(f"{time.monotonic() - self._began:5.0f} s  {name}, {work}: {shown}", file=sys.stderr, flush=True)


def summary(found: dict[str, dict[str, list[dict]]]) -> dict:
    """Return for each work and figure: each contestant's median, least and most; torpor's ratio to the best other."""
    result: dict = {}
    for work in dict.fromkeys(work for of_one in found.values() for work in of_one):
        runs = {name: of_one[work] for name, of_one in found.items() if work in of_one}
        figures = [name for name, value in next(iter(runs.values()))[0].items() if isinstance(value, float | int)]
        result[work] = {
            figure: {
                name: dict(zip(("median", "least", "most"), spread([each[figure] for each in of_one]), strict=True))
                for name, of_one in runs.items()
            }
            for figure in figures
        }
        if work == "agents" and "plain" in runs:
            for name, of_one in runs.items():
                pairs = zip(of_one, runs["plain"], strict=True)
                same = sum(
                    a == b for one, plain in pairs for a, b in zip(one["answers"], plain["answers"], strict=True)
                )
                result[work].setdefault("same_as_plain", {})[name] = same / (len(of_one) * SESSIONS)
    return result


def spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def ratios(found: dict[str, dict[str, list[dict]]]) -> dict[str, dict]:
    """Return by work torpor's time as a part of the best other's, the median of pairs, and which one that is."""
    result = {}
    for work, own in found.get("torpor", {}).items():
        figure = {"streams": "tokens_per_second", "agents": "seconds"}.get(work, "ms")
        others = {name: of_one[work] for name, of_one in found.items() if name != "torpor" and work in of_one}
        pairs = {
            name: statistics.median(
                theirs[figure] / mine[figure] if work == "streams" else mine[figure] / theirs[figure]
                for mine, theirs in zip(own, runs, strict=True)
            )
            for name, runs in others.items()
        }
        if pairs:
            best = max(pairs, key=lambda name: pairs[name])
            result[work] = {"of": best, "ratio": pairs[best]}
    return result


def show(result: dict) -> None:
    print(f"vLLM on the CPU, one thread an engine; medians of {result['starts']} starts (least to most)")
    for work, figures in result["works"].items():
        print(f"\n{work}")
        names = list(next(iter(figures.values())))
        print(f"{'':24}" + "".join(f"{name:>36}" for name in names))
        for figure, of_all in figures.items():
            cells = (
                f"{of_all[name]:.3f}"
                if figure == "same_as_plain"
                else f"{of_all[name]['median']:,.4g} ({of_all[name]['least']:,.4g} to {of_all[name]['most']:,.4g})"
                for name in names
            )
            print(f"{figure:24}" + "".join(f"{cell:>36}" for cell in cells))
    print("\ntorpor's time as a part of the best other's, median of pairs")
    for work, one in result["ratios"].items():
        print(f"{work:24}{one['ratio']:>10.3f} of {one['of']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--starts", type=count, default=5, help="of each engine")
    parser.add_argument("--tokens", type=counts, default=[1000, 4004], help="of conversations that return")
    parser.add_argument("--work", type=some_of(WORK), default=list(WORK))
    parser.add_argument("--contestants", type=some_of(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.model is None:
        parser.error("--model (or TORPOR_TEST_MODEL) names a folder with a model")
    bench = Bench(options)
    bench.run()
    result = {"starts": options.starts, "works": summary(bench.found), "ratios": ratios(bench.found)}
    print(json.dumps(result)) if options.json else show(result)


if __name__ == "__main__":
    main()
