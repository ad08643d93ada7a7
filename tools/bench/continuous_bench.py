#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint while serving, written in the background, beside one for which the engine stands still.

stall:  how long the engine stood still (own: by its report; with the front end: from the end of its last step to where
        it could take the next one; streams: the longest time between two outputs of any stream around the checkpoint,
        less the usual one), under a load of endless streams. Baseline: the same checkpoint with the engine standing
        still until it is on disk.
tokens: a second, with a checkpoint every so often beside none (baseline).
bytes:  written into the checkpoints' own files, beside the KV that was new since the one before (ceiling), as it is.

--full: the stall alone, of checkpoints that link nothing, of fewer streams with long prompts: most of it is full blocks
that no other checkpoint has. --streams, --prompt-tokens and --block-tokens change the load, --compression how
checkpoints are written.

Contestants take turns in each round, in windows of tokens each first in every other one, after a warm-up; medians of
the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
from engine_process import best_dtype

from bench_options import count

STREAMS = 16
EVERY_SECONDS = 5.0
CHECKPOINTS = 3  # in a window
PROMPT_TOKENS = 500
FULL_STREAMS = 8
FULL_PROMPT_TOKENS = 1500
BLOCK_TOKENS = 32
ANSWER_TOKENS = 1000


class Load:
    """Streams that never end: each answer is followed by the next.

    `steady`: the first ones differ in length, so that not all contexts grow and begin again together.
    """

    def __init__(self, engine, streams: int, prompt_tokens: int, steady: bool):
        self.engine = engine
        self.first = [ANSWER_TOKENS * (number + 1) // streams if steady else ANSWER_TOKENS for number in range(streams)]
        self.prompt_tokens = prompt_tokens
        self.times: list[float] = []  # of each output
        self.tokens = 0  # put out
        self.kv_tokens = 0  # computed, prompts too
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(streams)]

    async def _stream(self, number: int) -> None:
        from vllm import SamplingParams

        for turn in range(10**6):
            prompt = {
                "prompt_token_ids": [1000 + (number * 31 + turn * 7 + i) % 20_000 for i in range(self.prompt_tokens)]
            }
            tokens = ANSWER_TOKENS if turn > 0 else self.first[number]
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            seen = 0
            self.kv_tokens += self.prompt_tokens
            async for output in self.engine.generate(prompt, params, f"{number}-{turn}"):
                self.times.append(time.monotonic())
                now = len(output.outputs[0].token_ids)
                self.tokens += now - seen
                self.kv_tokens += now - seen
                seen = now

    def longest_gap(self, begin: float, end: float) -> float:
        near = [moment for moment in self.times if begin - 0.5 <= moment <= end + 0.5]
        return max((b - a for a, b in pairwise(near)), default=0.0)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def own_bytes(checkpoint: str) -> int:
    """Of files that this checkpoint wrote: the others have more than one name."""
    files = [file.stat() for file in Path(checkpoint).iterdir()]
    return sum(file.st_size for file in files if file.st_nlink == 1)


async def standing_still(engine):
    from torpor.vllm import frontend

    return await frontend.while_frozen(frontend.AsyncSide(engine), "checkpoint", {})


async def in_background(engine):
    return await engine.checkpoint()


def phases_of_the_stop(phases: list[dict]) -> list[dict]:
    """A checkpoint that is written in the background begins with open and save, and ends with commit and verify."""
    if phases[0]["name"] != "open":
        return phases
    names = [phase["name"] for phase in phases]
    return phases[names.index("quiesce") : names.index("commit")]


async def stalls(engine, load: Load, rounds: int) -> dict[str, dict]:
    found = {"standing still": [], "in the background": []}
    for number in range(rounds + 1):
        for name, checkpoint in (("standing still", standing_still), ("in the background", in_background)):
            await asyncio.sleep(1.5)
            usual = load.longest_gap(time.monotonic() - 0.5, time.monotonic() - 0.5)
            began = time.monotonic()
            report = await checkpoint(engine)
            ended = time.monotonic()
            await asyncio.sleep(0.5)
            stop = phases_of_the_stop(report["phases"])
            save = next(phase for phase in stop if phase["name"] == "save")
            if number > 0:
                found[name].append({
                    "own": report["seconds"], "with front end": report["pause_seconds"],
                    "streams": max(0.0, load.longest_gap(began, ended) - usual),
                    "usual": usual, "until safe": ended - began, "copied": save["bytes"],
                    "written": own_bytes(report["checkpoint"]),
                } | {f"of it {phase['name']}": phase["seconds"] for phase in stop})  # fmt: skip
    return {
        name: {key: statistics.median(item[key] for item in items) for key in items[0]} for name, items in found.items()
    }


async def window(engine, load: Load, checkpoints: bool, token_bytes: int) -> dict:
    """Tokens a second over one window, and what its checkpoints wrote. Each begins when its time has come."""
    if checkpoints:
        await engine.checkpoint()  # what was new before is no part of it
    before, known, began, written, new_kv, new_tokens = load.tokens, load.kv_tokens, time.monotonic(), 0, 0, 0
    for number in range(CHECKPOINTS):
        await asyncio.sleep(max(0.0, began + (number + 0.5) * EVERY_SECONDS - time.monotonic()))
        if checkpoints:
            tokens = load.kv_tokens
            report = await engine.checkpoint()
            written += own_bytes(report["checkpoint"])
            new_kv += (tokens - known) * token_bytes
            new_tokens += tokens - known
            known = tokens
    await asyncio.sleep(max(0.0, began + CHECKPOINTS * EVERY_SECONDS - time.monotonic()))
    rate = (load.tokens - before) / (time.monotonic() - began)
    return {"rate": rate, "written": written, "new_kv": new_kv, "new_tokens": new_tokens}


