# SPDX-License-Identifier: Apache-2.0
"""KV blocks of 2 MiB to a Redis server and back, over loopback, beside redis-benchmark, its own benchmark, with
as many connections. Interleaved, medians of the rounds after one that only warms. Server and client share the cores.
With --mooncake (`remote_mooncake.py`) the same with a Mooncake store, with --engines (`remote_engines.py`) what it
does for engines."""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_options import count, counts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/demo"))

from redis_server import RedisServer  # noqa: E402

BYTES = 2 << 20
VERBS = ("put", "get")


def ours(server: RedisServer, threads: int, blocks: int) -> dict[str, float]:
    words = ["--url", server.url, "--bytes", BYTES, "--blocks", blocks, "--threads", threads]
    done = subprocess.run(
        [ROOT / "build/release/tools/bench/resp_bench", *map(str, words)], capture_output=True, check=True
    )
    return {verb: json.loads(done.stdout)[f"{verb}_gb_per_s"] for verb in VERBS}


def its_own(server: RedisServer, threads: int, blocks: int) -> dict[str, float]:
    """GB/s from requests a second; each SET has a key of its own, as far as chance goes. GET of random ones of as many
    blocks as ours has ("get"), and of one and the same, which stays in the processor's cache ("get of one")."""
    keys = [f"key:{number:012}" for number in range(blocks)]
    words = ["-p", server.port, "-d", BYTES, "-n", blocks, "-c", threads, "--csv", "-t"]
    found = {"put": benchmarked([*words, "set", "-r", 1_000_000])}
    server.ask("FLUSHALL")
    for key in keys:
        subprocess.run(["redis-cli", "-p", str(server.port), "-x", "SET", key], input=bytes(BYTES), check=True,
                       capture_output=True)  # fmt: skip
    found["get"] = benchmarked([*words, "get", "-r", blocks])
    server.ask("RENAME", keys[0], "key:__rand_int__")
    found["get of one"] = benchmarked([*words, "get"])
    return found


def benchmarked(words: list) -> float:
    done = subprocess.run(["redis-benchmark", *map(str, words)], capture_output=True, check=True, text=True)
    row = list(csv.reader(done.stdout.splitlines()))[-1]
    return float(row[1]) * BYTES / 1e9


def blocks_there_and_back(rounds: int, blocks: int) -> dict:
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for threads in (1, 4):
            seen = {"torpor": [], "redis-benchmark": []}
            for _ in range(rounds + 1):
                for name, contestant in (("torpor", ours), ("redis-benchmark", its_own)):
                    with RedisServer(Path(folder), memory="1gb") as server:
                        seen[name].append(contestant(server, threads, blocks))
            medians = {
                name: {verb: statistics.median(each[verb] for each in runs[1:]) for verb in runs[0]}
                for name, runs in seen.items()
            }
            mine, its = medians["torpor"], medians["redis-benchmark"]
            ratios = {verb: mine[verb.removesuffix(" of one")] / its[verb] for verb in its}
            result[f"{threads} connections"] = medians | {"ratio": ratios}
    return result


def show_blocks(result: dict) -> None:
    for name, row in result.items():
        for verb, its in row["redis-benchmark"].items():
            mine = row["torpor"][verb.removesuffix(" of one")]
            print(f"{name:<16}{verb:<11} torpor {mine:.2f} GB/s, redis-benchmark {its:.2f} GB/s: "
                  f"{row['ratio'][verb]:.2f}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/dev bench remote", description=__doc__)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--blocks", type=count, default=96)
    parser.add_argument("--engines", action="store_true", help="real engines: steps, first tokens, a pushed checkpoint")
    parser.add_argument(
        "--lengths", type=counts, default="512,2048,7936,16000,32000", help="of prompts, in tokens; of --engines"
    )
    parser.add_argument("--only", choices=("steps", "first_token", "wake"), help="one part of --engines")
    parser.add_argument("--mooncake", action="store_true", help="a Mooncake store instead, beside its own client")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.engines:
        import remote_engines

        model, lengths = os.environ["TORPOR_TEST_MODEL"], options.lengths
        with tempfile.TemporaryDirectory() as folder:
            parts = {
                "steps": lambda: remote_engines.steps(model, Path(folder), options.rounds),
                "first_token": lambda: remote_engines.first_tokens(model, Path(folder), lengths, options.rounds),
                "wake": lambda: remote_engines.wakes(Path(model), Path(folder), options.rounds),
            }
            result = {name: part() for name, part in parts.items() if options.only in (None, name)}
        show = remote_engines.show
    elif options.mooncake:
        import remote_mooncake

        result, show = remote_mooncake.measure(options.rounds, options.blocks), remote_mooncake.show
    else:
        result, show = blocks_there_and_back(options.rounds, options.blocks), show_blocks
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
