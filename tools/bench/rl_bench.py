#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rollouts with a training step in the middle: what becomes of the half-done ones, and what that costs.

Real vLLM on the CPU, one engine, groups of rollouts that share a prompt, as GRPO draws them; half of them sampled with
a seed each, half greedy. After some tokens the engine gives its memory back, a pause stands for the training step, and
the engine goes on with the same weights. The arms, interleaved in each round after one that only warms:

torpor:   sleep(preserve_state=True): requests, their KV and samplers are kept.
resubmit: vLLM's sleep, which aborts; the caller sends prompt and tokens so far again.
keep:     vLLM's mode="keep": requests and samplers stay, their KV is computed again.
awake:    no sleep and no pause: the ceiling, and what the tokens of the others are compared with.

Seconds: to the last token, less the pause. Tokens computed twice: what the scheduler ordered more than without a sleep.
A resubmitted rollout is drawn with a new generator of the same seed: its sampled tokens are others, just as good.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from pathlib import Path

from bench_options import count

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
ARMS = ("torpor", "resubmit", "keep", "awake")
WORDS = (
    "the model reads a question about numbers and answers step by step until it has found what was asked for".split()
)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Rollouts:
    def __init__(self, options):
        from vllm import LLM

        self.options = options
        self.llm = LLM(
            str(options.model), enforce_eager=True, dtype=options.dtype, seed=0, block_size=32, max_model_len=2048,
            max_num_seqs=options.groups * options.group_size,
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.computed = 0
        scheduler = self.engine.engine_core.engine_core.scheduler
        stock = scheduler.schedule

        def schedule(*args, **kwargs):
            output = stock(*args, **kwargs)
            self.computed += sum(output.num_scheduled_tokens.values())
            return output

        scheduler.schedule = schedule
        dice = random.Random(5)
        tokenizer = self.llm.get_tokenizer()
        texts = [" ".join(dice.choices(WORDS, k=options.prompt_words)) for _ in range(options.groups)]
        self.prompts = [tokenizer(text).input_ids for text in texts]
        self.lengths = [
            dice.randint(options.tokens // 2, options.tokens) for _ in range(options.groups * options.group_size)
        ]

    def add(self, number: int, so_far: list[int]) -> None:
        from vllm import SamplingParams

        greedy = number % 2 == 0
        params = SamplingParams(
            temperature=0 if greedy else 1, seed=None if greedy else number, ignore_eos=True,
            max_tokens=self.lengths[number] - len(so_far),
        )  # fmt: skip
        prompt = self.prompts[number // self.options.group_size] + so_far
        self.engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

    def step(self, answers: dict[int, list[int]], before: dict[int, list[int]]) -> None:
        for output in self.engine.step():
            number = int(output.request_id)
            answers[number] = before.get(number, []) + list(output.outputs[0].token_ids)

    def run(self, arm: str) -> dict:
        self.llm.reset_prefix_cache()
        self.computed = 0
        answers: dict[int, list[int]] = {}
        before: dict[int, list[int]] = {}  # of rollouts that were sent again
        steps, freed, still = 0, 0, 0.0
        began, busy = time.perf_counter(), cpu_seconds()
        for number in range(len(self.lengths)):
            self.add(number, [])
        while self.engine.has_unfinished_requests():
            self.step(answers, before)
            steps += 1
            if steps == self.options.after and arm != "awake":
                began_still = time.perf_counter()
                freed = self.sleep(arm)
                time.sleep(self.options.pause)
                before |= self.wake(arm, answers)
                still = time.perf_counter() - began_still
        return {
            "seconds": time.perf_counter() - began - (self.options.pause if arm != "awake" else 0),
            "cpu_seconds": cpu_seconds() - busy,
            "sleep_and_wake_seconds": max(0.0, still - self.options.pause),
            "computed": self.computed,
            "freed_bytes": freed,
            "answers": [answers[number] for number in range(len(self.lengths))],
        }

    def sleep(self, arm: str) -> int:
        how = {"torpor": {"preserve_state": True}, "resubmit": {"mode": "abort"}, "keep": {"mode": "keep"}}[arm]
        return self.llm.sleep(level=1, **how).freed_bytes

    def wake(self, arm: str, answers: dict[int, list[int]]) -> dict[int, list[int]]:
        self.llm.wake_up()
        if arm != "resubmit":
            return {}
        again = {number: list(answers.get(number, [])) for number in range(len(self.lengths))}
        again = {number: so_far for number, so_far in again.items() if len(so_far) < self.lengths[number]}
        for number, so_far in again.items():
            self.add(number, so_far)
        return again


def differing(one: list[list[int]], other: list[list[int]], greedy: bool) -> int:
    """Tokens of greedy, or of sampled, rollouts that are not those of the other run."""
    pairs = [pair for number, pair in enumerate(zip(one, other, strict=True)) if (number % 2 == 0) == greedy]
    return sum(a != b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def measure(options) -> dict:
    rollouts = Rollouts(options)
    rounds: dict[str, list[dict]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds + 1):
        for arm in ARMS:
            done = rollouts.run(arm)
            if number > 0:
                rounds[arm].append(done)
    awake = rounds["awake"][0]
    rows = []
    for arm, runs in rounds.items():
        median = {
            name: statistics.median(run[name] for run in runs)
            for name in ("seconds", "cpu_seconds", "sleep_and_wake_seconds")
        }
        answers = runs[-1]["answers"]
        rows.append({"arm": arm} | median | {
            "more_seconds": median["seconds"] - statistics.median(run["seconds"] for run in rounds["awake"]),
            "computed_twice": runs[-1]["computed"] - awake["computed"],
            "differing_greedy": differing(answers, awake["answers"], greedy=True),
            "differing_sampled": differing(answers, awake["answers"], greedy=False),
            "freed_bytes": runs[-1]["freed_bytes"],
        })  # fmt: skip
    return {
        "bench": "rl", "model": Path(options.model).name, "dtype": options.dtype, "rollouts": len(rollouts.lengths),
        "prompt_tokens": sum(len(prompt) for prompt in rollouts.prompts) // len(rollouts.prompts),
        "tokens": sum(rollouts.lengths), "pause_seconds": options.pause, "after_steps": options.after,
        "rounds": options.rounds, "rows": rows,
    }  # fmt: skip


def show(result: dict) -> None:
    print(
        f"{result['rollouts']} rollouts of {result['tokens']} tokens in all, prompts of {result['prompt_tokens']}, "
        f"{result['model']}, {result['dtype']}; a pause of {result['pause_seconds']} s "
        f"after {result['after_steps']} steps, not counted; medians of {result['rounds']} rounds"
    )
    print(
        f"{'':10}{'last token':>12}{'more':>9}{'CPU':>9}{'computed twice':>16}"
        f"{'differ: greedy':>16}{'sampled':>9}{'freed':>10}"
    )
    for row in result["rows"]:
        print(
            f"{row['arm']:10}{row['seconds']:>10.2f} s{row['more_seconds']:>7.2f} s{row['cpu_seconds']:>7.1f} s"
            f"{row['computed_twice']:>16,}{row['differing_greedy']:>16,}{row['differing_sampled']:>9,}"
            f"{row['freed_bytes'] / 1e9:>7.2f} GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--groups", type=count, default=2)
    parser.add_argument("--group-size", type=count, default=4)
    parser.add_argument("--prompt-words", type=count, default=150)
    parser.add_argument("--tokens", type=count, default=48, help="of a rollout, at most; at least half of it")
    parser.add_argument("--after", type=int, default=20, help="steps before the pause")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds of training")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(result)) if options.json else show(result)
    sys.stdout.flush()
    os._exit(0)  # vLLM's libraries complain at the end of an interpreter


if __name__ == "__main__":
    main()
