# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch_memory_saver, over the stand-in for cumem."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

_memory = SimpleNamespace(saved={}, sizes={})
_place = str(Path(__file__).parent)


def _malloc(size, device, stream):
    address = _cumem.my_malloc(size, device, stream)
    _memory.sizes[address] = size
    return address


class _Saver:
    hook_mode = ""

    @contextmanager
    def region(self, tag, enable_cpu_backup):
        allocator = torch.cuda.memory.CUDAPluggableAllocator(_place, "malloc", "free")
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(allocator.allocator())):
            yield

    def pause(self):
        for address, size in _memory.sizes.items():
            _memory.saved[address] = ctypes.string_at(address, size)
            _cumem.python_unmap_and_release(0, size, address, 0)

    def resume(self):
        for address, saved in _memory.saved.items():
            ctypes.memmove(address, saved, len(saved))


def _load():
    import importlib.util

    spec = importlib.util.spec_from_file_location("fake_cumem", Path(__file__).parents[1] / "cumem.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.init_module(lambda handle: None, lambda address: None)
    return module


_cumem = _load()
torch.cuda.OTHERS[_place] = SimpleNamespace(malloc=_malloc, free=_cumem.my_free)
torch_memory_saver = _Saver()
