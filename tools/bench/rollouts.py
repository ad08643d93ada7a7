# SPDX-License-Identifier: Apache-2.0
"""What the benches of trainers share: their options, the run in the trainer's own environment, and the table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_options import count, some_of

SETTINGS = ("steps", "group_size", "extra", "tokens", "prompt_words")
_RESULT = "RESULT "  # begins the line that holds the result, among those that libraries print


def parser_of(description: str, arms: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of the options that each trainer's bench has; `--arms` takes some of `arms`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--steps", type=count, default=3)
    parser.add_argument("--group-size", type=count, default=4)
    parser.add_argument("--extra", type=int, default=2, help="groups that are begun ahead")
    parser.add_argument("--tokens", type=count, default=30, help="of a rollout, at most; at least a third of it")
    parser.add_argument("--prompt-words", type=count, default=100)
    parser.add_argument("--arms", type=some_of(arms), default=list(arms))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process in the trainer's environment
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(script: str, trainer: str, options: dict, environment: dict[str, str] | None = None):
    """Run `script` in the environment of `trainer` with `options`, and return what it hands to give().

    Exits with the end of what the script printed if it fails.
    """
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from devtool import trainers

    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [str(trainers.environment(trainer)), script, *words]
    done = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True)
    results = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode != 0 or not results:
        raise SystemExit(f"error: {' '.join(command)}: {(done.stdout + done.stderr)[-6000:]}")
    return json.loads(results[0].removeprefix(_RESULT))


def give(result) -> None:
    """Print `result` for run(), and end the process."""
    print(_RESULT + json.dumps(result), flush=True)
    os._exit(0)  # vLLM's libraries complain at the end of an interpreter


def show(result: dict, seconds_of: str) -> None:
    """Print a table with a row for each arm; `seconds_of` names what the seconds of a row are of."""
    print(
        f"{result['model']}, float32; {result['steps']} steps of one group of {result['group_size']} rollouts of "
        f"{result['tokens'] // 3} to {result['tokens']} tokens; {result['extra']} groups are begun ahead"
    )
    print(
        f"{'':11}{seconds_of:>10}{'generation':>12}{'half-done':>11}{'computed':>10}{'twice':>8}{'differ':>8}{'of':>7}"
    )
    for row in result["rows"]:
        differ, tokens = ("—" if row[name] is None else row[name] for name in ("differing", "tokens"))
        print(
            f"{row['arm']:11}{row['seconds']:>8.1f} s{row['generation_seconds']:>10.1f} s{row['half_done']:>11}"
            f"{row['computed']:>10,}{row['computed_twice']:>8,}{differ:>8}{tokens:>7}"
        )
