# SPDX-License-Identifier: Apache-2.0
"""Checks of torpor below torch on a GPU. Each takes the options, yields what it sees, and has a process of its own.

Owner: memory_checks.py. Threads: one. Failure: an exception fails the check; NotHere says what the machine lacks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rivals
import torch
from rows import NotHere, Seen

GB = 1e9
GIB = 1 << 30
CYCLES = 20
SIDE = 2048  # of the matrix of weights
GRAPHS = 300
SIZES_MIB = (256, 64, 24, 3, 1)  # of the tensors of weights, in turns


def needs_gpu() -> None:
    if not torch.cuda.is_available():
        raise NotHere("torch finds no CUDA device")


def pool(options: Any) -> Iterator[Seen]:
    """A captured graph over weights and buffers in torpor's pools replays after each of some sleeps."""
    torpor = rivals.Torpor()
    with torpor.region("weights"):
        weights = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    with torpor.region("runtime"):
        given = torch.randn(64, SIDE, device="cuda", dtype=torch.bfloat16)
        result = torch.empty_like(given)
    for _ in range(3):
        torch.matmul(given, weights, out=result)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(given, weights, out=result)
    graph.replay()
    torch.cuda.synchronize()
    wanted, before = result.clone(), [t.data_ptr() for t in (weights, given, result)]
    for cycle in range(CYCLES):
        result.zero_()
        torpor.dirty()
        torpor.sleep()
        torpor.wake()
        graph.replay()
        torch.cuda.synchronize()
        same = torch.equal(result, wanted) and before == [t.data_ptr() for t in (weights, given, result)]
        if not same:
            yield Seen(f"other values or addresses after sleep {cycle + 1}", False, {"cycle": cycle + 1})
            return
    yield Seen(f"the same after each of {CYCLES} sleeps", True, {"cycles": CYCLES})


def graph_pool(options: Any) -> Iterator[Seen]:
    """A capture may allocate in torpor's pool, and the graph replays after a sleep."""
    torpor = rivals.Torpor()
    own = torpor.new_pool()
    given = torch.randn(1 << 20, device="cuda")
    with torpor.library.region("cudagraph"):
        graph = torch.cuda.CUDAGraph()
        _ = given * 2
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=own.id):
            result = given * 2
    graph.replay()
    torch.cuda.synchronize()
    wanted = result.clone()
    torpor.sleep()
    torpor.wake()
    graph.replay()
    torch.cuda.synchronize()
    same = bool(torch.equal(result, wanted))
    yield Seen("the graph replays" if same else "the graph gives other values", same, {})


def trim(options: Any) -> Iterator[Seen]:
    """Memory of a freed tensor comes back when its pool goes; how much torch keeps until then is a figure."""
    size = max(1 << 20, int(options.gib * GIB / 2))
    torpor = rivals.Torpor()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    with torpor.region("workspace"):
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
    del tensor
    gc.collect()
    torch.cuda.empty_cache()
    in_pool = free - torch.cuda.mem_get_info()[0]
    torpor.pools.clear()
    gc.collect()
    torch.cuda.empty_cache()
    left = free - torch.cuda.mem_get_info()[0]
    figures = {"freed_bytes": size, "kept_by_pool_bytes": in_pool, "kept_after_pool_bytes": left}
    yield Seen(
        f"torch's pool keeps {in_pool / GB:.2f} GB of {size / GB:.2f}, {left / GB:.2f} GB once it is gone",
        left < 0.05 * size,
        figures,
    )


def capture(options: Any) -> Iterator[Seen]:
    """Capture graphs, in torch's default mode, while torpor pins host memory for the weights in the background."""
    torpor = rivals.Torpor()
    weights = fill(torpor, options.gib)
    given = torch.randn(256, 256, device="cuda")
    for _ in range(3):
        _ = given @ given
    torch.cuda.synchronize()
    failures: list[str] = []
    captured, began, resident = 0, time.monotonic(), resident_bytes()
    while captured < GRAPHS and time.monotonic() - began < stretch(options):
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(200):
                    _ = given @ given
        except RuntimeError as problem:
            failures.append(str(problem).splitlines()[0][:160])
        captured += 1
    grown = resident_bytes() - resident
    yield Seen(
        f"{len(failures)} of {captured} captures failed while {grown / GB:.2f} GB of host memory came",
        not failures,
        {"graphs": captured, "failed": len(failures), "first": failures[:1], "host_bytes": grown,
         "tensors": len(weights)},
    )  # fmt: skip


