#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs to tell what an engine does, and to look at it.

slots:    what telling adds to a step of vLLM's scheduler without a model, over the requests of connector_bench.py, with
          torpor's connector: CPU time of the scheduler's thread. Baseline: the step without it. Budget: 8 us.
readers:  CPU time of `torpor record` and of `torpor console`, of what the screens are fed with, at 5,000 events a
          second. Budget: 1 % of a core for the recorder. Baseline: both at no events.
tokens:   a second, of a server with a recorder, a console four times a second and 8 breakpoints that never match,
          beside itself without them (baseline), in short windows of one load. Goal: 0.99 of it. Beside it the same of
          CPU time for each token, and how much two windows without differ. Two servers are not compared: two of the
          same kind differ by more than what is looked for.

Interleaved, who is first in turns; medians of the rounds after one that only warms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from bench_options import count

ROOT = Path(__file__).parents[2]
BINARY = ROOT / "build/release/tools/torpor/torpor"
EVENTS_A_SECOND, BURSTS_A_SECOND = 5_000, 100
READ_SECONDS = 10.0
LOAD = 16
BREAKPOINTS = 8
SETTLE_SECONDS = 0.5  # readers have started


@contextlib.contextmanager
def rings():
    path = tempfile.mkdtemp(prefix="torpor-bench-", dir="/dev/shm")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# --- slots


