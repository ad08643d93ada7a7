#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Weights of a new process: from a checkpoint (load_format="torpor") and from the model's safetensors (vLLM's loader).

fill:  the bytes from the file into the model, each piece of ours proved by its digest. Baseline: vLLM's default loader,
       which proves nothing. Ceiling: raw direct reads of the checkpoint's file into fresh memory, on all cores.
model: all of loading, from an empty model to one that can run: made, filled, packed for the CPU. The same baseline,
       with torpor's memory, which it is moved to; ceiling: making and packing alone, and the raw reads.

Files are cold: their pages are dropped before each round, or read past the page cache. "warm" is the baseline again
with its file cached. Each round runs every contestant once, after one that only warms; medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from bench_options import count

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
AT_ONCE = 16 << 20


def drop(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read(paths: list[Path]) -> None:
    for path in paths:
        path.read_bytes()


class Raw:
    """Reads a file whole, past the page cache, into fresh memory, as a new process must."""

    def __init__(self, path: Path):
        self._path, self._size = path, path.stat().st_size

    def run(self) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        count = os.cpu_count()
        memory = mmap.mmap(-1, -(-self._size // AT_ONCE) * AT_ONCE)
        memory.madvise(mmap.MADV_HUGEPAGE)

        def part(number: int) -> None:
            with memoryview(memory) as view:
                for at in range(number * AT_ONCE, self._size, count * AT_ONCE):
                    os.preadv(fd, [view[at : at + AT_ONCE]], at)

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(part, range(count)))
        memory.close()
        os.close(fd)


class Loading:
    """Loads the model of an engine again and again, as its worker does."""

    def __init__(self, vllm_config, checkpoint: str):
        from vllm.config import replace

        self._config = vllm_config
        torpor = {"load_format": "torpor", "model_loader_extra_config": {"checkpoint": checkpoint}}
        kinds = {"torpor": torpor, "default": {"load_format": "auto"}, "empty": {"load_format": "auto"}}
        self._load_configs = {name: replace(vllm_config.load_config, **options) for name, options in kinds.items()}

    def run(self, kind: str) -> tuple[float, float]:
        """Seconds of filling, and of all."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader

        from torpor import _core
        from torpor.vllm.memory import CpuWorkerMemory

        loader, fill = get_model_loader(self._load_configs[kind]), [0.0]
        stock = loader.load_weights

        def timed(model, model_config) -> None:
            began = time.perf_counter()
            if kind != "empty":
                stock(model, model_config)
            fill[0] = time.perf_counter() - began

        loader.load_weights = timed
        self._config.compilation_config.static_forward_context.clear()  # the layers of the model before
        runner = SimpleNamespace(model=None)
        began = time.perf_counter()
        memory = CpuWorkerMemory(_core.RankMemory({}), 0, "packed")
        with set_current_vllm_config(self._config), memory.loading_weights(runner):
            runner.model = loader.load_model(vllm_config=self._config, model_config=self._config.model_config)
        return fill[0], time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=os.environ.get("TORPOR_TEST_MODEL"))
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from vllm import LLM

    weights = sorted(Path(options.model).glob("*.safetensors"))
    with tempfile.TemporaryDirectory(prefix=".weights_load_bench-", dir=Path.cwd()) as store:
        torpor = {"torpor": {"checkpoint_dir": store}}
        llm = LLM(
            str(options.model), enforce_eager=True, dtype="bfloat16", max_model_len=1024, additional_config=torpor
        )
        report = llm.sleep(level=1, preserve_state=True, to="disk")
        chunks = Path(report.checkpoint) / "chunks-r0"
        size = report.saved_bytes
        loading, raw = Loading(llm.llm_engine.vllm_config, report.checkpoint), Raw(chunks)
        times: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):
            for name in ("torpor", "default", "warm", "empty", "raw"):
                (read if name == "warm" else drop)([*weights, chunks])
                if name == "raw":
                    began = time.perf_counter()
                    raw.run()
                    fill = whole = time.perf_counter() - began
                else:
                    fill, whole = loading.run("default" if name == "warm" else name)
                if number > 0:
                    times.setdefault(f"fill {name}", []).append(fill)
                    times.setdefault(f"model {name}", []).append(whole)
    took = {name: statistics.median(each) for name, each in times.items()}
    rows = []
    for what, ceiling in (("fill", took["fill raw"]), ("model", took["model empty"] + took["fill raw"])):
        ours, baseline = took[f"{what} torpor"], took[f"{what} default"]
        rows.append({
            "what": what, "bytes": size, "torpor_seconds": ours, "baseline_seconds": baseline,
            "baseline_warm_seconds": took[f"{what} warm"], "ceiling_seconds": ceiling,
            "times_baseline": baseline / ours, "of_ceiling": ceiling / ours,
        })  # fmt: skip
    if options.json:
        print(json.dumps({"bench": "weights_load", "rounds": options.rounds, "rows": rows}))
        return
    print(f"{size / 1e6:.0f} MB of weights, medians of {options.rounds} rounds")
    for row in rows:
        print(
            f"{row['what']:6} {row['torpor_seconds']:.3f} s; baseline {row['baseline_seconds']:.3f} s "
            f"(warm {row['baseline_warm_seconds']:.3f} s): {row['times_baseline']:.2f} times as fast; "
            f"ceiling {row['ceiling_seconds']:.3f} s: {row['of_ceiling']:.2f} of it"
        )


if __name__ == "__main__":
    main()
