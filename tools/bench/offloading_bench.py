# SPDX-License-Identifier: Apache-2.0
"""Secondary tiers of vLLM's OffloadingConnector, moved by vLLM's own calls, without an engine: KV blocks go from host
memory to a tier, and come back to another instance of it, as after a restart.

torpor's disk segments stand beside vLLM's file-system tier, torpor's packs in an S3 server (SeaweedFS, of this machine)
beside curl with as many connections, which puts and gets objects of the same size. Interleaved; medians of the rounds
after one that only warms. Each block that comes back is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bench_options import count

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/demo"))

from s3_server import BUCKET, S3Server  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager  # noqa: E402

from torpor.vllm.offloading_tier import TorporTier  # noqa: E402

JOB_BLOCKS = 8  # 16 MiB in blocks of 2 MiB
_MOST_SECONDS = 120


def spec():
    parallel = OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
        data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
    )  # fmt: skip
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a layer",), group_id=0),),
        worker_kv_bytes_per_block=0, enable_kv_cache_events=False, extra_config={}, engine_id="a bench",
        model=OffloadingModelConfig(name="a model", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1), parallel=parallel,
    )  # fmt: skip
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace(
        enable_kv_cache_events=False))  # fmt: skip


class Memory:
    """Host memory of an engine, a row a block; `pattern`: what rows have at the beginning."""

    def __init__(self, blocks: int, block_bytes: int):
        self.blocks, self.block_bytes = blocks, block_bytes
        self._mapped = mmap.mmap(-1, blocks * block_bytes)
        self.array = np.frombuffer(self._mapped, np.uint8).reshape(blocks, block_bytes)
        self.pattern = np.random.default_rng(7).integers(0, 256, (blocks, block_bytes), np.uint8)
        self.array[:] = self.pattern
        self.view = memoryview(self._mapped).cast("B", (blocks, block_bytes))
        self.keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(blocks)]

    def jobs(self, promotion: bool, request: ReqContext) -> list[TransferJob]:
        return [
            TransferJob(first, self.keys[first : first + JOB_BLOCKS],
                        np.arange(first, min(first + JOB_BLOCKS, self.blocks)), promotion, request)
            for first in range(0, self.blocks, JOB_BLOCKS)
        ]  # fmt: skip


def finish(tier, jobs: int) -> None:
    """Returns when so many jobs have ended, all well."""
    end = time.monotonic() + _MOST_SECONDS
    while jobs > 0:
        for result in tier.get_finished_jobs():
            assert result.success, result
            jobs -= 1
        assert time.monotonic() < end, f"{jobs} jobs did not end"
        time.sleep(0.0005)


def there_and_back(open_tier, memory: Memory) -> dict[str, float]:
    """GB/s to the tier and back to a new one, what it took of all cores, and the time until all blocks were found."""
    request, bytes_ = ReqContext(req_id="a request"), memory.blocks * memory.block_bytes
    memory.array[:] = memory.pattern
    tier = open_tier(memory)
    put = rates(lambda: [tier.submit_store(job) for job in memory.jobs(False, request)], tier, memory, bytes_, "put")
    tier.shutdown()
    memory.array[:] = 0
    tier = open_tier(memory)
    began, found = time.monotonic(), 0
    while found < memory.blocks:
        found = sum(tier.lookup(key, request) is LookupResult.HIT for key in memory.keys)
        tier.on_schedule_end(ScheduleEndContext((), ()))
        list(tier.get_finished_jobs())
        assert time.monotonic() < began + _MOST_SECONDS, f"{found} of {memory.blocks} blocks are found"
    seconds = time.monotonic() - began
    got = rates(lambda: [tier.submit_load(job) for job in memory.jobs(True, request)], tier, memory, bytes_, "get")
    tier.shutdown()
    assert np.array_equal(memory.array, memory.pattern), "a block came back otherwise"
    return put | got | {"found_ms": 1e3 * seconds}


def rates(submit, tier, memory: Memory, bytes_: int, verb: str) -> dict[str, float]:
    began, cpu = time.perf_counter(), time.process_time()
    submit()
    finish(tier, -(-memory.blocks // JOB_BLOCKS))
    wall = time.perf_counter() - began
    return {f"{verb}_gb_per_s": bytes_ / wall / 1e9, f"{verb}_cpu_s": time.process_time() - cpu}


def fs(folder: Path, threads: int):
    return lambda memory: FileSystemTierManager(
        spec(), memory.view, "fs", root_dir=str(folder / "fs"), n_read_threads=threads, n_write_threads=threads
    )


def torpor_disk(folder: Path, threads: int):
    return lambda memory: TorporTier(
        spec(), memory.view, "TorporTier", disk_dir=str(folder / "torpor"),
        disk_bytes=2 * memory.blocks * memory.block_bytes + (1 << 28), threads=threads + 1,
    )  # fmt: skip


def torpor_s3(prefix: str, threads: int):
    return lambda memory: TorporTier(
        spec(), memory.view, "TorporTier", kv_store=f"s3://{BUCKET}/{prefix}", kv_store_timeout_ms=60_000,
        kv_store_wait_ms=60_000, threads=threads + 1,
    )  # fmt: skip


def curl(server: S3Server, folder: Path, memory: Memory, prefix: str, threads: int) -> dict[str, float]:
    """The same bytes in objects of a job's size."""
    env = server.environment
    who = f"{env['AWS_ACCESS_KEY_ID']}:{env['AWS_SECRET_ACCESS_KEY']}"
    words = ["curl", "-sS", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", who,
             "-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "--expect100-timeout", "0.001", "-Z",
             "--parallel-immediate", "--parallel-max", str(threads)]  # fmt: skip
    source, target = folder / "source", folder / "target"
    source.mkdir(exist_ok=True)
    target.mkdir(exist_ok=True)
    names = [f"{first:06}" for first in range(0, memory.blocks, JOB_BLOCKS)]
    for number, name in enumerate(names):
        (source / name).write_bytes(memory.pattern[number * JOB_BLOCKS : (number + 1) * JOB_BLOCKS].tobytes())
    url = f"{env['AWS_ENDPOINT_URL']}/{BUCKET}/{prefix}"
    bytes_ = memory.blocks * memory.block_bytes
    seen = {}
    for verb, arguments in (
        ("put", [word for name in names for word in ("-T", str(source / name), f"{url}/{name}")]),
        ("get", [word for name in names for word in ("-o", str(target / name), f"{url}/{name}")]),
    ):
        began = time.perf_counter()
        subprocess.run([*words, *arguments], check=True, capture_output=True)
        seen[f"{verb}_gb_per_s"] = bytes_ / (time.perf_counter() - began) / 1e9
    return seen


