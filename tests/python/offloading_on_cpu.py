# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CUDA's streams, events and batch copy, with which vLLM's own OffloadingConnector and
SimpleCPUOffloadConnector run on a CPU.

All that a connector decides stays vLLM's: what it stores, evicts and loads, and when a request waits. A copy runs on
a thread of its direction, in its order, without Python's lock, and its event has happened when it is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

COUNTS = {"stored": 0, "loaded": 0}  # pieces of blocks that were copied
_PIECES = 1024  # IOV_MAX of Linux
_copy_pieces = ctypes.CDLL(None, use_errno=True).process_vm_readv
_copy_pieces.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
_copy_pieces.restype = ctypes.c_ssize_t


class Stream:
    cuda_stream = 0
    priority_range = staticmethod(lambda: (0, 0))

    def __init__(self, *_, **__):
        self.last = None  # of what was given to it, a Future

    def wait_stream(self, _):
        pass  # the model's step is over when Python goes on

    wait_event = wait_stream  # one thread a direction keeps the order


class Event:
    def __init__(self, *_, **__):
        self._future = None

    def record(self, stream=None):
        self._future = stream.last  # None: what was copied on that stream is copied already

    def query(self):
        if self._future is None or not self._future.done():
            return self._future is None
        self._future.result()  # raises what the copy raised
        return True

    def synchronize(self):
        if self._future is not None:
            self._future.result()

    def elapsed_time(self, _):
        return 1.0


class _Accelerator:
    @staticmethod
    def current_device_index() -> int:
        return 0  # of the one worker in this process


class _Torch:
    """torch, with other events and one device."""

    Event, accelerator = Event, _Accelerator

    def __getattr__(self, name):
        return getattr(torch, name)


class _Platform:
    Stream = Stream
    current_stream = staticmethod(lambda *_: Stream())

    def __init__(self, platform):
        self._platform = platform
        self.current = None

    @contextlib.contextmanager
    def stream(self, stream):
        self.current = stream
        yield
        self.current = None

    def __getattr__(self, name):
        return getattr(self._platform, name)


def _copy(sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray) -> None:
    """Copy pieces, by address and bytes. A call of the system takes up to _PIECES of them and no lock of Python: a loop
    of memmove() would wait for the engine's thread before each piece, which a GPU's copy of a batch does not."""
    into, out_of = (np.stack([addresses, sizes], axis=1).astype(np.uint64) for addresses in (targets, sources))
    for first in range(0, len(sizes), _PIECES):
        pieces = min(_PIECES, len(sizes) - first)
        vectors = (np.ascontiguousarray(each[first : first + pieces]) for each in (into, out_of))
        spans = [argument for each in vectors for argument in (each.ctypes.data_as(ctypes.c_void_p), pieces)]
        if _copy_pieces(os.getpid(), *spans, 0) != int(sizes[first : first + pieces].sum()):
            raise OSError(ctypes.get_errno(), "copying within the process failed")


class _Cuda:
    Stream, current_stream = Stream, staticmethod(lambda *_: Stream())


class _TorchWithCuda(_Torch):
    cuda = _Cuda


def install_simple() -> None:
    """For SimpleCPUOffloadConnector. It copies in a thread of its own, and records an event when that is done."""
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, worker

    def copy(targets: int, sources: int, sizes: int, count: int, *_) -> int:
        given = ((ctypes.c_uint64 * count).from_address(each) for each in (sources, targets, sizes))
        _copy(*(np.array(each, dtype=np.uint64) for each in given))
        return 0

    worker.torch = copy_backend.torch = _TorchWithCuda()
    cuda_mem_ops._batch_memcpy = (copy, 1)


def install() -> None:
    from vllm.v1.kv_offload.cpu import gpu_worker, spec
    from vllm.v1.kv_offload.tiering import spec as tiering_spec

    platform = _Platform(gpu_worker.current_platform)
    threads = {any_order: ThreadPoolExecutor(1) for any_order in (False, True)}

    def swap(source, target, sizes, is_src_access_order_any):
        arguments = [each.numpy().astype(np.uint64) for each in (source, target, sizes)]
        COUNTS["loaded" if is_src_access_order_any else "stored"] += len(sizes)
        platform.current.last = threads[is_src_access_order_any].submit(_copy, *arguments)

    gpu_worker.torch, gpu_worker.current_platform = _Torch(), platform
    if hasattr(tiering_spec, "torch"):  # vLLM 0.31 asks for its device there
        tiering_spec.torch = _Torch()
    gpu_worker._select_swap_blocks_fn = lambda *_, **__: swap
    handler = gpu_worker.SingleDirectionOffloadingHandler
    text = textwrap.dedent(inspect.getsource(handler.__init__))
    refused = "assert gpu_tensor.is_cuda or gpu_tensor.is_xpu"
    assert refused in text
    scope: dict = {}
    exec(text.replace(refused, "pass"), gpu_worker.__dict__, scope)
    handler.__init__ = scope["__init__"]

    def get_worker(self, kv_caches):
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    spec.CPUOffloadingSpec.get_worker = get_worker
