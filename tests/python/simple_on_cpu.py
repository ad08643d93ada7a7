# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CUDA's streams, events and batch copy, with which vLLM's SimpleCPUOffloadConnector runs on a CPU.

All that the connector decides stays vLLM's. A copy runs on the thread that vLLM has for it, in its order, and its event
has happened when it is over.
"""

from __future__ import annotations

import ctypes

import torch


class _Stream:
    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_event(self, _):
        pass  # the model's step is over when Python goes on


class _Event:
    """Recorded by the thread that copies, behind the copy."""

    def record(self, _=None):
        pass

    def query(self) -> bool:
        return True

    def synchronize(self):
        pass


class _Cuda:
    Stream = _Stream
    current_stream = staticmethod(_Stream)


class _Torch:
    """torch, with other streams and events."""

    Event, cuda = _Event, _Cuda

    def __getattr__(self, name):
        return getattr(torch, name)


def _copy(targets: int, sources: int, sizes: int, count: int, *_) -> int:
    many = ctypes.c_uint64 * count
    for target, source, size in zip(*(many.from_address(each) for each in (targets, sources, sizes)), strict=True):
        ctypes.memmove(target, source, size)
    return 0


def install() -> None:
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, worker

    worker.torch = copy_backend.torch = _Torch()
    worker.PIN_MEMORY = False
    cuda_mem_ops._batch_memcpy = (_copy, 1)
