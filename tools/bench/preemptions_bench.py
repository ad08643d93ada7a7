# SPDX-License-Identifier: Apache-2.0
"""What a preemption costs: a request that comes back with its KV from host memory, beside one that is computed again.

In one engine with the options sessions and offload_preempted. A request with a prompt of so many tokens is preempted as
vLLM does it, and its blocks are taken from the prefix cache, as others would take them. Seconds count from then until
its next token: "leave" is the copy within the scheduler's step, "back" the rest. Both ways take turns; medians.
Ceiling: two copies of its KV by all cores, and one step. The model is made up (sessions_bench.py), unless one is named.

    tools/dev bench preemptions [--lengths=500,1000,2000,4000] [--turns=5] [--model=PATH] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from sessions_bench import MADE_UP, Copies
from bench_options import count, counts

OUTPUT = 8  # tokens before the preemption


class Engine:
    def __init__(self, model: Path | None, directory: Path, longest: int):
        from vllm import LLM

        if model is None:
            (directory / "config.json").write_text(json.dumps(MADE_UP))
        options = {"sessions": True, "offload_preempted": True}
        self.llm = LLM(
            str(model or directory), skip_tokenizer_init=True, load_format="auto" if model else "dummy",
            enforce_eager=True, dtype="float32", seed=0, block_size=32, max_model_len=longest + 64, max_num_seqs=4,
            max_num_batched_tokens=2048, additional_config={"torpor": options},
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.dice = random.Random(7)
        self.count = 0

    @property
    def scheduler(self):
        return self.core.scheduler

    def begin(self, length: int):
        """A request that runs, and whose tokens nobody else has."""
        from vllm import SamplingParams

        prompt = [self.dice.randrange(20, 2000) for _ in range(length)]
        params = SamplingParams(temperature=0, max_tokens=OUTPUT + 40, ignore_eos=True, detokenize=False)
        self.count += 1
        self.engine.add_request(f"r{self.count}", {"prompt_token_ids": prompt}, params)
        while not self.scheduler.requests or self.tokens() < OUTPUT:
            self.engine.step()
        [request] = self.scheduler.requests.values()
        return request

    def tokens(self) -> int:
        return max((each.num_output_tokens for each in self.scheduler.requests.values()), default=0)

    def preempt(self, request, offloads: bool) -> None:
        """As the scheduler does for want of blocks, which other requests have filled when it comes back."""
        scheduler = self.scheduler
        scheduler.running.remove(request)
        scheduler.torpor_schedules = offloads
        try:
            scheduler._preempt_request(request, time.monotonic())
        finally:
            scheduler.torpor_schedules = False
        scheduler.kv_cache_manager.block_pool.reset_prefix_cache()

    def seconds(self, length: int, offloads: bool) -> tuple[float, float]:
        """Seconds of the preemption, and from then on until the next token."""
        request = self.begin(length)
        had, offloaded = request.num_output_tokens, self.offloaded()
        began = time.perf_counter()
        self.preempt(request, offloads)
        left = time.perf_counter() - began
        while request.num_output_tokens == had:
            self.engine.step()
        back = time.perf_counter() - began - left
        assert self.offloaded() == offloaded + offloads
        self.engine.abort_request([f"r{self.count}"])
        while self.scheduler.has_requests():
            self.engine.step()
        return left, back

    def offloaded(self) -> int:
        return self.llm.torpor.call("state")["preempted"]["offloaded"]

    def step(self, length: int) -> float:
        request = self.begin(length)
        began, had = time.perf_counter(), request.num_output_tokens
        while request.num_output_tokens < had + 8:
            self.engine.step()
        each = (time.perf_counter() - began) / 8
        self.engine.abort_request([f"r{self.count}"])
        while self.scheduler.has_requests():
            self.engine.step()
        return each

    def kv_bytes(self, tokens: int) -> int:
        """Of all layers, in whole blocks."""
        caches = self.core.model_executor.driver_worker.worker.model_runner.kv_caches
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in caches}
        of_block = sum(storages.values()) // self.scheduler.kv_cache_config.num_blocks
        return -(-tokens // self.scheduler.block_size) * of_block


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=counts, default="250,500,1000,2000,4000", help="of prompts, in tokens")
    parser.add_argument("--turns", type=count, default=5, help="of each way at each length; the median counts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, help="a folder with a model; default: one that is made up")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(options.model, Path(directory), max(options.lengths))
        copies = Copies(engine.kv_bytes(max(options.lengths) + OUTPUT))
        rows = [measured(engine, copies, length, options.turns) for length in options.lengths]
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "turns": options.turns, "rows": rows}))
        return 0
    print(f"{'tokens':>8} {'KV MB':>8} {'leave s':>9} {'back s':>9} {'again s':>9} {'ratio':>7} {'of ceiling':>11}")
    for row in rows:
        print(
            f"{row['tokens']:8} {row['bytes'] / 1e6:8.1f} {row['leave']:9.4f} {row['back']:9.4f} {row['again']:9.4f} "
            f"{row['ratio']:7.3f} {row['of_ceiling']:11.2f}"
        )
    return 0


def measured(engine: Engine, copies: Copies, length: int, turns: int) -> dict:
    engine.seconds(length, True), engine.seconds(length, False)  # the first of each length makes its memory
    kept, again = [], []
    for _ in range(turns):
        kept.append(engine.seconds(length, True))
        again.append(sum(engine.seconds(length, False)))
    leave, back = (statistics.median(each) for each in zip(*kept, strict=True))
    count = engine.kv_bytes(length + OUTPUT)
    ceiling = 2 * copies.seconds(count) + engine.step(length)
    computed = statistics.median(again)
    return {
        "tokens": length, "bytes": count, "leave": leave, "back": back, "again": computed,
        "ratio": (leave + back) / computed, "of_ceiling": ceiling / (leave + back),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
