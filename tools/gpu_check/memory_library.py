# SPDX-License-Identifier: Apache-2.0
"""libtorpor_memory.so by ctypes: regions by tag that sleep and wake, from any Python 3.8 or newer.

Owner: the process; load the library once. Threads: any; the scope of an allocation belongs to its thread. Failure: a
call that fails raises MemoryFailure with torpor's own words, and changes nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "libtorpor_memory.so"
PATH_VARIABLE = "TORPOR_MEMORY_LIBRARY"


class MemoryFailure(RuntimeError):
    """A call of torpor failed; the text says why and what to do."""


def library_path() -> Path:
    """Return the library that TORPOR_MEMORY_LIBRARY names, or else the one in this file's folder."""
    return Path(os.environ.get(PATH_VARIABLE) or Path(__file__).resolve().parent / NAME)


class MemoryLibrary:
    """Call the C interface of memory (bindings/memory_c_api.h)."""

    def __init__(self, path: Path):
        self.path = path
        library = ctypes.CDLL(str(path))
        library.torpor_last_error.restype = ctypes.c_char_p
        library.torpor_torch_malloc.restype = ctypes.c_void_p
        library.torpor_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        library.torpor_torch_free.restype = None
        library.torpor_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        library.torpor_region_begin.argtypes = [ctypes.c_char_p, ctypes.c_int]
        for name in ("torpor_sleep", "torpor_wake", "torpor_mark_dirty"):
            getattr(library, name).argtypes = [ctypes.c_char_p]
        self._library = library

    def last_error(self) -> str:
        return self._library.torpor_last_error().decode()

    @contextmanager
    def region(self, tag: str, keep: bool = True) -> Iterator[None]:
        """Give this thread's allocations the tag. With keep=False they come back from a sleep without content."""
        self._do(self._library.torpor_region_begin(tag.encode(), int(keep)))
        try:
            yield
        finally:
            self._do(self._library.torpor_region_end())

    def allocate(self, size: int, device: int = 0) -> int:
        address = self._library.torpor_torch_malloc(size, device, None)
        if not address:
            raise MemoryFailure(self.last_error())
        return address

    def free(self, address: int, size: int, device: int = 0) -> None:
        self._library.torpor_torch_free(address, size, device, None)

    def sleep(self, tag: str | None = None) -> None:
        self._do(self._library.torpor_sleep(_text(tag)))

    def wake(self, tag: str | None = None) -> None:
        self._do(self._library.torpor_wake(_text(tag)))

    def mark_dirty(self, tag: str | None = None) -> None:
        """Say that the tag's bytes changed, so that the next sleep copies them. None: all tags."""
        self._do(self._library.torpor_mark_dirty(_text(tag)))

    def _do(self, code: int) -> None:
        if code != 0:
            raise MemoryFailure(self.last_error())


def _text(tag: str | None) -> bytes | None:
    return None if tag is None else tag.encode()