def kv_bytes_of_token(model: Path) -> int:
    """Keys and values of all layers."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    value_bytes = {"bfloat16": 2, "float32": 4}[best_dtype()]
    return 2 * value_bytes * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


async def play(options: argparse.Namespace) -> dict:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.directory) as directory:
        arguments = AsyncEngineArgs(
            model=str(options.model), dtype=best_dtype(), enforce_eager=True, block_size=options.block_tokens,
            max_model_len=max(2048, options.prompt_tokens + ANSWER_TOKENS + 100),
            max_num_seqs=max(STREAMS, options.streams), max_num_batched_tokens=512, disable_log_stats=True,
            additional_config={
                "torpor": {
                    "checkpoint_dir": directory, "incremental": not options.full, "compression": options.compression,
                },
            },
        )  # fmt: skip
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            load = Load(engine, options.streams, options.prompt_tokens, steady=not options.full)
            while load.tokens < options.streams * 20:
                await asyncio.sleep(0.1)
            result = {"rounds": options.rounds, "stalls": await stalls(engine, load, options.rounds)}
            if options.full:
                await load.stop()
                return result
            token_bytes = kv_bytes_of_token(options.model)
            windows: dict[bool, list[dict]] = {False: [], True: []}
            for number in range(options.rounds):
                for checkpoints in (number % 2 == 1, number % 2 == 0):
                    windows[checkpoints].append(await window(engine, load, checkpoints, token_bytes))
            await load.stop()
            ledger = await engine.torpor.call("state")
            assert ledger["engine"] == "awake"
            return result | {"with": windows[True], "without": windows[False]}
        finally:
            engine.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--model", type=Path, default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--directory", type=Path, help="of the checkpoints; by default that of temporary files")
    parser.add_argument("--full", action="store_true", help="checkpoints that link nothing, of long prompts")
    parser.add_argument("--streams", type=count, help=f"at once: {STREAMS}, of --full {FULL_STREAMS}")
    parser.add_argument("--prompt-tokens", type=count, help=f"of each: {PROMPT_TOKENS}, of --full {FULL_PROMPT_TOKENS}")
    parser.add_argument(
        "--block-tokens", type=count, default=BLOCK_TOKENS, help="of a KV block; vLLM on the CPU takes multiples of 32"
    )
    parser.add_argument("--compression", default="none", help="of checkpoints: bf16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.model is None:
        parser.error("--model (or TORPOR_TEST_MODEL) names a folder with a model")
    options.streams = options.streams or (FULL_STREAMS if options.full else STREAMS)
    options.prompt_tokens = options.prompt_tokens or (FULL_PROMPT_TOKENS if options.full else PROMPT_TOKENS)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    result = asyncio.run(play(options))
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"checkpoint under {options.streams} streams, median of {options.rounds} rounds")
    for name, item in result["stalls"].items():
        print(
            f"  {name:<18} stood still {item['own'] * 1000:7.1f} ms, "
            f"with the front end {item['with front end'] * 1000:.1f} ms   "
            f"streams waited {item['streams'] * 1000:7.1f} ms more than {item['usual'] * 1000:.0f}   "
            f"safe after {item['until safe'] * 1000:6.0f} ms   "
            f"copied in the stop {item['copied'] / 1e6:6.1f} MB   written {item['written'] / 1e6:6.1f} MB"
        )
    both = result["stalls"]
    ratio = both["in the background"]["own"] / both["standing still"]["own"]
    print(f"  stall, in the background / standing still: {ratio:.4f} (1/{1 / ratio:.0f})")
    for name, item in both.items():
        parts = [f"{key[6:]} {item[key] * 1000:.1f} ms" for key in item if key.startswith("of it ")]
        print(f"  {name:<18} of it " + ", ".join(parts))
    if options.full:
        return 0
    rates = {name: statistics.median(item["rate"] for item in result[name]) for name in ("with", "without")}
    pairs = [a["rate"] / b["rate"] for a, b in zip(result["with"], result["without"], strict=False)]
    print(
        f"tokens a second: with a checkpoint every {EVERY_SECONDS:g} s {rates['with']:.1f}, without "
        f"{rates['without']:.1f} (median of pairs {statistics.median(pairs):.3f}, "
        f"{min(pairs):.3f} to {max(pairs):.3f})"
    )
    written, new_kv, new = (sum(item[key] for item in result["with"]) for key in ("written", "new_kv", "new_tokens"))
    of_each = new / (options.streams * CHECKPOINTS * options.rounds)
    print(
        f"bytes: {written / 1e6:.1f} MB written for {new_kv / 1e6:.1f} MB of new KV (ratio {written / new_kv:.2f}); "
        f"{of_each:.0f} new tokens a stream and checkpoint, in blocks of {options.block_tokens}: "
        f"1 + {options.block_tokens} / {of_each:.0f} = {1 + options.block_tokens / of_each:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
