# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.MemPool for CPU tensors, over torpor's allocator: memory as torch's caching allocator gives it out.

A pool takes segments from torpor and divides them. What is freed stays in its segment, and is given out again in the
same pool only. torpor gets the segments back when the MemPool object ends. It must not end while something of it is in
use, or while a graph is captured: some versions of torch then free memory that tensors have. Nor may it end while any
thread allocates from a pool: torch then ends the process. Memory that is given out again has the content that it had
before; what torpor took meanwhile is an invalid address then, and the process ends.

The sizes are torch's divided by 16, because the models are small: several tensors share a segment, and a tag has
several segments.

install() puts it in place of torch's classes, which a torch for CPUs has only by name. torch has a GPU to torpor only.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALIGNMENT = 512
_SMALL, _SMALL_SEGMENT = 64 << 10, 128 << 10  # blocks up to the first come from segments of the second size
_MEDIUM, _MEDIUM_SEGMENT = 640 << 10, 1280 << 10
_ROUND = 128 << 10  # a larger block has a segment of its own, of a multiple of this size

_pools: weakref.WeakValueDictionary[tuple[int, int], _PrivatePool] = weakref.WeakValueDictionary()
_misused: list[str] = []  # what nobody may do; what is asked next fails with it
_cached: list[int] = []  # addresses
_active = threading.local()  # .pools: of this thread, the innermost last
_lock = threading.RLock()  # a tensor may be freed at any allocation


def install() -> None:
    torch.cuda.is_available = _true_to_torpor(torch.cuda.is_available)
    torch.cuda.is_initialized = _true_to_torpor(torch.cuda.is_initialized)
    torch.cuda.is_current_stream_capturing = lambda: bool(getattr(_active, "captures", 0))
    torch.cuda.MemPool = MemPool
    torch.cuda.use_mem_pool = use_mem_pool
    torch.cuda.empty_cache = empty_cache
    torch.accelerator.empty_cache = empty_cache
    torch.cuda.memory.CUDAPluggableAllocator = PluggableAllocator


