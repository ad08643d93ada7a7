#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a KV connector adds to vLLM's scheduler: torpor's beside vLLM's own, over a trace's requests, without a model.

The real scheduler, once without a connector, then with SimpleCPUOffloadConnector (eager and lazy), OffloadingConnector
and torpor's (eager and lazy). Outputs and the workers' reports are made up: what a step orders is done in the next one.
CPU time of the scheduler's thread; everything that Python does for a connector counts, translation included. Every run
has a process of its own; interleaved, medians of the rounds after one that only warms. Baseline:
SimpleCPUOffloadConnector of the same mode. Ceiling: the scheduler without a connector, whose hooks cost nothing.

--sizes:  torpor's and Simple's hooks with 10 thousand to 1 million blocks of host memory.
--memory: the process's memory over the trace, requests made as they come: what it grows by over the second half.
--serve:  real engines: first tokens that are computed, come from host memory, and from disk after a restart, and how
          much of the prompts that finds; tokens a second when nothing is ever found.
--packed: real engines in bfloat16: room in host memory with its blocks packed and not, and first tokens from there.
--trace:  a file of JSON lines (input_length, output_length, hash_ids of 512 tokens; lengths are divided by 4). Without
          one, conversations are made that return as often.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import traceback
from functools import partial
from pathlib import Path

os.environ |= {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
import connector_replay as replay
import connector_serve

from bench_options import count, count_or_0, some_of

SIMPLE, OFFLOADING = "SimpleCPUOffloadConnector", "OffloadingConnector"
BASELINE = {"torpor eager": "Simple eager", "torpor lazy": "Simple lazy"}
HOST_SIZES = (10_000, 100_000, 1_000_000)


def contestants(host_blocks: int) -> dict[str, tuple]:
    """Name: the connector's configuration and how its workers report."""
    host_bytes = host_blocks * replay.BLOCK_BYTES

    def of(connector: str, **extra) -> dict:
        return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}

    made = {
        "none": (None, None),
        "Simple eager": (of(SIMPLE, cpu_bytes_to_use=host_bytes), replay.SimpleReports),
        "Simple lazy": (of(SIMPLE, cpu_bytes_to_use=host_bytes, lazy_offload=True), replay.SimpleReports),
        "Offloading": (of(OFFLOADING, cpu_bytes_to_use=host_bytes), replay.OffloadingReports),
    }
    if importlib.util.find_spec("torpor.vllm.connector"):
        for mode in ("eager", "lazy"):
            # The made-up workers of all contestants tell of a load in the step after it.
            own = of("TorporConnector", offload=mode, host_bytes=host_bytes, sync_load_budget_bytes=0)
            own["kv_connector_module_path"] = "torpor.vllm.connector"
            made[f"torpor {mode}"] = (own, partial(replay.TorporReports, host_blocks))
    return made


def in_a_process(work) -> dict:
    """What `work` returns, done in a forked process that ends with it."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(receiving)
            os.dup2(2, 1)  # whatever vLLM prints
            with os.fdopen(sending, "w") as pipe:
                json.dump(work(), pipe)
            code = 0
        except BaseException:  # the parent must not run on in here
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        said = pipe.read()
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("a contestant failed, see above")
    return json.loads(said)


class Bench:
    def __init__(self, options, trace: list):
        self._options, self._trace = options, trace
        self._shape = replay.Shape(device_blocks=options.device_blocks)

    def _names(self, host_blocks: int) -> list[str]:
        return [name for name in contestants(host_blocks) if not self._options.only or name in self._options.only]

    def one(self, name: str, host_blocks: int, samples: int = 0) -> dict:
        connector, reports = contestants(host_blocks)[name]

        def work() -> dict:
            made = replay.Replay(self._options.model, connector, reports() if reports else None, self._shape)
            return made.run(self._trace, samples).report()

        return in_a_process(work)

    def compare(self) -> dict:
        names = self._names(self._options.host_blocks)
        rounds: dict[str, list[dict]] = {name: [] for name in names}
        for number in range(self._options.rounds + 1):
            for name in names:
                run = self.one(name, self._options.host_blocks)
                if number > 0:
                    rounds[name].append(run)
        results = {name: median_of(runs) for name, runs in rounds.items()}
        for name, result in results.items():
            if "none" in results:
                result["times_none"] = result["us_per_step"] / results["none"]["us_per_step"]
            if (against := BASELINE.get(name)) in results:
                result["of_baseline"] = result["hooks_us_per_step"] / results[against]["hooks_us_per_step"]
        return results

    def sizes(self) -> dict:
        names = [name for name in self._names(1) if name.startswith(("Simple", "torpor"))]
        runs = {name: {size: [] for size in HOST_SIZES} for name in names}
        for _ in range(max(1, self._options.rounds)):
            for name in names:
                for size in HOST_SIZES:
                    runs[name][size].append(self.one(name, size))
        return {name: {str(size): median_of(of) for size, of in each.items()} for name, each in runs.items()}

    def memory(self) -> dict:
        result = {}
        for name in self._names(1):
            resident = self.one(name, self._options.host_blocks, samples=40)["resident"]
            half = resident[len(resident) // 2]
            result[name] = {"resident": resident, "grown_in_second_half": max(resident[len(resident) // 2 :]) - half}
        return result


def median_of(runs: list[dict]) -> dict:
    """torpor's batches wait for one another by the clock, so its counts differ a little from run to run."""
    result = dict(runs[0])
    for name, value in result.items():
        if isinstance(value, (int, float)):
            result[name] = statistics.median_low(run[name] for run in runs)
    result["hooks"] = {
        name: hook | {"us_per_step": statistics.median(run["hooks"].get(name, hook)["us_per_step"] for run in runs)}
        for name, hook in result["hooks"].items()
    }
    return result


