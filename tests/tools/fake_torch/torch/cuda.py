# SPDX-License-Identifier: Apache-2.0
"""Stand in for torch.cuda: pools over a library's malloc and free, memory in use, captured graphs."""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import contextmanager
from types import SimpleNamespace

PAGE = 4096
TOTAL = 1 << 40
OTHERS: dict = {}  # allocators in Python, by the path of their module


def fault() -> str:
    return os.environ.get("FAKE_TORCH_FAULT", "")


class _Allocator:
    def __init__(self, path, malloc, free):
        self._allocator = self
        if path in OTHERS:
            self.malloc, self.release = getattr(OTHERS[path], malloc), getattr(OTHERS[path], free)
            return
        library = ctypes.CDLL(path)
        self.malloc, self.release = getattr(library, malloc), getattr(library, free)
        self.malloc.restype = ctypes.c_void_p
        self.malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.release.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def allocator(self):
        return self


memory = SimpleNamespace(CUDAPluggableAllocator=_Allocator)


class _Blocks:
    """A pool's blocks. They outlive the pool as long as a tensor uses them."""

    def __init__(self, allocator):
        self.allocator, self.gone, self.free, self.used = allocator, False, [], set()

    def take(self, size):
        made = SimpleNamespace(address=self.allocator.malloc(size, 0, None), size=size, blocks=self)
        if not made.address:
            raise RuntimeError("CUDA out of memory")
        made.free = lambda: self.give_back(made)
        self.used.add((made.address, size))
        return made

    def give_back(self, block):
        self.free.append((block.address, block.size))
        self.trim()

    def trim(self):
        if not self.gone or fault() == "keeps":
            return
        while self.free:
            address, size = self.free.pop()
            self.used.discard((address, size))
            self.allocator.release(address, size, 0, None)


_all: list[_Blocks] = []
_pools: list[_Blocks] = []  # those in use, the innermost last
_captured: list[list] = []  # operations of the captures in progress


class MemPool:
    def __init__(self, allocator):
        self.blocks = self.id = _Blocks(allocator)
        _all.append(self.blocks)

    def __del__(self):
        self.blocks.gone = True
        self.blocks.trim()


@contextmanager
def use_mem_pool(pool):
    _pools.append(pool.blocks)
    try:
        yield
    finally:
        _pools.pop()


def allocate(size):
    if _pools:
        return _pools[-1].take(size)
    held = ctypes.create_string_buffer(size)
    return SimpleNamespace(address=ctypes.addressof(held), held=held, free=lambda: None)


def is_available():
    return fault() != "no_gpu"


def synchronize():
    pass


def empty_cache():
    pass


def _resident(address, size):
    """Bytes of these pages that the system has given."""
    first, count = address // PAGE, -(-size // PAGE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = struct.unpack(f"<{count}Q", file.read(8 * count))
    return PAGE * sum(entry >> 63 for entry in entries)


def mem_get_info():
    used = sum(_resident(*block) for blocks in _all for block in blocks.used)
    return TOTAL - used, TOTAL


class CUDAGraph:
    def __init__(self):
        self.operations = []

    def replay(self):
        for operation in self.operations:
            operation()
        if fault() == "other_bytes":
            self.operations[-1].__closure__[0].cell_contents.random_()


@contextmanager
def graph(made, pool=None):
    if fault() == "capture":
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
    _captured.append(made.operations)
    if pool is not None:
        _pools.append(pool)
    try:
        yield
    finally:
        _captured.pop()
        if pool is not None:
            _pools.pop()


def run(operation):
    """Do it now, or when the graph that is captured is replayed."""
    if _captured:
        _captured[-1].append(operation)
    else:
        operation()
