#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From the start of a process to its first token: vLLM alone, with torpor, and with torpor that wakes a checkpoint.

Each contestant is a new Python process that makes an engine in itself: exec, imports, engine, wake, first token. vLLM
alone has no torpor on its path and computes a prompt; the second does the same with torpor; the third wakes a
checkpoint that has the prompt's request in mid-answer and takes its next step. Interleaved, each round in another
order, after a round that only warms. Time on the clock and CPU time: on a busy machine compare CPU time. Baseline: vLLM
alone. `--rounds=0` measures the round that warms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distribution
from pathlib import Path

from bench_options import count_or_0

WANTED = 0.02
CONTESTANTS = ("vLLM alone", "torpor", "torpor, wakes")
STAGES = ("interpreter", "imports", "engine", "wake", "first token")
PROMPT = "The lighthouse keeper wrote a letter about the storm, and it began like this. " * 8
STEPS_BEFORE = 4  # of the request in the checkpoint


class Moments:
    """How long each stage took: seconds on the clock, and CPU seconds of this process."""

    def __init__(self, began: float):
        self._last = (began, 0.0)
        self.stages: dict[str, tuple[float, float]] = {}

    def end(self, stage: str) -> None:
        now = (time.monotonic(), time.process_time())
        self.stages[stage] = (now[0] - self._last[0], now[1] - self._last[1])
        self._last = now


def child(options: argparse.Namespace) -> None:
    """Be one contestant. Print the stages as JSON in the last line."""
    moments = Moments(options.began)
    moments.end("interpreter")
    alone = options.contestant == CONTESTANTS[0]
    if alone:
        sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != options.torpor.resolve()]
    from vllm import LLM, SamplingParams

    if not alone:
        import torpor.vllm
    moments.end("imports")
    torpor = {} if alone else {"additional_config": {"torpor": {"checkpoint_dir": str(options.dir)}}}
    llm = LLM(
        str(options.model), dtype="float32", enforce_eager=True, block_size=32, max_model_len=2048, seed=0, **torpor
    )
    assert ("torpor" in sys.modules) != alone
    moments.end("engine")
    engine = llm.llm_engine
    if options.contestant == CONTESTANTS[2]:
        woken = llm.wake_up(from_checkpoint=str(options.dir))
        assert woken.requests == 1, woken
    else:
        engine.add_request("one", PROMPT, SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True))
    moments.end("wake")
    tokens = 0
    while tokens == 0:
        tokens = sum(len(output.outputs[0].token_ids) for output in engine.step())
    moments.end("first token")
    if options.makes_checkpoint:
        for _ in range(STEPS_BEFORE):
            engine.step()
        llm.checkpoint()
    print(json.dumps(moments.stages), flush=True)
    os._exit(0)  # how an engine ends is not measured


def start(contestant: str, options: argparse.Namespace, directory: Path, torpor: Path, *more: str) -> dict:
    """Run a contestant. Return its stages."""
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, "--model", options.model, "--contestant", contestant, "--dir", directory]
    command += ["--torpor", torpor, *more, "--began", f"{time.monotonic()!r}"]
    env = os.environ | own
    env.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # a user's second start finds modules compiled: so does the round that warms
    ran = subprocess.run(list(map(str, command)), env=env, stdout=subprocess.PIPE, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"{contestant} ended with exit code {ran.returncode}")
    return json.loads(ran.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict:
    torpor = Path(distribution("torpor").locate_file(""))
    found: dict[str, list[dict]] = {contestant: [] for contestant in CONTESTANTS}
    with tempfile.TemporaryDirectory(prefix="torpor-cold-") as folder:
        directory = Path(folder) / "checkpoints"
        start(CONTESTANTS[1], options, directory, torpor, "--makes-checkpoint")
        for number in range(options.rounds + 1):
            turn = number % len(CONTESTANTS)
            for contestant in (*CONTESTANTS[turn:], *CONTESTANTS[:turn]):
                stages = start(contestant, options, directory, torpor)
                if number > 0 or options.rounds == 0:
                    found[contestant].append(stages)
    return summary(found) | {"rounds": options.rounds, "wanted": WANTED}


def summary(found: dict[str, list[dict[str, tuple[float, float]]]]) -> dict:
    """`found`: the stages of each round by contestant. Return medians, and what torpor adds to vLLM alone."""
    result: dict = {}
    for place, unit in enumerate(("seconds", "cpu_seconds")):
        stages = {
            contestant: {stage: statistics.median(each[stage][place] for each in rounds) for stage in STAGES}
            for contestant, rounds in found.items()
        }
        whole = {
            contestant: [sum(each[stage][place] for stage in STAGES) for each in rounds]
            for contestant, rounds in found.items()
        }
        alone = whole[CONTESTANTS[0]]
        added = {
            contestant: statistics.median(own / other - 1 for own, other in zip(whole[contestant], alone, strict=True))
            for contestant in CONTESTANTS[1:]
        }
        all_of = {contestant: statistics.median(values) for contestant, values in whole.items()}
        result[unit] = {"stages": stages, "all": all_of, "added": added}
    return result


def show(result: dict) -> None:
    print(f"process start to first token, medians of {max(result['rounds'], 1)} rounds; wanted is at most {WANTED:.0%}")
    for unit, name in (("seconds", "seconds"), ("cpu_seconds", "CPU seconds")):
        own = result[unit]
        print(f"{name:22}" + "".join(f"{stage:>13}" for stage in (*STAGES, "all", "added")))
        for contestant in CONTESTANTS:
            values = [f"{own['stages'][contestant][stage]:13.3f}" for stage in STAGES] + [
                f"{own['all'][contestant]:13.3f}"
            ]
            added = own["added"].get(contestant)
            print(f"  {contestant:20}" + "".join(values) + ("" if added is None else f"{added:13.1%}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=count_or_0, default=5, help="0: the one that warms is measured")
    parser.add_argument("--model", type=Path, default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--json", action="store_true")
    for name, kind in (("contestant", str), ("dir", Path), ("torpor", Path), ("began", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)  # of a contestant's process
    parser.add_argument("--makes-checkpoint", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None:
        parser.error("--model (or TORPOR_TEST_MODEL) names a folder with a model")
    if options.contestant:
        return child(options)
    result = measure(options)
    print(json.dumps(result)) if options.json else show(result)


if __name__ == "__main__":
    main()