def show(results: dict, hooks: bool) -> None:
    print(
        f"{'':<14}{'us/step':>9}{'to none':>9}{'hooks':>9}{'to Simple':>11}{'ns/block':>10}"
        f"{'device':>9}{'host hit':>10}{'loaded':>9}{'stored':>9}"
    )
    for name, one in results.items():
        ratio = f"1/{1 / one['of_baseline']:.1f}" if one.get("of_baseline") else "-"
        block = f"{one['hooks_ns_per_moved_block']:,.0f}" if one["hooks_ns_per_moved_block"] else "-"
        print(
            f"{name:<14}{one['us_per_step']:>9,.0f}{one.get('times_none', 0):>8.2f}x{one['hooks_us_per_step']:>9.1f}"
            f"{ratio:>11}{block:>10}{100 * one['device_hit']:>8.2f}%{100 * one['host_hit']:>9.2f}%"
            f"{one['loaded_blocks']:>9,}{one['stored_blocks']:>9,}"
        )
        if hooks:
            for hook, spent in one["hooks"].items():
                print(f"    {hook:<34}{spent['us_per_step']:>8.2f} us/step in {spent['calls']:,} calls")


def show_sizes(sizes: dict) -> None:
    print("\nhooks us/step (ns per moved block) by blocks of host memory")
    for name, each in sizes.items():
        cells = [f"{one['hooks_us_per_step']:.1f} ({one['hooks_ns_per_moved_block']:,.0f})" for one in each.values()]
        print(f"{name:<14}" + "".join(f"{int(size):>11,}: {cell}" for size, cell in zip(each, cells, strict=True)))


def show_memory(memory: dict) -> None:
    print(
        "\nresident memory: at the start, in the middle, at the end of the trace; "
        "most that it grew by in the second half"
    )
    for name, one in memory.items():
        first, middle, last = (one["resident"][at] / 2**20 for at in (0, len(one["resident"]) // 2, -1))
        print(f"{name:<14}{first:>8.0f}{middle:>8.0f}{last:>8.0f} MiB{one['grown_in_second_half'] / 2**20:>8.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="requests from this file instead of made ones")
    parser.add_argument("--requests", type=count, default=400)
    parser.add_argument("--device-blocks", type=count, default=5_000)
    parser.add_argument("--host-blocks", type=count, default=20_000)
    parser.add_argument(
        "--rounds", type=count_or_0, default=5, help="0: only what --serve, --packed, --memory and --sizes ask for"
    )
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--only", type=some_of(list(contestants(1))), help="contestants to measure")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--serve-tokens", type=count, default=1024, help="of a prompt")
    parser.add_argument("--serve-at-once", type=count, default=8)
    parser.add_argument("--serve-rounds", type=count, default=5)
    parser.add_argument("--packed", action="store_true", help="blocks packed in host memory, beside plain ones")
    parser.add_argument("--hooks", action="store_true", help="show each hook")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    options.model = os.environ["TORPOR_TEST_MODEL"]
    trace = replay.read_trace(options.trace, options.requests) if options.trace else replay.make_trace(options.requests)
    bench = Bench(options, trace)
    result = {
        "trace": options.trace.name if options.trace else "made",
        "requests": len(trace),
        "device_blocks": options.device_blocks,
        "host_blocks": options.host_blocks,
        "rounds": options.rounds,
        "results": bench.compare() if options.rounds > 0 else {},
    }
    if options.sizes:
        result["sizes"] = bench.sizes()
    if options.memory:
        result["memory"] = bench.memory()
    if options.serve:
        result["serve"] = connector_serve.measure(
            options.model, options.serve_tokens, options.serve_at_once, answer=32, rounds=options.serve_rounds
        )
    if options.packed:
        result["packed"] = connector_serve.measure_packed(options.model, options.serve_tokens, options.serve_rounds)
    if options.json:
        print(json.dumps(result, indent=2))
        sys.stdout.flush()
        os._exit(0)  # vLLM's libraries complain at the end of an interpreter
    print(
        f"{len(trace)} requests ({result['trace']}), {options.device_blocks:,} blocks on the device, "
        f"{options.host_blocks:,} in host memory, median of {options.rounds}"
    )
    if options.rounds > 0:
        show(result["results"], options.hooks)
    if options.sizes:
        show_sizes(result["sizes"])
    if options.memory:
        show_memory(result["memory"])
    if options.serve:
        connector_serve.show(result["serve"])
    if options.packed:
        connector_serve.show_packed(result["packed"])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
