#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The first and the last token after a post-copy wake of vLLM, beside a wake that brings back everything first.

One engine on the CPU, whose prefix cache has at least twice as many bytes as the weights, of prompts that have ended;
some requests run. It falls asleep, and wakes whole and early in turn. Seconds from the call on: until it returns, until
the running requests have their next token, and until one request for each cached prompt, added then, has its first one.
Each finds all but the last token of its prompt, so this is when every cached block was used.

The model is made up, of random weights, with much KV for what its tokens take to compute. Each round runs both, after
one that only warms; medians of the rounds. No token may be another one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_options import count

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
BLOCK_TOKENS = 32
PROMPT_BLOCKS = 16
RUNNING = 4
KINDS = ("whole", "early")
MADE_UP = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_768, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip


class Engine:
    def __init__(self, options: argparse.Namespace, directory: Path):
        from vllm import LLM

        self.options = options
        torpor = {"checkpoint_dir": str(directory / "checkpoints"), "cpu_linear": options.cpu_linear}
        model = options.model or directory / "model"
        if options.model is None:
            model.mkdir()
            (model / "config.json").write_text(json.dumps(MADE_UP))
        self.llm = LLM(
            str(model), enforce_eager=True, dtype="bfloat16", seed=0, block_size=BLOCK_TOKENS, max_model_len=2048,
            max_num_seqs=128, skip_tokenizer_init=True, load_format="auto" if options.model else "dummy",
            additional_config={"torpor": torpor},
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.dice = random.Random(5)
        self.requests = 0
        self.weights = self.llm.sleep(level=1, preserve_state=True).saved_bytes
        self.llm.wake_up()
        kv_cache = self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches
        layer = kv_cache[0]
        block = (
            layer.numel() * layer.element_size() * len(kv_cache) // self.engine.vllm_config.cache_config.num_gpu_blocks
        )
        count = math.ceil(options.times * self.weights / (block * PROMPT_BLOCKS))
        self.cached = [self.prompt(PROMPT_BLOCKS * BLOCK_TOKENS + 1) for _ in range(count)]
        self.ask(self.cached, 1)
        self.run(self.requests)
        self.running = self.ask([self.prompt(8) for _ in range(RUNNING)], 1900)
        self.run(0, steps=4)

    def prompt(self, tokens: int) -> list[int]:
        return [self.dice.randrange(1000, 20_000) for _ in range(tokens)]

    def ask(self, prompts: list[list[int]], tokens: int) -> list[str]:
        from vllm import SamplingParams

        names = [str(self.requests + number) for number in range(len(prompts))]
        self.requests += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return names

    def run(self, ended: int, steps: int = 10**9) -> list[int]:
        """Until so many have ended, or so many steps; the first tokens of those that have, by their names."""
        tokens: dict[int, int] = {}
        while steps > 0 and (ended == 0 or len(tokens) < ended):
            for output in self.engine.step():
                if output.finished:
                    tokens[int(output.request_id)] = output.outputs[0].token_ids[0]
            steps -= 1
        return [tokens[name] for name in sorted(tokens)]

    def cycle(self, kind: str) -> dict:
        slept = self.llm.sleep(level=1, preserve_state=True, to=self.options.to)
        began = time.perf_counter()
        report = self.llm.wake_up(early=kind == "early")
        times = {"returned": time.perf_counter() - began}
        if (report.deferred_blocks > 0) != (kind == "early"):
            sys.exit("error: it did not wake so")
        self.run(0, steps=1)
        times["first token"] = time.perf_counter() - began
        self.ask(self.cached, 1)
        tokens = self.run(len(self.cached))
        times["last token"] = time.perf_counter() - began
        self.llm.torpor.continue_wake(wait=True)
        return {
            "times": times,
            "tokens": tokens,
            "deferred_bytes": report.deferred_bytes,
            "saved_bytes": slept.saved_bytes,
        }


def measure(options: argparse.Namespace, directory: Path) -> dict:
    engine = Engine(options, directory)
    found: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds + 1):
        for kind in KINDS:
            cycle = engine.cycle(kind)
            if number > 0:
                found[kind].append(cycle)
    tokens = [cycle["tokens"] for cycles in found.values() for cycle in cycles]
    result = {
        "model": options.model.name if options.model else "made up", "from": options.to, "rounds": options.rounds,
        "load": os.getloadavg()[0],
        "weights_bytes": engine.weights, "kv_bytes": found["early"][-1]["saved_bytes"] - engine.weights,
        "deferred_bytes": found["early"][-1]["deferred_bytes"], "cached_prompts": len(engine.cached),
        "tokens_that_differ": sum(a != b for one in tokens for a, b in zip(one, tokens[0], strict=True)),
    }  # fmt: skip
    for kind, cycles in found.items():
        times = [cycle["times"] for cycle in cycles]
        result[kind] = {name: statistics.median(each[name] for each in times) for name in times[0]}
    early, whole = result["early"], result["whole"]
    return result | {
        "first_token_of_whole_wake": early["first token"] / whole["returned"],
        "first_token_of_whole": early["first token"] / whole["first token"],
        "last_token_of_whole": early["last token"] / whole["last token"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--to", choices=("host", "disk"), default="host")
    parser.add_argument("--times", type=float, default=2, help="bytes of cached KV, of the weights'")
    parser.add_argument("--cpu-linear", choices=("plain", "packed"), default="plain")
    parser.add_argument("--model", type=Path, help="a folder with a real one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.times <= 0:
        parser.error("--times is more than 0")
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as directory:
        result = measure(options, Path(directory))
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{result['weights_bytes'] >> 20} MiB of weights, {result['kv_bytes'] >> 20} MiB of KV, "
        f"{result['deferred_bytes'] >> 20} deferred, from {result['from']}; medians of {options.rounds} rounds, ms"
    )
    for kind in KINDS:
        print(f"{kind:<6}" + "".join(f"   {name} {1e3 * value:>8.1f}" for name, value in result[kind].items()))
    print(
        f"first token {result['first_token_of_whole_wake']:.2f} of a whole wake, {result['first_token_of_whole']:.2f} "
        f"of its first token; last token {result['last_token_of_whole']:.2f} of its last token; "
        f"{result['tokens_that_differ']} tokens differ"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