def slots(rounds: int, requests: int) -> dict:
    """Each run in a process of its own: the steps without what they tell, and what telling took."""
    import connector_bench as bench

    runs = [bench.in_a_process(partial(_run, requests)) for _ in range(rounds + 1)][1:]
    for name in ("VLLM_PLUGINS", "VLLM_LOGGING_LEVEL"):  # that bench's own; servers have torpor
        os.environ.pop(name, None)
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _run(requests: int) -> dict:
    import connector_replay as replay

    from torpor import _core
    from torpor.vllm.slots import Slots

    host_blocks = 20_000
    connector = {
        "kv_connector": "TorporConnector",
        "kv_connector_module_path": "torpor.vllm.connector",
        "kv_role": "kv_both",
    }
    connector["kv_connector_extra_config"] = {
        "offload": "eager",
        "host_bytes": host_blocks * replay.BLOCK_BYTES,
        "sync_load_budget_bytes": 0,
    }
    with rings() as directory:
        _core.begin_events(directory, "core")
        made = replay.Replay(
            os.environ["TORPOR_TEST_MODEL"],
            connector,
            replay.TorporReports(host_blocks),
            replay.Shape(device_blocks=5_000),
        )
        scheduler, took = made.scheduler, []
        slots = Slots(replay.BLOCK)
        slots._drive(scheduler.connector)
        inner = scheduler.schedule

        def schedule():
            output = inner()
            began = time.thread_time_ns()
            slots.step(scheduler, output, time.perf_counter_ns())
            took.append(time.thread_time_ns() - began)
            return output

        scheduler.schedule = schedule
        result = made.run(replay.make_trace(requests))
        took.sort()
        events = max(
            json.loads(line)["sequence"] for line in ask("events", directory, "--json", "--type", "step").splitlines()
        )
    own = sum(took) / len(took) / 1e3
    return {
        "step_us": result.seconds / result.steps * 1e6 - own,
        "told_us": own,
        "told_median_us": took[len(took) // 2] / 1e3,
        "told_p99_us": took[len(took) * 99 // 100] / 1e3,
        "events_a_step": events / result.steps,
    }


def ask(*words) -> str:
    return subprocess.run([BINARY, *map(str, words)], capture_output=True, text=True, check=True).stdout


# --- readers


def readers(rounds: int) -> dict:
    """Shares of a core."""
    runs = [{rate: _read(rate) for rate in (0, EVENTS_A_SECOND)} for _ in range(rounds)]
    return {
        name: {str(rate): statistics.median(run[rate][name] for run in runs) for rate in (0, EVENTS_A_SECOND)}
        for name in ("record", "console", "events")
    }


def _read(rate: int) -> dict:
    with rings() as directory, tempfile.TemporaryDirectory(dir=ROOT / "build") as recording:
        teller = subprocess.Popen([sys.executable, __file__, "--publish", directory, str(rate)], stdout=subprocess.PIPE)
        teller.stdout.readline()
        recorder = subprocess.Popen([BINARY, "record", directory, "-o", recording, "--json"], stdout=subprocess.PIPE)
        console = subprocess.Popen([BINARY, "console", directory, "--json", "--follow"], stdout=subprocess.DEVNULL)
        time.sleep(1)
        before = [cpu_seconds(each.pid) for each in (recorder, console)]
        began = time.monotonic()
        time.sleep(READ_SECONDS)
        after, passed = [cpu_seconds(each.pid) for each in (recorder, console)], time.monotonic() - began
        recorder.send_signal(2)
        console.terminate()
        said = json.loads(recorder.communicate()[0])
        console.wait()
        teller.terminate()
        teller.wait()
        teller.stdout.close()
    assert said["lost"] == 0, said
    record, shown = ((b - a) / passed for a, b in zip(before, after, strict=True))
    return {"record": record, "console": shown, "events": said["events"]}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def publish(directory: str, rate: int) -> None:
    """In a process of its own: so many events a second, steps of eight requests."""
    from torpor import _core

    _core.begin_events(directory, "core")
    slots = _core.Slots()
    numbers = [slots.create(f"request-{number}", 100) for number in range(8)]
    for number in numbers:
        slots.scheduled(number, 0, 100, 100)
    print("ready", flush=True)
    due = time.monotonic()
    while True:
        for _ in range(rate // BURSTS_A_SECOND):
            slots.step(8, 0, 8, 1000, 1, 1)
        due += 1 / BURSTS_A_SECOND
        time.sleep(max(0.0, due - time.monotonic()))


# --- tokens


async def tokens(rounds: int, model: Path, seconds: float) -> dict:
    """One load throughout; a round is four windows: without, with, with, without."""
    sys.path.insert(0, str(ROOT / "tools/demo"))
    import server_bench
    from engine_process import best_dtype
    from server_bench import Load, generated, tokens_in
    from serving import Client, Server

    server_bench.WINDOW_SECONDS = seconds

    folder = Path(tempfile.mkdtemp(prefix="torpor-bench-"))
    with rings() as directory:
        environment = {"TORPOR_EVENTS_DIR": directory, "TORPOR_CONSOLE": "control"}
        server = Server(model, folder, ["--dtype", best_dtype()], environment, name="told")

        async def window(client: Client, with_readers: bool) -> tuple[float, float]:
            """Tokens a second, and CPU seconds of the server for a thousand of them."""
            recording = folder / f"recording-{time.monotonic_ns()}"
            with attached(directory, recording) if with_readers else contextlib.nullcontext():
                await asyncio.sleep(SETTLE_SECONDS)
                before, made = sum(map(cpu_seconds, family_of(server.pid))), await generated(client)
                rate = await tokens_in(client, False)
                took = sum(map(cpu_seconds, family_of(server.pid))) - before
                return rate, took / (await generated(client) - made) * 1e3

        try:
            server.start()
            await asyncio.to_thread(server.wait_until_ready)
            client = Client(server.url)
            load = Load(client, LOAD, "load")
            windows = [
                [await window(client, with_readers) for with_readers in (False, True, True, False)]
                for _ in range(rounds + 1)
            ][1:]
            await load.stop()
            await client.close()
        finally:
            server.stop()
            shutil.rmtree(folder, ignore_errors=True)
    rates, cpu = ([[each[which] for each in four] for four in windows] for which in (0, 1))
    return {
        "with": statistics.median(rate for four in rates for rate in four[1:3]),
        "without": statistics.median(rate for four in rates for rate in (four[0], four[3])),
        "ratio": statistics.median((four[1] + four[2]) / (four[0] + four[3]) for four in rates),
        "ratios": [(four[1] + four[2]) / (four[0] + four[3]) for four in rates],
        "noise": statistics.median(abs(four[3] / four[0] - 1) for four in rates),
        "cpu_ratio": statistics.median((four[0] + four[3]) / (four[1] + four[2]) for four in cpu),
    }


def family_of(pid: int) -> list[int]:
    """A process with all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    tasks = Path(f"/proc/{pid}/task")
    of_threads = [child for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    return [pid, *(below for child in {*children, *of_threads} for below in family_of(int(child)))]


@contextlib.contextmanager
def attached(directory: str, recording: Path):
    """A recorder, a console, and breakpoints that are asked at every event of their type and never match."""
    import torpor.console

    with torpor.console.connect(directory) as engine:
        numbers = [engine.add_breakpoint(type="slot", request=f"nobody-{number}*") for number in range(BREAKPOINTS)]
        console = subprocess.Popen([BINARY, "console", directory, "--json", "--follow"], stdout=subprocess.DEVNULL)
        recorder = subprocess.Popen([BINARY, "record", directory, "-o", recording], stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            recorder.send_signal(2)
            console.terminate()
            recorder.wait()
            console.wait()
            for number in numbers:
                engine.remove_breakpoint(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--requests", type=count, default=300, help="of the scheduler's trace")
    parser.add_argument("--seconds", type=float, default=4, help="of each window of tokens")
    parser.add_argument("--only", choices=("slots", "readers", "tokens"), help="one of the three")
    parser.add_argument("--publish", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.publish:
        publish(options.publish[0], int(options.publish[1]))
        return 0
    assert importlib.util.find_spec("torpor"), "run it with tools/dev bench console"
    result: dict = {"rounds": options.rounds}
    if options.only in (None, "slots"):
        result["slots"] = slots(options.rounds, options.requests)
    if options.only in (None, "readers"):
        result["readers"] = readers(options.rounds)
    if options.only in (None, "tokens"):
        result["tokens"] = asyncio.run(tokens(options.rounds, Path(os.environ["TORPOR_TEST_MODEL"]), options.seconds))
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    show(result)
    return 0


def show(result: dict) -> None:
    if one := result.get("slots"):
        share = 100 * one["told_us"] / one["step_us"]
        print(
            f"a step of the scheduler {one['step_us']:.0f} us; telling it {one['told_us']:.1f} us more ({share:.1f} %),"
        )
        print(
            f"  median {one['told_median_us']:.1f}, 99th percentile {one['told_p99_us']:.1f} us, "
            f"{one['events_a_step']:.1f} events"
        )
    if one := result.get("readers"):
        for name in ("record", "console"):
            idle, busy = one[name]["0"], one[name][str(EVENTS_A_SECOND)]
            print(
                f"torpor {name:<8} {100 * busy:.2f} % of a core at {EVENTS_A_SECOND} events a second, "
                f"{100 * idle:.2f} % at none"
            )
    if one := result.get("tokens"):
        print(
            f"tokens a second: {one['with']:.0f} with console, recorder and breakpoints, {one['without']:.0f} without: "
            f"{one['ratio']:.3f}"
        )
        print(f"  rounds: {', '.join(f'{each:.3f}' for each in sorted(one['ratios']))}")
        print(
            f"  CPU seconds for a token {1 / one['cpu_ratio']:.3f} of without; two windows without differ by "
            f"{100 * one['noise']:.1f} %"
        )


if __name__ == "__main__":
    sys.exit(main())
