# SPDX-License-Identifier: Apache-2.0
"""Allocators below torch whose memory sleeps: torpor, vLLM's cumem, torch_memory_saver. All have the same four calls.

Owner: the check that makes one, in a process of its own. Threads: one. Failure: make() raises NotHere where the machine
lacks an allocator, and names what is missing.
"""

from __future__ import annotations

import ctypes
import gc
import glob
import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from memory_library import MemoryLibrary, library_path
from rows import NotHere

CUMEM_VARIABLE = "TORPOR_CHECK_CUMEM"  # path of vLLM's cumem_allocator.abi3.so
CUMEM = "cumem_allocator.abi3.so"
_COPY_ANY_WAY = 4  # cudaMemcpyDefault


class Torpor:
    def __init__(self) -> None:
        path = library_path()
        self.library = MemoryLibrary(path)
        self.allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "torpor_torch_malloc", "torpor_torch_free")
        self.pools: list = []

    def new_pool(self) -> Any:
        return torch.cuda.MemPool(self.allocator.allocator())

    @contextmanager
    def region(self, tag: str) -> Iterator[Any]:
        pool = self.new_pool()
        self.pools.append(pool)
        with self.library.region(tag), torch.cuda.use_mem_pool(pool):
            yield pool

    def sleep(self) -> None:
        self.library.sleep()

    def wake(self) -> None:
        self.library.wake()

    def dirty(self) -> None:
        self.library.mark_dirty()


class TorchMemorySaver:
    def __init__(self) -> None:
        if importlib.util.find_spec("torch_memory_saver") is None:
            raise NotHere("torch_memory_saver is not installed")
        import torch_memory_saver as package

        if importlib.util.find_spec("torch_memory_saver.binary_wrapper") is None:
            raise NotHere(f"{package.__file__} is torpor's replacement of torch_memory_saver, not the original")
        self.saver = package.torch_memory_saver
        self.saver.hook_mode = "torch"

    def region(self, tag: str) -> Any:
        return self.saver.region(tag=tag, enable_cpu_backup=True)

    def sleep(self) -> None:
        self.saver.pause()

    def wake(self) -> None:
        self.saver.resume()

    def dirty(self) -> None:
        """Do nothing: each pause copies everything."""


class CuMem:
    """Sleep and wake as vLLM's vllm/device_allocator/cumem.py does, with vLLM's own library and without vLLM."""

    def __init__(self) -> None:
        path = find_cumem()
        self.runtime = _cuda_runtime()
        spec = importlib.util.spec_from_file_location("cumem_allocator", path)
        if spec is None or spec.loader is None:
            raise NotHere(f"{path} is no module of this Python")
        self.module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(self.module)
        except ImportError as problem:
            raise NotHere(f"{path} cannot be loaded: {problem}") from problem
        self.handles: dict[int, tuple] = {}
        self.saved: dict[int, Any] = {}
        self._malloc = self._note  # the module keeps no reference
        self._free = self.handles.pop
        self.module.init_module(self._malloc, self._free)
        self.allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "my_malloc", "my_free")
        self.pools: list = []

    def _note(self, handle: tuple) -> None:
        self.handles[handle[2]] = handle

    @contextmanager
    def region(self, tag: str) -> Iterator[Any]:
        pool = torch.cuda.MemPool(self.allocator._allocator)
        self.pools.append(pool)
        with torch.cuda.use_mem_pool(pool):
            yield pool

    def _copy(self, to: int, source: int, size: int) -> None:
        if code := self.runtime.cudaMemcpy(to, source, size, _COPY_ANY_WAY):
            raise RuntimeError(f"cudaMemcpy returned {code}")

    def sleep(self) -> None:
        for address, handle in self.handles.items():
            saved = torch.empty(handle[1], dtype=torch.uint8, device="cpu", pin_memory=True)
            self._copy(saved.data_ptr(), address, handle[1])
            self.saved[address] = saved
            self.module.python_unmap_and_release(*handle)
        gc.collect()
        torch.cuda.empty_cache()

    def wake(self) -> None:
        for address, handle in self.handles.items():
            self.module.python_create_and_map(*handle)
            self._copy(address, self.saved.pop(address).data_ptr(), handle[1])

    def dirty(self) -> None:
        """Do nothing: each sleep copies everything."""


def find_cumem() -> Path:
    """Return vLLM's library: the one that TORPOR_CHECK_CUMEM names, one beside this file, or that of vLLM here."""
    candidates = [os.environ.get(CUMEM_VARIABLE), Path(__file__).resolve().parent / CUMEM]
    spec = importlib.machinery.PathFinder.find_spec("vllm")  # finds the folder, and imports nothing of it
    if spec is not None and spec.submodule_search_locations:
        candidates += [Path(folder) / CUMEM for folder in spec.submodule_search_locations]
    for candidate in candidates:
        if candidate and Path(candidate).exists():
            return Path(candidate)
    raise NotHere(f"vLLM's {CUMEM} is not here: name it in {CUMEM_VARIABLE}, or put it beside {Path(__file__).name}")


def _cuda_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch loaded."""
    version = (torch.version.cuda or "0").split(".")[0]
    folder = Path(torch.__path__[0]).parent
    for library in glob.glob(str(folder / f"nvidia/**/libnvrtc.so.{version}"), recursive=True):
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # vLLM's library wants it
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{version}")
    except OSError as problem:
        raise NotHere(f"no CUDA runtime: {problem}") from problem
    runtime.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return runtime


RIVALS = {"torpor": Torpor, "cumem": CuMem, "torch_memory_saver": TorchMemorySaver}


def make(name: str) -> Any:
    return RIVALS[name]()
