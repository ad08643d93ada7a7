# SPDX-License-Identifier: Apache-2.0
"""Memory that torch's pools keep below torpor's regions, over pools as strict as torch's, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

GPU_PATH = Path(__file__).parents[1] / "gpu_path"
BEGIN = """
import torch
from gpu_path import pools
pools.install()
from torpor import memory

def held(tag):
    [ledger] = memory.ledger().values()
    tag = ledger["tags"].get(tag, {"region_bytes": 0})
    return tag["region_bytes"] >> 20, ledger["device_physical_bytes"] >> 20

def fresh(value, mebibytes=1):
    return torch.full((mebibytes << 20,), value, dtype=torch.uint8)
"""


def over_pools(code: str, **variables: str) -> None:
    """Run a program over pools as torch has them: what torch does not allow fails it."""
    done = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}\n{code}\nassert not pools.misused(), pools.misused()"],
        env=os.environ
        | variables
        | {
            "TORPOR_MEMORY_DEVICE": "host",
            "PYTHONPATH": os.pathsep.join((str(GPU_PATH), os.environ.get("PYTHONPATH", ""))),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_what_is_freed_in_a_pool_that_is_in_use_goes_back_to_the_device():
    """Over pools as torch has them: a pool that hands out a segment without memory ends the process."""
    code = """
with memory.region("weights"):
    used = fresh(7)
    later = fresh(8)
    fresh(9, mebibytes=4)  # repacking frees it at once
assert held("weights") == (2, 2), held("weights")
assert memory.sleep("weights")["copied_bytes"] == 2 << 20
memory.wake("weights")
assert used.eq(7).all() and later.eq(8).all()
del later
assert held("weights") == (2, 2)
with memory.region("weights"):
    assert held("weights") == (1, 1)
    third = fresh(3)  # torch does not hand out again what has no memory
assert held("weights") == (2, 2) and used.eq(7).all() and third.eq(3).all()
memory.sleep("weights")
del third
memory.release_unused()  # also while it sleeps
assert memory.wake("weights")["physical_bytes"] == 1 << 20
assert used.eq(7).all()
del used
memory.release_unused()
assert held("weights") == (0, 0)

# What torch can hand out again stays: somebody has the pool, or a graph.
with memory.region("held") as pool:
    used = fresh(7)
    fresh(9)
assert held("held") == (2, 2)
with torch.cuda.use_mem_pool(pool):
    again = fresh(4)
assert held("held") == (2, 2) and again.eq(4).all() and used.eq(7).all()
del again
memory.release_unused()
assert held("held") == (2, 2)
del pool
memory.release_unused()
assert held("held") == (1, 1)

with memory.region("graphs") as pool:
    used = fresh(7)
    with pools.captured(pool.id):
        fresh(9)  # a replay writes there
    del pool
memory.release_unused()
assert held("graphs") == (2, 2)
"""
    over_pools(code)


def test_no_pool_ends_while_one_is_allocated_from():
    """torch ends the process then, whichever thread allocates. What is unused goes back to the device all the same."""
    over_pools("""
import threading
from contextlib import contextmanager
from torpor.torch_memory_saver import torch_memory_saver as saver
torch.cuda.current_device = lambda: 0

@contextmanager
def in_another_thread():
    begun, end = threading.Event(), threading.Event()

    def other():
        with memory.region("outer"):
            begun.set()
            end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()

def nothing_is_given_back_beside_a_capture():
    with memory.allocating(capturing=True):
        all_is_freed()
        memory.make_room()
        assert held("inner") == (1, held("outer")[0] + 1)

def without_allocations():
    with memory.region("inner"):
        pass

def all_is_freed():
    with memory.region("inner"):
        fresh(2)

def grows(mebibytes=2):
    tensor = None
    for size in range(1, mebibytes + 1):
        tensor = None
        with memory.region("inner"):
            tensor = fresh(3, size)
    return tensor

def disabled():
    with saver.disable():
        fresh(2)

def disabled_and_in_use():
    with saver.disable():
        return fresh(3)

for outer in (lambda: memory.region("outer"), lambda: saver.region("outer", True), in_another_thread):
    for inner in (without_allocations, all_is_freed, grows, disabled, disabled_and_in_use,
                  nothing_is_given_back_beside_a_capture):
        with outer():
            used = fresh(7)
            of_inner = inner()
            memory.release_unused()
            assert held("inner") == (2 if inner is grows else 0, held("outer")[0] + held("inner")[0]), inner
        assert used.eq(7).all() and (of_inner is None or of_inner.eq(3).all())
        unused = [pool for pools_of in memory._retired.values() for pool in pools_of if not memory._is_used(pool)]
        assert not unused and not pools.misused(), (outer, inner, unused, pools.misused())
        used = of_inner = None
        memory.release_unused()
""")


def test_a_wake_takes_back_what_torch_keeps_unused():
    """Whoever computes while memory sleeps leaves memory in torch's cache."""
    over_pools(
        """
from torpor.torch_memory_saver import torch_memory_saver as saver
with memory.region("weights"):
    used = fresh(7, mebibytes=6)
for sleep, wake in ((memory.sleep, memory.wake), (saver.pause, saver.resume)):
    sleep("weights")
    pools.fill_cache(4 << 20)
    wake("weights")
    assert not pools.cached() and used.eq(7).all()
""",
        TORPOR_HOST_DEVICE_BYTES=str(8 << 20),
    )


def test_a_torch_that_cannot_say_what_of_a_pool_is_in_use_is_refused():
    over_pools("""
from torpor.errors import Unsupported
pools.MemPool.snapshot = lambda self: self._pool.snapshot()  # as before torch 2.11
try:
    with memory.region("weights"):
        raise AssertionError("not refused")
except Unsupported as problem:
    assert "2.11" in str(problem), problem
""")


def test_a_failure_of_torch_loses_no_pool():
    """The end of a pool would free memory that tensors have."""
    over_pools("""
with memory.region("weights"):
    used = fresh(7)
stock = pools.MemPool.snapshot

def fails(self, include_traces=True):
    raise RuntimeError("planted")

pools.MemPool.snapshot = fails
try:
    memory.release_unused()
    raise AssertionError("it did not fail")
except RuntimeError:
    pass
pools.MemPool.snapshot = stock
assert not pools.misused() and used.eq(7).all()
del used
memory.release_unused()
assert held("weights") == (0, 0)
""")
