# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch with a GPU, for the checks of memory: tensors of bytes in torpor's memory without a GPU.

A tensor's operations write bytes that depend on every byte they read. A pool keeps what was freed until it goes. A
graph runs only what was captured, when it is replayed. FAKE_TORCH_FAULT plants a fault: no_gpu, other_bytes, capture,
die, hang, keeps.
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from types import SimpleNamespace

from . import cuda
from .cuda import fault

bfloat16, int64, uint8, float32 = 2, 8, 1, 4  # a dtype is its size
version = SimpleNamespace(cuda=None)


class Tensor:
    def __init__(self, count: int, dtype: int):
        self.count, self.dtype = count, dtype
        self.block = cuda.allocate(count * dtype)

    def __del__(self):
        self.block.free()

    def data_ptr(self):
        return self.block.address

    def numel(self):
        return self.count

    def element_size(self):
        return self.dtype

    def read(self) -> bytes:
        return ctypes.string_at(self.block.address, self.count * self.dtype)

    def write(self, seed: int):
        size, piece = self.count * self.dtype, seed.to_bytes(8, "little") * 512
        ctypes.memmove(self.block.address, (piece * (size // len(piece) + 1))[:size], size)
        return self

    def sum(self):
        return zlib.crc32(self.read())

    def clone(self):
        made = Tensor(self.count, self.dtype)
        ctypes.memmove(made.block.address, self.block.address, self.count * self.dtype)
        return made

    def zero_(self):
        return self.write(0)

    def random_(self):
        return self.write(int.from_bytes(os.urandom(8), "little"))

    def add_(self, number):
        return self.write(self.sum() + number)

    def _into(self, made, *sources):
        if fault() == "die":
            os._exit(3)
        if fault() == "hang":
            time.sleep(60)
        cuda.run(lambda: made.write(zlib.crc32(b"".join(source.read() for source in sources))))
        return made

    def __mul__(self, number):
        return self._into(Tensor(self.count, self.dtype), self)

    def __matmul__(self, other):
        return self._into(Tensor(self.count, self.dtype), self, other)


def empty(*shape, dtype=float32, device="cpu", pin_memory=False):
    count = 1
    for size in shape:
        count *= size
    return Tensor(count, dtype)


def zeros(*shape, **words):
    return empty(*shape, **words).zero_()


def randn(*shape, **words):
    return empty(*shape, **words).random_()


def empty_like(other):
    return Tensor(other.count, other.dtype)


def matmul(one, other, out):
    return one._into(out, one, other)


def equal(one, other):
    return one.read() == other.read()
