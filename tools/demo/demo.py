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
from engine_child import DemoError, EngineProcess
from networks import inside, two_networks
from screen import MARK, Screen, size
from serving import ServerEnded

HERE = Path(__file__).resolve().parent
RIG = HERE.parents[1] / "tests/rig"
_ENGINE_BYTES = 6 << 30  # of the machine's memory, where nothing else is said: the engine takes about half of them


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/dev demo",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.txt", help="one prompt a line")
    parser.add_argument("--max-tokens", type=int, default=72, help="of each answer")
    parser.add_argument("--freeze-after", type=int, default=30, metavar="N", help="engine steps before the sleep")
    parser.add_argument("--level", type=int, choices=(1, 2), default=1, help="of the sleep")
    parser.add_argument(
        "--to",
        choices=("host", "disk"),
        default="disk",
        help="disk: the process is killed and a new one wakes; host: the same process wakes",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the sampled requests")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where checkpoints are left; default: a new temporary folder"
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="of the machine's memory, as vLLM's own: what is left of it is for KV; without it about 6 GiB",
    )
    parser.add_argument(
        "--gpu-path",
        action="store_true",
        help="vLLM as it runs on a GPU (model runner V2, async scheduling), on CPU tensors; a tiny random model",
    )
    parser.add_argument(
        "--features",
        action="store_true",
        help="one request of each kind instead, in one engine: grammars, LoRA; "
        "with --gpu-path grammars and speculation",
    )
    parser.add_argument(
        "--server",
        action="store_true",
        help="show it with a server and its clients instead: drained with SIGTERM, taken up by the next one",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="show the KV connector instead: a conversation returns when its KV was evicted, and to a new process",
    )
    parser.add_argument(
        "--console",
        action="store_true",
        help="with the KV connector, and told as events: leaves a recording, pictures of the console and a page",
    )
    parser.add_argument(
        "--remote",
        action="store_true",
        help="two engines share KV blocks through a Redis server; then the checkpoint goes to an S3 server, all files "
        "here are removed, and it wakes from there elsewhere",
    )
    parser.add_argument(
        "--sessions",
        action="store_true",
        help="show single chats instead: one is hibernated while its tool runs, then it moves to another engine that "
        "serves, and its own is killed",
    )
    parser.add_argument(
        "--conversation",
        type=int,
        default=1000,
        metavar="TOKENS",
        help="with --offload: how long the conversation is that returns",
    )
    parser.add_argument(
        "--drain-at",
        type=float,
        default=0.4,
        metavar="SHARE",
        help="with --server: SIGTERM when the clients have this share of their answers",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    modes = [
        name
        for name in ("gpu_path", "features", "server", "offload", "console", "remote", "sessions")
        if getattr(options, name)
    ]
    if len(modes) > 1 and modes != ["gpu_path", "features"]:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in modes)
        parser.error(f"{named} do not go together; leave one out")
    if options.remote and options.to != "disk":
        parser.error(f"--remote needs a checkpoint, and --to {options.to} writes none; leave it out")
    if options.freeze_after < 1:
        parser.error(f"--freeze-after is {options.freeze_after}; use 1 or more")
    if options.max_tokens < 2:
        parser.error(f"--max-tokens is {options.max_tokens}; use 2 or more")
    if not 200 <= options.conversation <= 1500:
        parser.error(f"--conversation is {options.conversation}; use 200 to 1500")
    if not 0 < options.drain_at < 1:
        parser.error(f"--drain-at is {options.drain_at}; use more than 0 and less than 1")
    return options


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
    sys.path.append(str(RIG))
    import rig
    from rig.model import make_model

    return make_model(directory / "model"), rig.environment()


def what_happens(options: argparse.Namespace) -> str:
    """Return what this demo will show, in two sentences at most."""
    if options.server:
        return "8 steps: a server is drained in the middle of its clients' answers, and the next one goes on with them."
    if options.offload:
        return "5 steps: a long conversation returns after its KV was evicted, and to a new process; beside vLLM alone."
    if options.sessions:
        return "7 steps: a chat leaves its engine while others run, comes back, and moves to another engine; one forks."
    asleep = "its process is killed, a new one" if options.to == "disk" else "the same process wakes and"
    said = f"7 steps: an engine answers chats, and again with a sleep in the middle: {asleep} goes on."
    return f"First two engines share KV. Then {said}" if options.remote else said


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
    told = None
    if options.console:
        told = console_demo.Told(directory)
        arguments, environment = told.arguments, environment | told.environment
    if options.features:
        environment = environment | {"TORCH_COMPILE_DISABLE": "1"}  # vLLM compiles for each new shape, for minutes
    # What is told depends on how much KV there is, and interpreted kernels are no place for much of it.
    share = None if options.gpu_path or options.console else memory_share(options.gpu_memory_utilization)
    engine, place, networks = None, [], contextlib.ExitStack()
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
            told is not None
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
        before = engine.order("run", lambda message: screen.chats(message["texts"]), steps=options.freeze_after)
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
        slept = engine.order("sleep", level=options.level, to=options.to)
        asleep = engine.resident_bytes()
        regions_asleep = engine.order("ledger")[0]["process_resident_region_bytes"]
        screen.line(
            f"{size(awake)} resident before, {size(asleep)} asleep: "
            f"{size(slept['freed_bytes'])} of weights and KV given back"
        )
        if options.to == "disk":
            screen.line(f"checkpoint: {slept['checkpoint']}")
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
            woken = engine.order("wake", from_checkpoint=moved["checkpoint"])
        else:
            screen.stage("5. The same process wakes")
            blocks = path["kv_blocks"]
            woken, moved = engine.order("wake", from_checkpoint=None), {}

        after = engine.order(
            "run", lambda message: screen.chats(before["texts"] | message["texts"], slept_at), steps=None
        )
        resident_woken = engine.resident_bytes()
        tokens, texts = before["tokens"] | after["tokens"], before["texts"] | after["texts"]
        recomputed = engine.order("state")["recomputed_tokens"]
        if told is not None:
            engine.order("settle")
            engine.kill()
            kept = told.keep()
    finally:
        if engine is not None:
            engine.kill()
        if told is not None:
            told.close()
        networks.close()

    screen.stage(f"6. The answers; {MARK} is where the engine slept")
    screen.answers(texts, slept_at, sampling if options.features else None)
    same = [
        tokens.get(str(i)) == expected["tokens"][str(i)] and texts.get(str(i)) == expected["texts"][str(i)]
        for i in range(len(prompts))
    ]
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
        "console": kept if told is not None else None,
    }


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
