# SPDX-License-Identifier: Apache-2.0
"""What a remote store costs engines and saves them: `tools/dev bench remote`, beside resp_bench.

Tokens a second with a store that answers, and with one that is gone, beside the same engine without one. Time to first
token of prompts that another engine computed, beside computing them. The wake of a checkpoint that was pushed, beside
a plain download of the same objects.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/demo"))

from connector_serve import Engine  # noqa: E402
from engine_child import EngineProcess  # noqa: E402
from redis_server import RedisServer  # noqa: E402
from s3_server import BUCKET, S3Server  # noqa: E402

TORPOR = ROOT / "build/release/tools/torpor/torpor"
CONNECTIONS = 4
STEP_TOKENS, STEP_AT_ONCE, STEP_ANSWER = 256, 16, 96
LONG_TOKENS = 8192


def steps(model: str, folder: Path, rounds: int) -> dict:
    """Batches of prompts that nobody had, by three engines in turns: what is stored meanwhile counts."""
    runs: dict[str, list[dict]] = {"without": [], "on": [], "dead": []}
    engines: dict[str, Engine] = {}
    with RedisServer(folder / "on", memory="1gb") as on, RedisServer(folder / "dead") as dead:
        try:
            for name, server in (("without", None), ("on", on), ("dead", dead)):
                torpor = {"host_bytes": "1GiB"} | ({} if server is None else {"kv_store": server.url})
                engines[name] = Engine(model, STEP_TOKENS, STEP_AT_ONCE, folder / name, torpor)
            dead.kill()
            for number in range(rounds + 1):  # the first one warms
                for name, engine in engines.items():
                    runs[name].append(engine.order("batch", first=1000 * (number + 1), answer=STEP_ANSWER))
        finally:
            for engine in engines.values():
                engine.kill()
    rates = {
        by: {name: [run["tokens"] / run[by] for run in all_of[1:]] for name, all_of in runs.items()}
        for by in ("seconds", "cpu_seconds")
    }
    result = {}
    for by, each in rates.items():
        result[f"tokens_per_{by.removesuffix('s')}"] = {
            name: statistics.median(some) for name, some in each.items()
        } | {
            f"{name}_of_without": statistics.median(a / b for a, b in zip(each[name], each["without"], strict=True))
            for name in ("on", "dead")
        }
    return result


def first_tokens(model: str, folder: Path, lengths: list[int], rounds: int) -> dict:
    """What one engine computed, another one finds. Each prompt is asked of the second one once: then it has it. Long
    prompts, which take minutes, in a single round; where they are longer than the model was trained for, its positions
    go on: the time is the same."""
    result = {}
    with RedisServer(folder / "first", memory="4gb") as server:
        host = "1GiB" if max(lengths) <= LONG_TOKENS else "2GiB"
        torpor = {"host_bytes": host, "kv_store": server.url, "kv_store_wait_ms": 2000}
        engines = {name: Engine(model, max(lengths), 1, folder / name, torpor) for name in ("one", "another")}
        try:
            for tokens in lengths:
                numbers = range(1, rounds + 1) if tokens <= LONG_TOKENS else (1,)
                warm = (0,) if tokens <= LONG_TOKENS else ()
                computed, found = (
                    [engine.order("first_token", number=number, tokens=tokens) for number in (*warm, *numbers)]
                    for engine in (engines["one"], engines["another"])
                )
                row = {"found_tokens": min(run["found"] for run in found[len(warm) :])}
                for name, runs in (("computed", computed), ("remote", found)):
                    for by in ("seconds", "cpu_seconds"):
                        row[f"{name}_{by}"] = statistics.median(run[by] for run in runs[len(warm) :])
                result[tokens] = row | {
                    "ratio": row["remote_seconds"] / row["computed_seconds"],
                    "cpu_ratio": row["remote_cpu_seconds"] / row["computed_cpu_seconds"],
                }
                server.ask("FLUSHALL")
        finally:
            for engine in engines.values():
                engine.kill()
    return result


def wakes(model: Path, folder: Path, rounds: int) -> dict:
    """`torpor pull` into an empty directory, and the wake from it, beside curl, with as many connections, of the same
    objects into files that are synced. The pulled bytes are still in the page cache then. In turns: a new engine, which
    has touched none of its KV's memory ("new_wake"); the same, with the bytes made to go from the page cache
    ("cold_wake"), as where memory is short or time has passed; and one that has served ("wake")."""
    options = json.dumps({"max_model_len": 1024})
    log = folder / "engine.log"
    kinds = ("wake", "new_wake", "cold_wake")
    runs: dict[str, list[float]] = {name: [] for name in ("download", "pull", *kinds)}
    with S3Server(folder / "s3") as server:
        engine = EngineProcess(model, folder / "from", log, {}, "--options", options)
        try:
            engine.wait_until_ready()
            engine.order("add", prompts=["Tell me of the sea."] * 8, max_tokens=200, seed=1)
            engine.order("run", steps=100)
            slept = engine.order("sleep", level=1, to="disk")
        finally:
            engine.kill()
        url = f"s3://{BUCKET}/bench"
        environment = os.environ | server.environment
        torpor(environment, "push", slept["checkpoint"], url)
        objects = keys(environment, server, folder)
        for number in range(len(kinds) * (rounds + 1)):
            runs["download"].append(plain_download(server, objects, folder / "plain"))
            to = folder / f"to-{number}"
            began = time.monotonic()
            pulled = torpor(environment, "pull", url, to, "--threads", str(CONNECTIONS))
            runs["pull"].append(time.monotonic() - began)
            kind = kinds[number % len(kinds)]
            engine = EngineProcess(model, to, log, {}, "--options", options)
            try:
                engine.wait_until_ready()
                if kind == "wake":
                    engine.order("add", prompts=["Tell me of the sea."] * 8, max_tokens=100, seed=2)
                    engine.order("run", steps=None)
                if kind == "cold_wake":
                    forget(Path(pulled["path"]))
                woken = engine.order("wake", from_checkpoint=pulled["path"])
                runs[kind].append(woken["seconds"])
            finally:
                engine.kill()
            shutil.rmtree(to)
    medians = {name: statistics.median(each[1:]) for name, each in runs.items()}
    return {
        "bytes": pulled["bytes"],
        **{f"{name}_seconds": median for name, median in medians.items()},
        "pull_ratio": medians["download"] / medians["pull"],
        "ratio": medians["download"] / (medians["pull"] + medians["wake"]),
        "new_ratio": medians["download"] / (medians["pull"] + medians["new_wake"]),
        "cold_ratio": medians["download"] / (medians["pull"] + medians["cold_wake"]),
    }


def forget(checkpoint: Path) -> None:
    """Its files, out of the page cache."""
    for file in checkpoint.iterdir():
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def torpor(environment: dict, *words: object) -> dict:
    done = subprocess.run([TORPOR, *map(str, words), "--json"], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"torpor {words[0]}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _curl(server: S3Server) -> list[str]:
    who = f"{server.environment['AWS_ACCESS_KEY_ID']}:{server.environment['AWS_SECRET_ACCESS_KEY']}"
    return ["curl", "-sS", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", who,
            "-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]  # fmt: skip


def keys(environment: dict, server: S3Server, folder: Path) -> list[str]:
    """Of the parts of the only checkpoint there."""
    [only] = torpor(environment, "ls", f"s3://{BUCKET}/bench")["checkpoints"]
    index = f"{server.environment['AWS_ENDPOINT_URL']}/{BUCKET}/bench/checkpoints/{only['name']}"
    done = subprocess.run([*_curl(server), index], capture_output=True, check=True)
    hashes = {part for file in json.loads(done.stdout)["files"] for part in file["parts"]}
    return [f"{BUCKET}/bench/parts/{each[:2]}/{each}" for each in sorted(hashes)]


def plain_download(server: S3Server, objects: list[str], to: Path) -> float:
    to.mkdir()
    began = time.monotonic()
    words = [
        *_curl(server),
        "--no-progress-meter",
        "--parallel",
        "--parallel-immediate",
        "--parallel-max",
        str(CONNECTIONS),
    ]
    for number, key in enumerate(objects):
        words += ["-o", f"{to}/{number}", f"{server.environment['AWS_ENDPOINT_URL']}/{key}"]
    subprocess.run(words, check=True)
    for file in to.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    took = time.monotonic() - began
    shutil.rmtree(to)
    return took


def show(result: dict) -> None:
    for by, row in result.get("steps", {}).items():
        print(f"{by.replace('_', ' '):<26}without a store {row['without']:,.0f}, with one {row['on']:,.0f}: "
              f"{row['on_of_without']:.3f}, with one that is gone {row['dead']:,.0f}: {row['dead_of_without']:.3f} "
              "(0.98 is wanted)")  # fmt: skip
    for tokens, row in result.get("first_token", {}).items():
        print(f"first token, {tokens:>6} tokens  computed {row['computed_seconds'] * 1e3:,.0f} ms, from the store "
              f"{row['remote_seconds'] * 1e3:,.0f} ms: {row['ratio']:.3f} (of CPU time {row['cpu_ratio']:.3f}), "
              f"{row['found_tokens']} found")  # fmt: skip
    if row := result.get("wake"):
        print(f"checkpoint of {row['bytes'] / 1e6:,.0f} MB  plain download {row['download_seconds']:.2f} s, pull "
              f"{row['pull_seconds']:.2f} s: {row['pull_ratio']:.2f}; pull and wake "
              f"{row['pull_seconds'] + row['wake_seconds']:.2f} s: {row['ratio']:.2f} (0.8 is wanted); the wake alone "
              f"{row['wake_seconds']:.2f} s; of a new engine {row['new_wake_seconds']:.2f} s: {row['new_ratio']:.2f}, "
              f"with cold files {row['cold_wake_seconds']:.2f} s: {row['cold_ratio']:.2f}")  # fmt: skip
