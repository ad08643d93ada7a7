# SPDX-License-Identifier: Apache-2.0
"""Checks of libtorpor_memory.so by itself, over torpor's device without a GPU: they run on every machine.

Owner: memory_checks.py, which sets TORPOR_MEMORY_DEVICE=host. Threads: one. Failure: an exception fails the check.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

from memory_library import MemoryFailure, MemoryLibrary, library_path
from rows import Seen

GB = 1e9
SIZE = 5 << 20
MOST = 256 << 20  # moved by the check of speed
ROUNDS = 5


def filled(library: MemoryLibrary, tag: str, value: int, size: int = SIZE, keep: bool = True) -> int:
    with library.region(tag, keep):
        address = library.allocate(size)
    ctypes.memset(address, value, size)
    return address


def holds(address: int, value: int, size: int = SIZE) -> bool:
    return ctypes.string_at(address, size) == bytes([value]) * size


def cycle(options: Any) -> Iterator[Seen]:
    """Bytes are back at their addresses after each sleep; memory that is not kept comes back zeroed."""
    library = MemoryLibrary(library_path())
    kept, scratch = filled(library, "weights", 7), filled(library, "scratch", 9, keep=False)
    for number in range(ROUNDS):
        library.mark_dirty()
        library.sleep()
        library.wake()
        if not holds(kept, 7 + number) or not holds(scratch, 0):
            yield Seen(f"other bytes after sleep {number + 1}", False, {"cycle": number + 1})
            return
        ctypes.memset(kept, 8 + number, SIZE)
        ctypes.memset(scratch, 9, SIZE)
    library.free(kept, SIZE)
    library.free(scratch, SIZE)
    yield Seen(f"the same bytes after each of {ROUNDS} sleeps", True, {"cycles": ROUNDS})


def tags(options: Any) -> Iterator[Seen]:
    """Tags sleep and wake one by one."""
    library = MemoryLibrary(library_path())
    one, other = filled(library, "one", 1), filled(library, "other", 2)
    library.sleep("one")
    awake = holds(other, 2)
    library.sleep("other")
    library.wake("one")
    same = awake and holds(one, 1)
    library.wake("other")
    same = same and holds(other, 2)
    yield Seen("each tag by itself" if same else "other bytes", same, {})


def failures(options: Any) -> Iterator[Seen]:
    """A call that cannot be done says why, and changes nothing."""
    library = MemoryLibrary(library_path())
    address = filled(library, "weights", 3)
    errors = []
    for call in (lambda: library.sleep("none"), lambda: library.wake("weights"), lambda: library.allocate(-1)):
        try:
            call()
        except MemoryFailure as problem:
            errors.append(str(problem))
    named = len(errors) == 3 and "none" in errors[0] and "weights" in errors[1] and "-1" in errors[2]
    yield Seen("; ".join(errors)[:300], named and holds(address, 3), {"failures": len(errors)})


def speed(options: Any) -> Iterator[Seen]:
    """GB/s between host memory and host memory: it says that the library works, and nothing of a GPU."""
    library = MemoryLibrary(library_path())
    size = min(MOST, int(options.gib * (1 << 30)))
    address = filled(library, "weights", 5, size)
    sleeps, wakes = [], []
    for _ in range(ROUNDS):
        library.mark_dirty()
        began = time.perf_counter()
        library.sleep()
        asleep = time.perf_counter()
        library.wake()
        sleeps.append(asleep - began)
        wakes.append(time.perf_counter() - asleep)
    rates = {
        "sleep_gb_per_second": size / GB / sorted(sleeps)[ROUNDS // 2],
        "wake_gb_per_second": size / GB / sorted(wakes)[ROUNDS // 2],
    }
    same = holds(address, 5, size)
    text = f"sleep {rates['sleep_gb_per_second']:.1f} GB/s, wake {rates['wake_gb_per_second']:.1f} GB/s, host to host"
    yield Seen(text, same, {**rates, "bytes": size})