def measure(rounds: int, blocks: int, block_bytes: int, threads: int, only: str | None, where: Path | None) -> dict:
    runs: dict[str, list] = {}
    memory = Memory(blocks, block_bytes)
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=where) as name:
            folder = Path(name)
            contestants = []
            if only in (None, "disk"):
                contestants += [
                    ("torpor disk", partial(there_and_back, torpor_disk(folder, threads), memory)),
                    ("vLLM fs", partial(there_and_back, fs(folder, threads), memory)),
                ]
            with contextlib.ExitStack() as stack:
                if only in (None, "s3"):
                    server = stack.enter_context(S3Server(folder / "s3"))
                    os.environ.update(server.environment)
                    curl(server, folder, memory, "warm", threads)  # the server makes its first volumes
                    contestants += [
                        ("torpor s3", partial(there_and_back, torpor_s3("kv", threads), memory)),
                        ("curl", partial(curl, server, folder, memory, "curl", threads)),
                    ]
                for contestant, run in contestants if number % 2 else reversed(contestants):
                    runs.setdefault(contestant, []).append(run())
    return {
        name: {what: statistics.median(run[what] for run in all_[1:]) for what in all_[0]}
        for name, all_ in runs.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/dev bench offloading", description=__doc__)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--blocks", type=count, default=96)
    parser.add_argument("--block-bytes", type=count, default=2 << 20)
    parser.add_argument("--threads", type=count, default=4, help="that store; torpor has one more, which only loads")
    parser.add_argument("--only", choices=("disk", "s3"))
    parser.add_argument("--folder", type=Path, help="where files are made; the system's temporary folder otherwise")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.rounds, options.blocks, options.block_bytes, options.threads, options.only, options.folder)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for name, row in result.items():
            print(f"{name:<12}" + "".join(f"  {what} {value:.2f}" for what, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