def _true_to_torpor(stock: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return asks.split(".")[0] == "torpor" or stock()

    return answer


class PluggableAllocator:
    def __init__(self, path: str, malloc: str, free: str):
        pass

    def allocator(self) -> PluggableAllocator:
        return self


class MemPool:
    """As torch has it: the object keeps what was freed in its pool."""

    def __init__(self, allocator: PluggableAllocator | None = None):
        self._pool = _PrivatePool(own=allocator is not None)
        weakref.finalize(self, _PrivatePool.end, self._pool).atexit = False

    @property
    def id(self) -> tuple[int, int]:
        return self._pool.id

    def use_count(self) -> int:
        """This object, who allocates from the pool now, and graphs that were captured into it."""
        return 1 + self._pool.users

    def snapshot(self, include_traces: bool = True) -> list[dict]:
        return self._pool.snapshot()


def misused() -> list[str]:
    return _misused


def alive() -> list[_PrivatePool]:
    return list(_pools.values())


@contextmanager
def use_mem_pool(pool: MemPool, device=None):
    with _into(pool._pool):
        yield


@contextmanager
def captured(pool_id: tuple[int, int]):
    """As torch.cuda.graph(pool=…): what is allocated inside comes from that pool, and nothing can be freed."""
    _active.captures = getattr(_active, "captures", 0) + 1
    try:
        with _into(_pools[pool_id]):
            _pools[pool_id].users += 1  # for good: the graph is never reset
            yield
    finally:
        _active.captures -= 1


def empty_cache() -> None:
    assert not getattr(_active, "captures", 0), "the cache is emptied while a graph is captured"
    assert not _misused, _misused
    from torpor import memory

    while _cached:
        memory.free(_cached.pop())


def fill_cache(size: int) -> None:
    """As if somebody had computed: torch keeps so many bytes of the device that nothing uses."""
    from torpor import memory

    with memory.scope("torch's own"):
        _cached.append(memory.allocate(size))


def cached() -> int:
    """How many allocations torch keeps so."""
    return len(_cached)


@contextmanager
def _into(pool: _PrivatePool):
    stack = _active.__dict__.setdefault("pools", [])
    with nullcontext() if stack else _Allocating():  # one is enough: the innermost pool has what is allocated
        stack.append(pool)
        pool.users += 1
        pool.allocating += 1
        try:
            yield
        finally:
            pool.allocating -= 1
            pool.users -= 1
            stack.pop()


class _Segment:
    def __init__(self, address: int, size: int):
        self.address = address
        self.size = size
        self._blocks: list[list[int]] = [[0, size, 0]]  # in order: offset, size, bytes asked for; 0: it is free

    def take(self, asked: int) -> int | None:
        size = _rounded(asked, _ALIGNMENT)
        for number, (offset, room, used) in enumerate(self._blocks):
            if not used and room >= size:
                rest = [[offset + size, room - size, 0]] if room > size else []
                self._blocks[number : number + 1] = [[offset, size, asked], *rest]
                return self.address + offset
        return None

    def give(self, address: int) -> None:
        next(block for block in self._blocks if block[0] == address - self.address)[2] = 0
        joined: list[list[int]] = []  # free neighbours are one
        for block in self._blocks:
            if joined and not block[2] and not joined[-1][2]:
                joined[-1][1] += block[1]
            else:
                joined.append(block)
        self._blocks = joined

    @property
    def allocated_size(self) -> int:
        return sum(size for _, size, used in self._blocks if used)

    def snapshot(self) -> dict:
        blocks = [
            {
                "address": self.address + offset,
                "size": size,
                "requested_size": used,
                "state": "active_allocated" if used else "inactive",
            }
            for offset, size, used in self._blocks
        ]
        used = self.allocated_size
        sizes = {"total_size": self.size, "allocated_size": used, "active_size": used}
        return {"device": 0, "address": self.address} | sizes | {"blocks": blocks}


def _give_back(segment: _Segment) -> None:
    """As torch does: it hears of no failure, and forgets the segment."""
    from torpor import _core

    free = ctypes.CDLL(_core.__file__).torpor_torch_free
    free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    free(segment.address, segment.size, 0, None)


class _PrivatePool:
    _numbers = itertools.count(1)

    def __init__(self, own: bool):
        self.id = (0, next(self._numbers))
        self.users = 0  # beside its MemPool
        self.allocating = 0  # those of them that allocate from it now
        self._own = own  # its memory is torpor's; else torch's
        self._torchs: dict[int, ctypes.Array] = {}  # torch's, by address
        self._segments: list[_Segment] = []
        self._freed: collections.deque[int] = collections.deque()  # addresses
        _pools[self.id] = self

    @property
    def segments(self) -> list[_Segment]:
        while self._freed:
            address = self._freed.popleft()
            segment = next(each for each in self._segments if each.address <= address < each.address + each.size)
            segment.give(address)
        return self._segments

    def take(self, size: int) -> tuple[int, bool]:
        """An address, and whether its memory was never used."""
        assert not _misused, _misused
        with _lock:
            whole = _SMALL_SEGMENT if size <= _SMALL else _MEDIUM_SEGMENT if size <= _MEDIUM else _rounded(size, _ROUND)
            for segment in self.segments:
                if segment.size == whole and (address := segment.take(size)) is not None:
                    return address, False
            segment = _Segment(self._allocate(whole), whole)
            self._segments.append(segment)
            address = segment.take(size)
            assert address is not None
            return address, True

    def _allocate(self, size: int) -> int:
        from torpor import memory

        if self._own:
            return memory.allocate(size)
        buffer = (ctypes.c_char * size)()
        self._torchs[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def give(self, address: int) -> None:
        """Called wherever Python frees a tensor, so perhaps in the middle of take()."""
        self._freed.append(address)

    def end(self) -> None:
        """Called when the MemPool object has ended, where an exception would reach nobody."""
        with _lock:
            if getattr(_active, "captures", 0):
                _misused.append("a pool ended while a graph was captured")
            if any(pool.allocating for pool in alive()):
                _misused.append("a pool ended while one was allocated from")
            if used := sum(each.allocated_size for each in self.segments):
                _misused.append(f"a pool ended with {used} bytes in use")
                return
            for segment in self._segments if self._own else ():
                _give_back(segment)
            self._torchs = {}
            self._segments = []

    def snapshot(self) -> list[dict]:
        with _lock:
            return [each.snapshot() for each in self.segments]


_CONTENT = {torch.ops.aten.empty.memory_format: "none", torch.ops.aten.zeros.default: "zeros"}


class _Allocating(TorchDispatchMode):
    """What an operation allocates for its results is moved into the innermost pool."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before = () if function is torch.ops.aten.lift_fresh.default else (args, kwargs)  # of torch.tensor()
        known = {_address(tensor) for tensor in tree_leaves(before) if _has_storage(tensor)}
        for tensor in tree_leaves(result):
            if _has_storage(tensor) and _address(tensor) not in known:
                known.add(_move(tensor, _CONTENT.get(function, "copied")))
        return result


def _has_storage(item) -> bool:
    return isinstance(item, torch.Tensor) and item.device.type == "cpu" and item.untyped_storage().nbytes() > 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _move(tensor: torch.Tensor, content: str) -> int:
    """Return the new address. Without content the tensor has what was there."""
    old = tensor.untyped_storage()
    size = old.nbytes()
    pool = _active.pools[-1]
    address, fresh = pool.take(size)
    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, pool.give, address).atexit = False
    if content == "copied" or (content == "zeros" and not fresh):
        ctypes.memmove(address, old.data_ptr(), size)
    new = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()  # it holds the buffer
    tensor.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
    return address