def stall(options: Any) -> Iterator[Seen]:
    """Run short steps alone, then beside torpor as it pins host memory for the weights in the background."""
    counter = torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    alone = steps(counter, stretch(options) / 4)
    resident = resident_bytes()
    torpor = rivals.Torpor()
    weights = fill(torpor, options.gib)
    torch.cuda.synchronize()
    beside = steps(counter, stretch(options))
    grown = resident_bytes() - resident
    figures = {f"{when}_{what}_ms": value for when, times in (("alone", alone), ("beside", beside))
               for what, value in times.items()}  # fmt: skip
    yield Seen(
        f"longest step {beside['worst']:.2f} ms, alone {alone['worst']:.2f}; {grown / GB:.2f} GB of host memory came",
        beside["worst"] < alone["worst"] + options.stall_ms,
        {**figures, "host_bytes": grown, "tensors": len(weights)},
    )


def stretch(options: Any) -> float:
    """Return how long to measure beside pinning, so that the check ends in its time."""
    return min(options.stretch_seconds, options.seconds / 2)


def steps(counter: Any, seconds: float) -> dict[str, float]:
    """Return milliseconds of the steps that fit: half of them took less than p50, all but one of 100 less than p99."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not times:
        began = time.perf_counter()
        counter.add_(1)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    times.sort()
    return {"p50": times[len(times) // 2], "p99": times[len(times) * 99 // 100], "worst": times[-1]}


def speed(options: Any, who: str, rounds: int = 4, changed: bool = True) -> Iterator[Seen]:
    """Sleep and wake tensors of many sizes. The first round takes host memory; `changed`: all bytes are copied."""
    rival = rivals.make(who)
    tensors = fill(rival, options.gib)
    torch.cuda.synchronize()
    wanted, addresses = sums(tensors), [t.data_ptr() for t in tensors]
    size = sum(t.numel() * t.element_size() for t in tensors)
    free = torch.cuda.mem_get_info()[0]
    if options.arena_seconds:
        time.sleep(options.arena_seconds)
    for number in range(rounds):
        if changed:
            rival.dirty()
        torch.cuda.synchronize()
        began = time.perf_counter()
        rival.sleep()
        asleep = time.perf_counter()
        given_back = torch.cuda.mem_get_info()[0] - free
        resumed = time.perf_counter()
        rival.wake()
        torch.cuda.synchronize()
        awake = time.perf_counter()
        same = sums(tensors) == wanted and addresses == [t.data_ptr() for t in tensors]
        figures = {"who": who, "round": number, "bytes": size, "tensors": len(tensors),
                   "sleep_seconds": asleep - began, "wake_seconds": awake - resumed,
                   "sleep_gb_per_second": size / GB / (asleep - began),
                   "wake_gb_per_second": size / GB / (awake - resumed), "given_back_bytes": given_back}  # fmt: skip
        seen = (
            f"sleep {figures['sleep_gb_per_second']:.1f} GB/s, wake {figures['wake_gb_per_second']:.1f} GB/s, "
            f"{given_back / GB:.2f} of {size / GB:.2f} GB given back{'' if same else ', other bytes or addresses'}"
        )
        yield Seen(seen, same and given_back > 0.9 * size, figures, f", round {number}")


def fill(rival: Any, gib: float) -> list:
    """Make tensors of random integers in the tag "weights"."""
    left, made = int(gib * GIB) // 8 * 8, []
    with rival.region("weights"):
        while left > 0:
            for mib in SIZES_MIB:
                size = min(left, mib << 20)
                if size > 0:
                    made.append(torch.empty(size // 8, dtype=torch.int64, device="cuda").random_())
                    left -= size
    return made


def sums(tensors: list) -> list[int]:
    return [int(tensor.sum()) for tensor in tensors]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
