#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The main job, shown: chats stream from a real engine, fall asleep mid-sentence, and go on from the very next token.

To disk, the engine's process is killed with SIGKILL while it sleeps and a new process wakes from the checkpoint. Every
answer is compared with a run of the same requests that never slept. Exit codes: 0 all identical, 1 a token differed,
2 the demo could not run (bad input, an engine that failed).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import console_demo
import kinds
import offload_demo
import remote_demo
import server_demo
import sessions_demo
import standby_demo
from demo_options import parse, what_happens
from engine_child import DemoError, EngineProcess
from networks import inside, two_networks
from picture import Timeline, draw
from screen import MARK, Screen, size
from serving import ServerEnded

HERE = Path(__file__).resolve().parent
GPU_PATH = HERE.parents[1] / "tests/gpu_path"
_ENGINE_BYTES = 6 << 30  # of the machine's memory, where nothing else is said: the engine takes about half of them


def memory_share(asked: float | None) -> float | None:
    """With which vLLM sizes KV, at each start anew. None where the machine has too little left: then it gets 1 GiB."""
    words = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    memory = {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in words}
    share = asked or round(_ENGINE_BYTES / memory["MemTotal"], 3)
    return share if asked or share * memory["MemTotal"] < 0.9 * memory["MemAvailable"] else None


def read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise DemoError(f"--prompts {path}: {problem}") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise DemoError(f"--prompts {path} has no prompt; write one a line")
    return prompts


def make_directory(path: Path | None) -> Path:
    if path is None:
        return Path(tempfile.mkdtemp(prefix="torpor-demo-"))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise DemoError(f"--dir {path}: {problem}") from None
    return path.resolve()


