# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's cumem_allocator: memory of this process, whose content goes when it is unmapped."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace

from torch import cuda

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_held: dict[int, mmap.mmap] = {}
_callbacks = SimpleNamespace()


def init_module(malloc, free):
    _callbacks.malloc, _callbacks.free = malloc, free


def my_malloc(size, device, stream):
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(made))
    _held[address] = made
    _callbacks.malloc((device, size, address, 0))
    return address


def my_free(address, size, device, stream):
    _callbacks.free(address)
    del _held[address]


def python_unmap_and_release(device, size, address, handle):
    if _libc.madvise(address, size, mmap.MADV_DONTNEED) != 0:
        raise RuntimeError("madvise failed")


def python_create_and_map(device, size, address, handle):
    pass


cuda.OTHERS[__spec__.origin] = SimpleNamespace(my_malloc=my_malloc, my_free=my_free)
