#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serializing the state of a busy scheduler: torpor beside pickle (protocol 5) of the same values.

256 running and 1,000 waiting requests with prompts of 16 to 4,000 tokens, block tables, hashes and a prefix index. Both
start from the dicts that the adapter makes and end with dicts again; torpor checks every type on the way in, and every
length, cross-reference and digest on the way out, and its bytes cannot name code to run. Ceiling: copying the same
number of bytes. Interleaved, median of the rounds, after one that only warms.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import statistics
import time
from array import array

from torpor import EngineCheckpoint

from bench_options import count

BLOCK = 16
HASH_BYTES = 36


def busy_scheduler(running: int, waiting: int, seed: int = 1) -> dict:
    """EngineCheckpoint values of a vLLM engine with this many requests."""
    rng = random.Random(seed)
    requests, tables, blocks, index = (
        [],
        {},
        {"ids": array("i"), "ref_counts": array("i"), "hashes": [], "hash_tokens": array("i")},
        [],
    )
    next_block = 1
    for number in range(running + waiting):
        is_running = number < running
        prompt = array("i", (rng.randrange(49152) for _ in range(rng.choice((16, 100, 400, 1000, 4000)))))
        output = array("i", (rng.randrange(49152) for _ in range(rng.randrange(1, 500)))) if is_running else array("i")
        computed = len(prompt) + len(output) - 1 if is_running else 0
        full = (len(prompt) + len(output)) // BLOCK
        hashes = [rng.randbytes(HASH_BYTES - 4) for _ in range(full)]
        name = f"{number}-{rng.randrange(1 << 32):08x}"
        requests.append({
            "id": name, "client_index": 0, "priority": 0, "arrival_time": 1.7e9 + number,
            "status": "running" if is_running else "waiting", "prompt_token_ids": prompt, "output_token_ids": output,
            "num_computed_tokens": computed, "num_preemptions": 0, "max_tokens": 512,
            "block_hashes": b"".join(hashes), "block_hash_bytes": len(hashes[0]) if hashes else 0,
            "cache_salt": None, "stop_reason": None,
            "sampling": {
                "n": 1, "temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0.0,
                "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
                "seed": number, "stop": [], "stop_token_ids": [], "max_tokens": 512, "min_tokens": 0,
                "ignore_eos": False, "logprobs": None, "prompt_logprobs": None, "engine": {"stop_is_none": False},
            },
            "engine": {"last_sched_seq": number, "prefill_counted": is_running},
        })  # fmt: skip
        if not is_running:
            continue
        count = -(-computed // BLOCK)
        tables[name] = array("i", range(next_block, next_block + count))
        for position in range(count):
            key = hashes[position] + b"\0\0\0\0" if position < computed // BLOCK else b""
            blocks["ids"].append(next_block)
            blocks["ref_counts"].append(1)
            blocks["hashes"].append(key)
            blocks["hash_tokens"].append((position + 1) * BLOCK if key else 0)
            if key:
                index.append((key, [next_block]))
            next_block += 1
    names = [request["id"] for request in requests]
    return {
        "fingerprint": {"model": "benchmark"},
        "scheduler": {
            "policy": "fcfs", "requests": requests, "running": names[:running], "waiting": names[running:],
            "held": [], "finished": [], "engine": {"current_step": 1},
        },
        "kv": {
            "num_blocks": next_block + 1000, "null_block": 0, "blocks": blocks,
            "extra_hashes": [], "prefix_index": index, "engine": {},
            "groups": [{"block_size": BLOCK, "tables": tables, "num_cached_blocks": {name: 0 for name in tables}}],
            "free_order": array("i", range(next_block, next_block + 1000)),
        },
        "workers": [{
            "rank": 0, "rows": names[:running], "default_generator": bytes(5056),
            "generators": {name: rng.randbytes(5056) for name in names[:running]}, "engine": {},
        }],
        "outputs": None,
    }  # fmt: skip


def timed(work):
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def measure(values: dict, rounds: int) -> dict:
    times: dict[str, list[float]] = {
        name: [] for name in ("torpor_write", "torpor_read", "pickle_write", "pickle_read", "copy")
    }
    for round_number in range(rounds + 1):
        if round_number == 1:
            for taken in times.values():
                taken.clear()
        seconds, sections = timed(lambda: EngineCheckpoint.from_dict(values).encode())
        times["torpor_write"].append(seconds)
        seconds, pickled = timed(lambda: pickle.dumps(values, protocol=5))
        times["pickle_write"].append(seconds)

        def read(sections=sections):
            checkpoint = EngineCheckpoint.decode(sections, values["fingerprint"])
            checkpoint.validate()
            return checkpoint.to_dict()

        seconds, again = timed(read)
        times["torpor_read"].append(seconds)
        seconds, _ = timed(lambda pickled=pickled: pickle.loads(pickled))
        times["pickle_read"].append(seconds)
        size = sum(len(content) for _, content in sections)
        source, target = bytes(size), bytearray(size)
        target[:] = source  # warm
        seconds, _ = timed(lambda source=source, target=target: target.__setitem__(slice(None), source))
        times["copy"].append(seconds)
    assert EngineCheckpoint.from_dict(again) == EngineCheckpoint.from_dict(values), (
        "what was read is not what was written"
    )
    median = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "torpor_bytes": size,
        "pickle_bytes": len(pickled),
        "rounds": rounds,
        "seconds": median,
        "write": {
            "times_baseline": median["pickle_write"] / median["torpor_write"],
            "of_ceiling": median["copy"] / median["torpor_write"],
        },
        "read": {
            "times_baseline": median["pickle_read"] / median["torpor_read"],
            "of_ceiling": median["copy"] / median["torpor_read"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--rounds", type=count, default=11)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = {"running": options.running, "waiting": options.waiting} | measure(
        busy_scheduler(options.running, options.waiting), options.rounds
    )
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{options.running} running and {options.waiting} waiting requests, median of {options.rounds} rounds")
    print(f"{'':<6} {'torpor':>10} {'pickle 5':>10} {'copy':>10}   torpor to pickle, to a copy of its bytes")
    for name in ("write", "read"):
        seconds = result["seconds"]
        print(
            f"{name:<6} {seconds[f'torpor_{name}'] * 1e3:>7.2f} ms {seconds[f'pickle_{name}'] * 1e3:>7.2f} ms "
            f"{seconds['copy'] * 1e3:>7.2f} ms   "
            f"{result[name]['times_baseline']:.2f} x, {100 * result[name]['of_ceiling']:.1f} %"
        )
    print(f"bytes  {result['torpor_bytes']:>10,} {result['pickle_bytes']:>10,}")


if __name__ == "__main__":
    main()
