# SPDX-License-Identifier: Apache-2.0
"""Memory that can sleep, for programs without an engine: regions by tag, below torch's allocator.

    from torpor import memory

    with memory.region("weights"):              # what torch allocates on the GPU here can sleep
        model.to("cuda")
    memory.sleep("weights")                     # its memory is given back; the addresses stay
    memory.wake("weights")                      # same bytes, same addresses: tensors and captured graphs work

Each sleep and wake is all or nothing; a failure raises an error of torpor.errors, and a retry works. All work on the
GPU is waited for before memory goes. Without a GPU, TORPOR_MEMORY_DEVICE=host in the environment and allocate() give
the same.

With TORPOR_KEEP_BACKUPS=1 saved bytes are kept after a wake. Memory of the tag "weights" is then not copied again at
the next sleep until somebody says with mark_dirty() that it changed; that of all tags is compared with check=True, and
copied only where a digest differs.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torpor import _core
from torpor.errors import NotEnoughRoom, Unsupported

if TYPE_CHECKING:
    import torch

_allocator: torch.cuda.memory.CUDAPluggableAllocator | None = None
_lock = threading.RLock()  # an object that Python's collector ends may call in here again
_retired: dict[str, list[torch.cuda.MemPool]] = {}  # by tag: pools that something may still be in use of
_allocating = 0  # how many allocating() there are now, in all threads
_capturing = 0  # how many of them are captures of a graph
_postponed = False  # whether a pool would have ended if nobody had been allocating


@contextmanager
def scope(tag: str, keep: bool = True, *, engine: bool = False) -> Iterator[None]:
    """Give `tag` to what this thread allocates through torpor. keep=False: its memory comes back without content.

    engine: the tag is an engine's, which a program shares its process with. Calls for all tags leave it alone. Raises
    WrongState for a tag that has memory of the other kind.
    """
    _core.memory_begin(tag, keep, engine)
    try:
        yield
    finally:
        _core.memory_end()


@contextmanager
def region(tag: str, keep: bool = True, *, engine: bool = False) -> Iterator[torch.cuda.MemPool]:
    """scope(), and what torch allocates on its current GPU inside comes from torpor. Yields torch's MemPool.

    engine: the tag is an engine's, as in scope().

    torch keeps what is freed in a pool for that pool. At the end, when the next region of the same tag begins, and by
    release_unused(), torpor gives unused memory back to the device: whole pools, and single segments of pools that are
    in use otherwise. While you keep the MemPool, or a graph that was captured into it, torch may hand its segments out
    again, so they stay. Keep no id of a MemPool that you do not keep.

    Raises Unsupported where torch has no GPU, or is older than 2.11.
    """
    import torch

    pool = new_pool()
    release_unused(tag)
    try:
        with scope(tag, keep, engine=engine), allocating(), torch.cuda.use_mem_pool(pool):
            yield pool
    finally:
        retire(pool, tag)
        del pool
        release_unused(tag)


@contextmanager
def allocating(capturing: bool = False) -> Iterator[None]:
    """Around each use_mem_pool() and each capture of a graph: no pool of torpor ends meanwhile.

    torch ends the process if a pool ends while any thread allocates from one. capturing: nothing is given back at all,
    as the wait for the device that comes before would spoil the capture.
    """
    global _allocating, _capturing
    with _lock:
        _allocating += 1
        _capturing += capturing
    try:
        yield
    finally:
        with _lock:
            _allocating -= 1
            _capturing -= capturing
            due = _postponed and _allocating == 0
        if due:
            release_unused()


def retire(pool: torch.cuda.MemPool, tag: str) -> None:
    """Keep a pool, from which nothing more is allocated, until nothing of it is in use. tag: of its region.

    A MemPool object must not end before: vLLM keeps its own for https://github.com/pytorch/pytorch/issues/146431.
    """
    with _lock:
        _retired.setdefault(tag, []).append(pool)


def release_unused(tag: str | None = None) -> None:
    """Give memory of retired pools of which nothing is in use back to the device. tag: of its pools alone.

    A pool of which nothing is in use ends; if a region is active, in any thread, then at the end of the last one. Of
    the others each segment of which nothing is in use loses its memory and leaves its tag; torch keeps the addresses
    until the pool ends. torch's cache is emptied too; with `tag` only if that tag has retired pools. Does nothing while
    a graph is captured in this thread, or by torpor in another one.
    """
    global _postponed
    import torch

    if tag is not None and tag not in _retired:
        return
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():  # a capture forbids it
        return
    with _lock:
        if _capturing:
            _postponed = True
            return
        if tag is None:
            _postponed = False
        for each in [tag] if tag is not None else list(_retired):
            _release(each)
    torch.cuda.empty_cache()


def _release(tag: str) -> None:
    global _postponed
    pools = _retired.pop(tag, [])  # an object that Python's collector ends may call in here meanwhile
    try:
        unused = [at for at, pool in enumerate(pools) if not _is_used(pool)]
        if _allocating:
            _postponed = _postponed or bool(unused)
        else:
            for at in reversed(unused):
                del pools[at]  # its end frees its memory
        for at in range(len(pools)):
            if _is_left(pools, at):
                _trim(pools[at])
    finally:
        if pools:
            _retired.setdefault(tag, []).extend(pools)


def _is_used(pool: torch.cuda.MemPool) -> bool:
    return any(segment["active_size"] > 0 for segment in pool.snapshot(include_traces=False))


def _references(items: list, at: int) -> int:
    return sys.getrefcount(items[at])


def _is_left(pools: list[torch.cuda.MemPool], at: int) -> bool:
    """Whether torch can allocate nothing in this pool any more: nobody else has the object, and no graph has the pool.

    A segment without memory that torch hands out again would be an invalid address, and nothing tells torpor of it.
    """
    return _references(pools, at) == _references([object()], 0) and pools[at].use_count() == 1


def _trim(pool: torch.cuda.MemPool) -> None:
    unused: dict[int, list[int]] = {}
    for segment in pool.snapshot(include_traces=False):
        if segment["active_size"] == 0:  # no event of another stream is waited for either
            unused.setdefault(segment["device"], []).append(segment["address"])
    for device, addresses in unused.items():
        _core.memory_trim(device, addresses)


def new_pool() -> torch.cuda.MemPool:
    """A torch.cuda.MemPool whose memory is of the scope that its allocations are made in. Give it to retire() at last.

    Raises Unsupported where torch has no GPU, or is older than 2.11.
    """
    global _allocator
    import torch

    if not torch.cuda.is_available():
        raise Unsupported("torch has no GPU here", "use scope() and allocate() with TORPOR_MEMORY_DEVICE=host")
    if "include_traces" not in inspect.signature(torch.cuda.MemPool.snapshot).parameters:
        raise Unsupported(
            f"torch {torch.__version__} cannot say cheaply what of a pool is in use", "install 2.11 or newer"
        )
    if _allocator is None:
        _allocator = pluggable_allocator()
        # It never ends: pools have a bare pointer to it, and may end later than it when the interpreter does.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_allocator))
    return torch.cuda.MemPool(_allocator.allocator())


def pluggable_allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    """torpor as a torch.cuda.memory.CUDAPluggableAllocator."""
    import torch

    return torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, "torpor_torch_malloc", "torpor_torch_free")


def allocate(size: int, device: int = 0) -> int:
    """The address of `size` zeroed bytes on GPU number `device`, in the present scope. Give them back with free().

    Raises NotEnoughRoom if the device has not so many left.
    """
    return _core.memory_allocate(device, size)


def free(address: int, device: int = 0) -> None:
    """Gives back what allocate() returned as `address` for that `device`. Raises NotFound for any other address."""
    _core.memory_free(device, address)


def sleep(*tags: str, keep: tuple[str, ...] | None = None, check: bool = False) -> dict:
    """Frees the memory of `tags`, or of all that is awake but for an engine's. Saved before is what is in `keep`, or
    what the scopes said.

    check: compare digests with what was saved earlier, instead of taking mark_dirty()'s word for what has changed.

    Returns bytes (copied, clean: saved earlier and unchanged, dropped, physical: given back) and seconds of each phase.
    Raises NotFound for a tag without memory, WrongState for one that sleeps, NotEnoughRoom; nothing has changed then.
    """
    return _core.memory_sleep(list(tags), None if keep is None else list(keep), check)


def wake(*tags: str) -> dict:
    """Fresh memory under the old addresses, with what was saved. `tags` none: all that sleeps but for an engine's.

    If the device has too little, torch's cache is emptied first, as somebody may have computed meanwhile. Returns bytes
    and seconds as sleep() does. Raises NotEnoughRoom if it still has too little; all sleeps on then.
    """
    try:
        return _core.memory_wake(list(tags))
    except NotEnoughRoom:
        make_room()
        return _core.memory_wake(list(tags))


def make_room() -> None:
    """Give memory that torch keeps unused back to the device. Does nothing before torch uses the GPU, and while a graph
    is captured, as release_unused()."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    if not _capturing and not torch.cuda.is_current_stream_capturing():
        gc.collect()
        torch.cuda.empty_cache()


def plan_sleep(*tags: str, keep: tuple[str, ...] | None = None) -> dict:
    """What sleep(*tags, keep=keep) would move and free, in bytes.

    `obstacle` says why it would fail, "" if nothing is known against it.
    """
    return _core.memory_plan_sleep(list(tags), None if keep is None else list(keep))


def plan_wake(*tags: str) -> dict:
    """What wake(*tags) would take and move, in bytes; `obstacle` as plan_sleep() has it."""
    return _core.memory_plan_wake(list(tags))


def mark_dirty(*tags: str) -> None:
    """The owner changed memory of these tags, or of all but an engine's: it has to be saved again."""
    _core.memory_mark_dirty(list(tags))


def saved(address: int, size: int) -> bytearray:
    """A copy of what is saved of the `size` bytes at `address`, which sleep. Raises NotFound if nothing is."""
    return _core.memory_saved(address, size)


def ledger() -> dict[int, dict]:
    """Of each device in use: tags with state and bytes; its physical bytes, of all processes too; the host arena's."""
    return _core.memory_ledgers()