def bytes_in(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*"))


def gpu_path(directory: Path) -> tuple[Path, dict[str, str]]:
    """A model small enough for interpreted kernels, and the environment of an engine that runs them."""
    sys.path.append(str(GPU_PATH))
    import gpu_path
    from gpu_path.model import make_model

    return make_model(directory / "model"), gpu_path.environment()


def run(options: argparse.Namespace, screen: Screen) -> dict:
    if options.features:
        prompts = [prompt for _, prompt, *_ in kinds.shown(options.gpu_path)]
    else:
        prompts = read_prompts(options.prompts)
    directory = options.dir
    log = directory / "engine.log"
    shared = {}
    if options.remote:
        screen.stage("0. Two engines share KV blocks through a Redis server")
        shared = remote_demo.share(options.model, directory, options.max_tokens, screen)
    model, environment = gpu_path(directory) if options.gpu_path else (options.model, {})
    arguments = ["--features"] if options.features else []
    recorded = None
    if options.console:
        recorded = console_demo.RecordedEvents(directory)
        arguments, environment = recorded.arguments, environment | recorded.environment
    if options.features:
        environment = environment | {"TORCH_COMPILE_DISABLE": "1"}  # vLLM compiles for each new shape, for minutes
    # What is told depends on how much KV there is, and interpreted kernels are no place for much of it.
    share = None if options.gpu_path or options.console else memory_share(options.gpu_memory_utilization)
    engine, place, networks, timeline = None, [], contextlib.ExitStack(), Timeline()
    try:
        screen.stage(
            "1. An engine starts (vLLM's GPU path, on CPU tensors)"
            if options.gpu_path
            else "1. An engine starts (vLLM on the CPU)"
        )
        engine = EngineProcess(model, directory, log, environment, *arguments, memory_share=share)
        engine.wait_until_ready()
        requests = {"prompts": prompts, "max_tokens": options.max_tokens, "seed": options.seed}
        if (
            recorded is not None
        ):  # those draw from one generator, in the order in which they are admitted: their loads decide it
            requests["unseeded"] = False

        screen.stage("2. The run that never sleeps, to compare with")
        sampling = engine.order("add", **requests)["kinds"]
        began = time.monotonic()
        expected = engine.order("run", steps=None)
        answered = sum(map(len, expected["tokens"].values()))
        per_second = answered / (time.monotonic() - began)
        screen.line(
            f"{len(prompts)} answers, {answered} tokens, {expected['steps']} engine steps, "
            f"{per_second:.0f} tokens a second"
        )

        screen.stage(f"3. The same {len(prompts)} chats again")
        engine.order("add", **requests)
        if options.svg is not None:
            timeline.watch(lambda: resident(engine))

        def chats(message: dict) -> None:
            timeline.count(message["counts"])
            screen.chats(before["texts"] | message["texts"], slept_at)

        before, slept_at = {"texts": {}}, {}
        before = engine.order("run", chats, steps=options.freeze_after)
        screen.chats(before["texts"], final=True)
        unfinished = len(prompts) - len(before["finished"])
        if unfinished == 0:
            raise DemoError(
                f"after {options.freeze_after} steps no chat was left to put to sleep; give a smaller --freeze-after"
            )
        awake = engine.resident_bytes()
        regions = engine.order("ledger")[0]["process_resident_region_bytes"]
        slept_at = {number: len(text) for number, text in before["texts"].items() if number not in before["finished"]}

        path = engine.order("path")
        in_flight = f", with {path['batches_in_flight']} step in flight" if path["batches_in_flight"] else ""
        screen.stage(f"4. Sleep, in the middle of {unfinished} sentences{in_flight}, to {options.to}")
        with timeline.span("sleep"):
            slept = engine.order("sleep", level=options.level, to=options.to)
        timeline.sample()
        asleep = engine.resident_bytes()
        regions_asleep = engine.order("ledger")[0]["process_resident_region_bytes"]
        screen.line(
            f"{size(awake)} resident before, {size(asleep)} asleep: {size(max(awake - asleep, 0))} given back, "
            f"and {size(slept['freed_bytes'])} of weights and KV are no longer mapped"
        )
        if options.to == "disk":
            screen.line(f"checkpoint: {slept['checkpoint']}")
            with timeline.span("start"):
                if options.remote:
                    screen.stage(
                        "5. It goes to an S3 server; kill -9, all files are removed; another place wakes from there"
                    )
                    wire = networks.enter_context(two_networks())
                    moved = remote_demo.take_elsewhere(Path(slept["checkpoint"]), directory, engine.kill, screen, wire)
                    if wire is not None:
                        place, environment = inside(wire.far), environment | remote_demo.ALONE
                else:
                    screen.stage("5. kill -9, and a new process wakes from the checkpoint")
                    engine.kill()
                    moved = {"checkpoint": slept["checkpoint"]}
                moved |= shared
                there = Path(moved["checkpoint"]).parent
                engine = EngineProcess(model, there, log, environment, *arguments, inside=place, memory_share=share)
                engine.wait_until_ready()
            blocks = engine.order("path")["kv_blocks"]
            screen.line(f"vLLM gave its KV {blocks} blocks, and {path['kv_blocks']} to that of the one that slept")
            with timeline.span("wake"):
                woken = engine.order("wake", from_checkpoint=moved["checkpoint"])
        else:
            screen.stage("5. The same process wakes")
            blocks = path["kv_blocks"]
            with timeline.span("wake"):
                woken, moved = engine.order("wake", from_checkpoint=None), {}

        timeline.seconds = {"sleep": slept["seconds"], "wake": woken["seconds"]}
        after = engine.order("run", chats, steps=None)
        resident_woken = engine.resident_bytes()
        tokens, texts = before["tokens"] | after["tokens"], before["texts"] | after["texts"]
        recomputed = engine.order("state")["recomputed_tokens"]
        if recorded is not None:
            engine.order("settle")
            engine.kill()
            kept = recorded.keep()
    finally:
        timeline.close()
        if engine is not None:
            engine.kill()
        if recorded is not None:
            recorded.close()
        networks.close()

    screen.stage(f"6. The answers; {MARK} is where the engine slept")
    screen.answers(texts, slept_at, sampling if options.features else None)
    same = [
        tokens.get(str(i)) == expected["tokens"][str(i)] and texts.get(str(i)) == expected["texts"][str(i)]
        for i in range(len(prompts))
    ]
    if options.svg is not None:
        write_picture(options, timeline, prompts, same, recomputed)
    return {
        **path,
        "woken_kv_blocks": blocks,
        "requests": len(prompts),
        "identical": sum(same),
        "differing": [i for i, equal in enumerate(same) if not equal],
        "sampling": sampling,
        "asleep_requests": unfinished,
        "tokens_before_sleep": sum(map(len, before["tokens"].values())),
        "tokens": sum(map(len, tokens.values())),
        "recomputed_tokens": recomputed,
        "tokens_per_second": per_second,
        "level": options.level,
        "to": options.to,
        "rss_awake_bytes": awake,
        "rss_asleep_bytes": asleep,
        "rss_woken_bytes": resident_woken,
        "resident_weights_and_kv_bytes": regions,
        "asleep_weights_and_kv_bytes": regions_asleep,
        "freed_bytes": slept["freed_bytes"],
        "saved_bytes": slept["saved_bytes"],
        "checkpoint": None,
        **moved,
        "checkpoint_bytes": slept["checkpoint_bytes"],
        "checkpoint_parts": slept["checkpoint_parts"],
        "sleep_seconds": slept["seconds"],
        "wake_seconds": woken["seconds"],
        "sleep_phases": slept["phases"],
        "wake_phases": woken["phases"],
        "sleep_chunks": chunks(slept),
        "wake_chunks": chunks(woken),
        "log": str(log),
        "console": kept if recorded is not None else None,
        "picture": str(options.svg) if options.svg is not None else None,
    }


def resident(engine: EngineProcess) -> int:
    """Return the bytes that are resident of an engine's process; 0 if it was killed."""
    try:
        return engine.resident_bytes()
    except (OSError, DemoError):
        return 0


def write_picture(
    options: argparse.Namespace, timeline: Timeline, prompts: list[str], same: list[bool], recomputed: int
) -> None:
    facts = {
        "identical to the run that never slept": f"{sum(same)} of {len(same)}",
        "tokens recomputed": str(recomputed),
        "model": "a tiny random one" if options.gpu_path else options.model.name,
        "on": f"{os.cpu_count()} CPU cores",
    }
    what = "one kill -9" if options.to == "disk" else "one sleep"
    differing = [number for number, equal in enumerate(same) if not equal]
    picture = draw(timeline, prompts, differing, facts, f"{len(prompts)} chats, {what}, the very next token")
    try:
        options.svg.write_text(picture, encoding="utf-8")
    except OSError as problem:
        raise DemoError(f"--svg {options.svg}: {problem}") from None


def chunks(report: dict) -> dict[str, int]:
    """What the offload core counted so far in the process that made this report, all ranks together."""
    return dict(sum((Counter(ledger["chunks_by_outcome"]) for ledger in report["ledgers"]), Counter()))


def phases(items: list[dict]) -> str:
    return ", ".join(f"{phase['name']} {phase['seconds']:.3f}" for phase in items)


def show(result: dict, screen: Screen) -> None:
    screen.stage("7. What happened")
    rows = [
        ("identical to the run that never slept", f"{result['identical']} of {result['requests']}"),
        ("tokens recomputed", str(result["recomputed_tokens"])),
        (
            "resident memory awake / asleep / woken",
            " / ".join(size(result[f"rss_{name}_bytes"]) for name in ("awake", "asleep", "woken")),
        ),
        ("sleep", f"{result['sleep_seconds']:.2f} s  ({phases(result['sleep_phases'])})"),
        ("wake", f"{result['wake_seconds']:.2f} s  ({phases(result['wake_phases'])})"),
        (
            "chunks through the offload core",
            "; ".join(
                f"{name} {', '.join(f'{count} {outcome}' for outcome, count in result[f'{name}_chunks'].items())}"
                for name in ("sleep", "wake")
            ),
        ),
    ]
    if "store" in result:
        seconds = " and ".join(f"{number:.2f} s" for number in result["remote_first_token_seconds"])
        rows += [
            (
                "found by another engine",
                f"{result['remote_cached_tokens']} of {result['remote_prompt_tokens']} tokens; "
                f"first token after {seconds}",
            ),
            (
                f"through {result['store']}",
                f"pushed in {result['push_seconds']:.2f} s, pulled in {result['pull_seconds']:.2f} s: "
                f"{size(result['pushed_bytes'])}",
            ),
        ]
    if result["checkpoint"]:
        parts = ", ".join(
            f"{name} {size(count)}"
            for name, count in sorted(result["checkpoint_parts"].items(), key=lambda item: -item[1])
        )
        rows += [
            ("checkpoint", f"{size(result['checkpoint_bytes'])}  ({parts})"),
            ("", result["checkpoint"]),
            ("look inside", f"tools/dev torpor info {result['checkpoint']}"),
        ]
    if result["console"]:
        rows += console_demo.rows(result["console"])
    if result["picture"]:
        rows.append(("picture", result["picture"]))
    screen.table(rows)
    for number in result["differing"]:
        screen.line(f"chat {number + 1} ({result['sampling'][number]}) DIFFERS")


def main() -> int:
    options = parse(sys.argv[1:])
    screen = Screen(quiet=options.json)
    is_temporary = options.dir is None
    try:
        options.dir = make_directory(options.dir)
        with screen:
            screen.say(f"{what_happens(options)} A line at least every five seconds; files are in {options.dir}")
            if options.server:
                result = server_demo.run(options, read_prompts(options.prompts), screen)
            elif options.standby:
                result = standby_demo.run(options, read_prompts(options.prompts), screen)
            elif options.offload:
                result = offload_demo.run(options.model, options.dir, options.conversation, options.max_tokens, screen)
            elif options.sessions:
                result = sessions_demo.run(
                    options.model, options.dir, read_prompts(options.prompts), options.max_tokens,
                    options.freeze_after, options.seed, screen,
                )  # fmt: skip
            else:
                result = run(options, screen)
    except (DemoError, ServerEnded) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=2))
    elif options.server:
        server_demo.show(result, screen)
    elif options.standby:
        standby_demo.show(result, screen)
    elif options.offload:
        offload_demo.show(result, screen)
    elif options.sessions:
        sessions_demo.show(result, screen)
    else:
        show(result, screen)
    if is_temporary and not options.json:
        screen.line(f"It left {size(bytes_in(options.dir))} in {options.dir}: rm -r {options.dir}")
    same = result["identical"] == result["requests"] and result.get("forks_identical") == result.get("forks")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
