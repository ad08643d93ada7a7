#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What hibernated requests and forks cost an engine of vLLM on the CPU, beside the machine's own copies and steps.

Return:    seconds from resume() to the next token, less a step of the same request had it never left. Ceiling: its
           bytes copied once by all cores, and one step. Baseline: the same tokens computed again.
Hibernate: the longest time that another of 8 streams waits for a token while one leaves, of 20 times. Ceiling: two of
           its usual steps, and the bytes copied once.
Fork:      4 children take 64 tokens each, the fork and the abort of their parent included. Ceiling: the same number of
           steps of 4 requests of that length that have prompts of their own.

All in one process with one engine, interleaved; medians of the rounds after one that only warms. The model is made up,
of random weights, with much KV for what its tokens take to compute, unless one is named.
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

from bench_options import count, counts

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
LENGTHS = (1_000, 4_000, 7_500)
STREAMS, STREAM_TOKENS = 8, 1_000
BRANCHES, BRANCH_TOKENS = 4, 64
BLOCK_TOKENS = 32
MADE_UP = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32",
}  # fmt: skip


class Engine:
    def __init__(self, model: Path | None, dtype: str, directory: Path):
        from vllm import LLM

        if model is None:
            (directory / "config.json").write_text(json.dumps(MADE_UP))
        self.llm = LLM(
            str(model or directory), skip_tokenizer_init=True, load_format="auto" if model else "dummy",
            enforce_eager=True, dtype=dtype, seed=0, block_size=BLOCK_TOKENS, max_model_len=8192,
            max_num_seqs=16, max_num_batched_tokens=2048,
            additional_config={"torpor": {"sessions": True}},
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        for cache in self.core.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.zero_()  # the first use of memory is measured nowhere: the copies are of used memory, too
        self.dice = random.Random(5)
        self.count = 0

    def prompt(self, tokens: int) -> list[int]:
        return [self.dice.randrange(20, 2000) for _ in range(tokens)]

    def ask(self, prompt: list[int]) -> str:
        from vllm import SamplingParams

        name, self.count = f"r{self.count}", self.count + 1
        params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def until(self, names: list[str], tokens: int) -> None:
        """Take steps until each has so many output tokens more."""
        wanted = {name: self.tokens(name) + tokens for name in names}
        while wanted:
            self.engine.step()
            wanted = {name: count for name, count in wanted.items() if self.tokens(name) < count}

    def tokens(self, name: str) -> int:
        ids = self.engine.output_processor.external_req_ids.get(name, ())
        return sum(self.engine.output_processor.request_states[i].detokenizer.num_output_tokens() for i in ids)

    def end(self, *names: str) -> None:
        self.engine.abort_request(list(names))
        while self.core.scheduler.has_requests():
            self.engine.step()

    def forget(self) -> None:
        """Leave nothing in the prefix cache. The KV of hibernated requests would not be used after it."""
        self.engine.step()
        self.llm.reset_prefix_cache()


def timed(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Copies:
    """The machine's own speed: so many bytes from one place of memory to another, by all cores. No two copies in a row
    touch the same memory, so that none of it comes from a cache that the others have filled."""

    PLACES = 4

    def __init__(self, most_bytes: int):
        import torch

        self._words = -(-most_bytes // 8)
        self._from = torch.ones(self.PLACES * self._words, dtype=torch.int64)
        self._to = torch.zeros_like(self._from)

    def seconds(self, size: int) -> float:
        def copy(place: int) -> None:
            span = slice(place * self._words, place * self._words + size // 8)
            self._to[span].copy_(self._from[span])

        return statistics.median(timed(lambda place=number % self.PLACES: copy(place)) for number in range(9))


def returning(engine: Engine, copies: Copies, length: int) -> dict:
    """One round."""
    prompt = engine.prompt(length)
    again = timed(lambda: engine.until([engine.ask(prompt)], 1))
    name = f"r{engine.count - 1}"
    engine.until([name], 8)
    step = statistics.median(timed(lambda: engine.until([name], 1)) for _ in range(9))
    left = engine.llm.torpor.hibernate(name)
    engine.engine.step()  # its end reaches the model runner

    def resume() -> None:
        engine.llm.torpor.resume(left.id)
        parts["resume"] = time.perf_counter() - began
        engine.until([name], 1)

    parts: dict[str, float] = {}
    began = time.perf_counter()
    whole = timed(resume)
    engine.end(name)
    engine.forget()
    return {
        "added": whole - step, "verify": parts["resume"], "step": step, "copy": copies.seconds(left.bytes),
        "computed_again": again, "bytes": left.bytes,
    }  # fmt: skip


def gaps(engine: Engine, copies: Copies, times: int) -> dict:
    """The longest wait of another stream while one leaves, and while it returns."""
    names = [engine.ask(engine.prompt(STREAM_TOKENS)) for _ in range(STREAMS)]
    engine.until(names, 4)
    usual: list[float] = []
    usual_cpu: list[float] = []
    calls: list[float] = []
    leaving: list[float] = []
    leaving_cpu: list[float] = []
    returned: list[float] = []
    size = 0
    for number in range(times):
        for _ in range(8):
            cpu = time.process_time()
            usual.append(timed(engine.engine.step))
            usual_cpu.append(time.process_time() - cpu)
        cpu, began = time.process_time(), time.perf_counter()
        left = engine.llm.torpor.hibernate(names[number % STREAMS])
        calls.append(time.perf_counter() - began)
        engine.engine.step()
        leaving.append(time.perf_counter() - began)
        leaving_cpu.append(time.process_time() - cpu)
        size = max(size, left.bytes)
        engine.engine.step()
        began = time.perf_counter()
        engine.llm.torpor.resume(left.id)
        engine.engine.step()
        first = time.perf_counter() - began
        returned.append(max(first, *(timed(engine.engine.step) for _ in range(2))))
    engine.end(*names)
    engine.forget()
    median, copy = statistics.median(usual), copies.seconds(size)
    return {
        "median": median, "largest_step": max(usual), "largest": max(leaving), "typical": statistics.median(leaving),
        "over_limit": sum(each > 2 * median + copy for each in leaving), "call": statistics.median(calls),
        "largest_call": max(calls), "cpu_of_a_step": statistics.median(usual_cpu),
        "cpu_of_leaving": statistics.median(leaving_cpu), "most_cpu_of_leaving": max(leaving_cpu),
        "largest_of_return": max(returned), "copy": copy, "bytes": size,
    }  # fmt: skip


def forks(engine: Engine) -> dict:
    """One round: children of one request, then requests of their own."""
    prompt = engine.prompt(STREAM_TOKENS)
    parent = engine.ask(prompt)
    engine.until([parent], 5)
    made: list = []

    def fork() -> None:
        made.append(engine.llm.torpor.fork(parent, BRANCHES))
        engine.engine.abort_request([parent])
        parts["fork"] = time.perf_counter() - began
        engine.until(list(made[0].children), BRANCH_TOKENS)

    parts: dict[str, float] = {}
    began = time.perf_counter()
    branches = timed(fork)
    engine.end(*made[0].children)
    engine.forget()
    names = [engine.ask(engine.prompt(STREAM_TOKENS)) for _ in range(BRANCHES)]
    engine.until(names, 5)
    independent = timed(lambda: engine.until(names, BRANCH_TOKENS))
    engine.end(*names)
    engine.forget()
    return {
        "branches": branches, "fork": parts["fork"], "independent": independent, "bytes": made[0].bytes,
        "shared_blocks": made[0].shared_blocks,
    }  # fmt: skip


def medians(rounds: list[dict]) -> dict:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def measure(options: argparse.Namespace, directory: Path) -> dict:
    engine = Engine(options.model, options.dtype, directory)
    cache = engine.core.model_executor.driver_worker.worker.model_runner.kv_caches
    blocks = engine.core.scheduler.kv_cache_config.num_blocks
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in cache}
    block_bytes = sum(storages.values()) // blocks
    copies = Copies(block_bytes * (max(options.lengths) // BLOCK_TOKENS + 2))
    found: dict = {length: [] for length in options.lengths}
    forked = []
    for number in range(options.rounds + 1):
        of_round = {length: returning(engine, copies, length) for length in options.lengths}
        fork = forks(engine)
        if number > 0:
            for length in options.lengths:
                found[length].append(of_round[length])
            forked.append(fork)
    waits = [gaps(engine, copies, options.hibernations) for _ in range(2)][1:]  # the first one warms
    returned = {}
    for length, rounds in found.items():
        result = medians(rounds)
        limit = 1.25 * result["copy"] + result["step"]
        returned[str(length)] = result | {
            "of_limit": result["added"] / limit, "of_computing": result["added"] / result["computed_again"],
        }  # fmt: skip
    gap, fork = medians(waits), medians(forked)
    return {
        "model": options.model.name if options.model else "made up", "dtype": options.dtype, "rounds": options.rounds,
        "hibernations": options.hibernations, "load": os.getloadavg()[0], "block_bytes": block_bytes,
        "return": returned,
        "hibernate": gap | {"of_limit": gap["largest"] / (2 * gap["median"] + gap["copy"])},
        "fork": fork | {
            "of_independent": fork["branches"] / fork["independent"],
            "blocks_a_child": fork["bytes"] / block_bytes / BRANCHES,
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--hibernations", type=count, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", type=Path, help="a folder with a real one")
    parser.add_argument("--lengths", type=counts, default=LENGTHS, help="tokens of requests that return")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not all(64 <= length <= 8000 for length in options.lengths):
        parser.error("--lengths is 64 to 8000")
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as directory:
        result = measure(options, Path(directory))
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{result['model']}, {result['dtype']}; medians of {options.rounds} rounds, ms")
    for length, each in result["return"].items():
        ms = {name: 1e3 * value for name, value in each.items()}
        print(
            f"return of {length:>5} tokens, {int(each['bytes']) >> 20} MiB: adds {ms['added']:.1f}, {ms['verify']:.1f} "
            f"of it in resume(); one copy {ms['copy']:.1f}, a step {ms['step']:.1f}, computed again "
            f"{ms['computed_again']:.0f}: {each['of_limit']:.2f} of the limit, {each['of_computing']:.3f} of that"
        )
    gap, fork = ({name: 1e3 * value for name, value in result[part].items()} for part in ("hibernate", "fork"))
    print(
        f"hibernate one of {STREAMS}, {options.hibernations} times: others wait {gap['typical']:.1f}, "
        f"{gap['call']:.1f} of it in hibernate(), and {gap['largest']:.1f} at most; {gap['largest_of_return']:.1f} at "
        f"most when it returns; a step {gap['median']:.1f}, {gap['largest_step']:.1f} at most without that, one copy "
        f"{gap['copy']:.1f}: {result['hibernate']['of_limit']:.2f} of the limit, "
        f"{result['hibernate']['over_limit']:.0f} over it; CPU time {gap['cpu_of_leaving']:.1f}, at most "
        f"{gap['most_cpu_of_leaving']:.1f}, of a step {gap['cpu_of_a_step']:.1f}"
    )
    print(
        f"fork into {BRANCHES}, {BRANCH_TOKENS} tokens each: {fork['branches']:.0f}, {fork['fork']:.1f} of it the "
        f"fork; requests of their own {fork['independent']:.0f}: {result['fork']['of_independent']:.3f}; "
        f"{result['fork']['shared_blocks']:.0f} blocks shared, {result['fork']['blocks_a_child']:.2f} copied a child"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
