#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Python code does today, beside torpor in the same run: a checkpoint of memory, and a busy scheduler's state.

memory:    torch.save + fsync and torch.load (cold: page cache dropped) of as many random bytes as checkpoint_bench puts
           to sleep and wakes. Baselines: those two. Its ceiling is checkpoint_bench's own, of the same rounds.
scheduler: pickle (protocol 5) of Python objects, and int32 arrays with a blob of hashes through msgpack (msgspec), of
           the tokens, hashes and block tables that scheduler_snapshot_bench encodes. Ceiling: copying its bytes twice.

Each round runs every contestant once, warmed; medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import subprocess
import tempfile
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bench_options import count

BENCHES = Path(__file__).parents[2] / "build/release/tools/bench"
BLOCK = 16
HASH_BYTES = 32


@dataclass
class Request:
    id: str
    status: int
    prompt_token_ids: list[int]
    block_hashes: list[bytes]
    block_ids: list[int]
    num_computed_tokens: int


class Packed(msgspec.Struct):
    ids: list[str]
    tokens: bytes
    token_counts: bytes
    hashes: bytes
    block_ids: bytes


def busy_scheduler(running: int, waiting: int) -> list[Request]:
    """Prompts of 2K to 32K tokens, log-uniform, as scheduler_snapshot_bench has them."""
    rng = random.Random(1)
    requests, next_block = [], 1
    for number in range(running + waiting):
        tokens = rng.choices(range(128_000), k=int(2048 * 16 ** rng.random()))
        full = len(tokens) // BLOCK
        blocks = list(range(next_block, next_block + full)) if number < running else []
        next_block += len(blocks)
        requests.append(
            Request(
                f"{number}",
                int(number < running),
                tokens,
                [rng.randbytes(HASH_BYTES) for _ in range(full)],
                blocks,
                full * BLOCK,
            )
        )
    return requests


def packed(requests: list[Request]) -> Packed:
    return Packed(
        ids=[r.id for r in requests],
        tokens=b"".join(array("i", r.prompt_token_ids) for r in requests),
        token_counts=array("i", (len(r.prompt_token_ids) for r in requests)).tobytes(),
        hashes=b"".join(h for r in requests for h in r.block_hashes),
        block_ids=b"".join(array("i", r.block_ids) for r in requests),
    )


class Rounds:
    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}

    def time(self, name: str, work):
        began = time.perf_counter()
        result = work()
        self.add(name, time.perf_counter() - began)
        return result

    def add(self, name: str, value: float) -> None:
        self.taken.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values[1:]) for name, values in self.taken.items()}  # the first only warms


def torpor(name: str, *arguments) -> dict:
    done = subprocess.run(
        [BENCHES / name, "--json", "--rounds", "1", *map(str, arguments)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def memory(mib: int, rounds: int, directory: Path) -> dict:
    size = mib << 20
    tensor = torch.empty(size // 8, dtype=torch.int64).random_()
    file = directory / "memory.pt"

    def save():
        with open(file, "wb") as out:
            torch.save(tensor, out)
            out.flush()
            os.fsync(out.fileno())

    measured = Rounds()
    for _ in range(rounds + 1):
        ours = torpor("checkpoint_bench", "--mib", mib, "--dir", directory, "--checkpoints", 1)
        for row in ("sleep", "wake"):
            measured.add(row, ours[row]["torpor"])
            measured.add(f"{row} ceiling", ours[row]["ceiling"])
        began = time.perf_counter()
        save()
        measured.add("torch.save", size / 1e9 / (time.perf_counter() - began))
        with open(file, "rb") as again:
            os.posix_fadvise(again.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        torch.load(file, weights_only=True)
        measured.add("torch.load", size / 1e9 / (time.perf_counter() - began))
        file.unlink()
    rate = measured.medians()
    return {
        "bytes": size, "rounds": rounds, "unit": "GB/s, median", "rates": rate,
        "sleep": {
            "times_baseline": rate["sleep"] / rate["torch.save"], "of_ceiling": rate["sleep"] / rate["sleep ceiling"],
        },
        "wake": {
            "times_baseline": rate["wake"] / rate["torch.load"], "of_ceiling": rate["wake"] / rate["wake ceiling"],
        },
    }  # fmt: skip


def scheduler(running: int, waiting: int, rounds: int) -> dict:
    requests = busy_scheduler(running, waiting)
    measured = Rounds()
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Packed)
    for _ in range(rounds + 1):
        ours = torpor("scheduler_snapshot_bench", "--running", running, "--waiting", waiting)
        measured.add("torpor", (ours["encode"] + ours["decode"]) / 1e3)
        measured.add("copies", 2 * ours["copy"] / 1e3)
        measured.time("pickle of objects", lambda: pickle.loads(pickle.dumps(requests, protocol=5)))
        arrays = measured.time("packing into arrays", lambda: packed(requests))
        measured.time("msgpack of arrays", lambda arrays=arrays: decoder.decode(encoder.encode(arrays)))
    seconds = measured.medians()
    return {
        "requests": running + waiting, "bytes": ours["bytes"], "rounds": rounds, "unit": "s, median, there and back",
        "seconds": seconds, "times_pickle": seconds["pickle of objects"] / seconds["torpor"],
        "times_msgpack": seconds["msgpack of arrays"] / seconds["torpor"],
        "of_ceiling": seconds["copies"] / seconds["torpor"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=count, default=512)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"), help="where the files go; they are removed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir.resolve()) as directory:
        result = {
            "memory": memory(options.mib, options.rounds, Path(directory)),
            "scheduler": scheduler(options.running, options.waiting, options.rounds),
        }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    rate, seconds = result["memory"]["rates"], result["scheduler"]["seconds"]
    print(f"{options.mib} MiB of memory, median of {options.rounds} rounds, GB/s")
    for ours, theirs in (("sleep", "torch.save"), ("wake", "torch.load")):
        ratio = result["memory"][ours]
        print(
            f"{ours:<6} torpor {rate[ours]:.2f}, {theirs} {rate[theirs]:.2f}, "
            f"the machine's best {rate[ours + ' ceiling']:.2f}: "
            f"{ratio['times_baseline']:.2f} x, {100 * ratio['of_ceiling']:.0f} %"
        )
    print(
        f"{result['scheduler']['requests']} requests, {result['scheduler']['bytes'] / 1e6:.0f} MB, there and back, ms"
    )
    print("  ".join(f"{name} {1e3 * value:.0f}" for name, value in seconds.items()))
    print(
        f"{result['scheduler']['times_pickle']:.1f} x pickle, {result['scheduler']['times_msgpack']:.2f} x msgpack, "
        f"{100 * result['scheduler']['of_ceiling']:.0f} % of the copies"
    )


if __name__ == "__main__":
    main()
