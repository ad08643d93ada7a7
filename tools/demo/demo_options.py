#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Options of the demo, and what it will show. Standard library only: it is asked before anything is installed.

As a program it reads the options, shows their help or refuses a wrong one as the demo would, and prints what will
happen.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
_DESCRIPTION = (
    "The main job, shown: chats stream from a real engine, fall asleep mid-sentence, and go on from the very next "
    "token."
)

# Options that only some modes have: the default, and the modes.
_OF_MODES = {"kills": (1, "standby"), "conversation": (1000, "offload"), "drain_at": (0.4, "server", "standby")}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/dev demo",
        description=_DESCRIPTION,
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
        help="with the KV connector, and with events: leaves a recording, pictures of the console and a page",
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
        "--standby",
        action="store_true",
        help="show torpor pair instead: the server's processes are killed, and its standby goes on",
    )
    parser.add_argument(
        "--kills",
        type=int,
        metavar="N",
        help="with --standby: how often (once); the figures are medians then",
    )
    parser.add_argument(
        "--conversation",
        type=int,
        metavar="TOKENS",
        help="with --offload: how long the conversation is that returns (1000)",
    )
    parser.add_argument(
        "--drain-at",
        type=float,
        metavar="SHARE",
        help="with --server or --standby: the server ends when the clients have this share of their answers (0.4)",
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="draw the run: tokens of each answer over time, sleep, kill and wake, and resident memory",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    modes = [
        name
        for name in ("gpu_path", "features", "server", "offload", "console", "remote", "sessions", "standby")
        if getattr(options, name)
    ]
    if len(modes) > 1 and modes != ["gpu_path", "features"]:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in modes)
        parser.error(f"{named} do not go together; leave one out")
    if options.remote and options.to != "disk":
        parser.error(f"--remote needs a checkpoint, and --to {options.to} writes none; leave it out")
    others = [name for name in modes if name in ("server", "offload", "sessions", "standby")]
    if options.svg is not None and others:
        parser.error(f"--svg draws an engine that sleeps and wakes, and --{others[0]} shows others; leave one out")
    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        parser.error(
            f"--svg {options.svg}: there is no folder {options.svg.absolute().parent}; make it, or name another"
        )
    for name, (default, *with_modes) in _OF_MODES.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif not set(with_modes) & set(modes):
            wanted = " or ".join(f"--{mode}" for mode in with_modes)
            parser.error(f"--{name.replace('_', '-')} is for {wanted}; add it, or leave this one out")
    if options.freeze_after < 1:
        parser.error(f"--freeze-after is {options.freeze_after}; use 1 or more")
    if options.kills < 1:
        parser.error(f"--kills is {options.kills}; use 1 or more")
    if options.max_tokens < 2:
        parser.error(f"--max-tokens is {options.max_tokens}; use 2 or more")
    if not 200 <= options.conversation <= 1500:
        parser.error(f"--conversation is {options.conversation}; use 200 to 1500")
    if not 0 < options.drain_at < 1:
        parser.error(f"--drain-at is {options.drain_at}; use more than 0 and less than 1")
    return options


def what_happens(options: argparse.Namespace) -> str:
    """Return what this demo will show, in two sentences at most."""
    if options.server:
        return "8 steps: a server is drained in the middle of its clients' answers, and the next one goes on with them."
    if options.offload:
        return "5 steps: a long conversation returns after its KV was evicted, and to a new process; beside vLLM alone."
    if options.sessions:
        return "7 steps: a chat leaves its engine while others run, comes back, and moves to another engine; one forks."
    if options.standby:
        return "6 steps: a server is killed in the middle of its clients' answers, and its standby goes on with them."
    asleep = "its process is killed, a new one" if options.to == "disk" else "the same process wakes and"
    said = f"7 steps: an engine answers chats, and again with a sleep in the middle: {asleep} goes on."
    return f"First two engines share KV. Then {said}" if options.remote else said


if __name__ == "__main__":
    print(what_happens(parse(["--model", "none", *sys.argv[1:]])))
