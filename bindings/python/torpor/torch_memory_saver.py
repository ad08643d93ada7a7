# SPDX-License-Identifier: Apache-2.0
"""The calls of torch_memory_saver (0.0.10) over torpor's memory: region, pause, resume, cpu backup.

    from torpor.torch_memory_saver import torch_memory_saver

It is imported under its own name where the package torpor-torch-memory-saver is installed, or after install(). Regions
take memory through torch's MemPool, as in that package's "torch" mode. What is not offered raises Unsupported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

from torpor import _core, memory
from torpor.errors import NotFound, Unsupported

if TYPE_CHECKING:
    import torch

_DEFAULT_TAG = "default"
_DISTRIBUTION = "torpor-torch-memory-saver"
_NO_TAG = ""  # whose retired pools are torch's own
_WITHOUT_BACKUP = " (not kept)"  # how the ledger names what of a tag comes back without content


class TorchMemorySaver:
    """What torch_memory_saver's `torch_memory_saver` is: one for the process."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, bool, int], object] = {}  # one for (tag, backup, device), as there

    @contextmanager
    def region(
        self,
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: Literal["mmap", "pinned"] | None = None,
    ) -> Iterator[None]:
        """What torch allocates on its current GPU inside can be paused. Without a backup it comes back without content.

        cpu_backup_backend: "pinned" is what torpor does; "mmap" is refused.
        """
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        if enable_disk_backup:
            if enable_cpu_backup:
                raise ValueError("enable_cpu_backup and enable_disk_backup are mutually exclusive")
            raise Unsupported("a backup on disk for single regions is not offered", "use enable_cpu_backup=True")
        import torch

        key = (tag, enable_cpu_backup, torch.cuda.current_device() if torch.cuda.is_available() else -1)
        if key not in self._pools:
            self._pools[key] = memory.new_pool()
        pool = self._pools[key]
        with memory.scope(tag, keep=enable_cpu_backup), memory.allocating(), torch.cuda.use_mem_pool(pool):
            yield

    @contextmanager
    def disable(self, dispose_mem_pool_after_use: bool = True) -> Iterator[None]:
        """Inside a region: what is allocated here is torch's own, and is never paused."""
        if not dispose_mem_pool_after_use:
            raise Unsupported("the pool of disable() cannot be kept", "leave dispose_mem_pool_after_use at True")
        import torch

        pool = torch.cuda.MemPool()
        try:
            with memory.allocating(), torch.cuda.use_mem_pool(pool):
                yield
        finally:
            memory.retire(pool, _NO_TAG)
            del pool
            memory.release_unused(_NO_TAG)

    def pause(self, tag: str | None = None) -> None:
        """Gives back what was allocated under `tag`, or all that is not paused. Nothing if that tag has no memory.

        Without a tag the memory of an engine in this process stays: that has calls of its own.

        Raises WrongState for a tag that is paused already, where torch_memory_saver ends the process.
        """
        if wanted := self._wanted(tag, awake=True):
            memory.sleep(*wanted, check=True)  # against kept backups: its callers do not say what they changed

    def resume(self, tag: str | None = None) -> None:
        """The reverse of pause(), with the same rules."""
        if wanted := self._wanted(tag, awake=False):
            memory.wake(*wanted)

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: tuple[int, int] | None = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: Literal["mmap", "pinned"] | None = None,
    ) -> Iterator[None]:
        """torch.cuda.graph() whose memory can be paused. It takes a pool of its own: any other is refused."""
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        if pool is not None:
            raise Unsupported("a graph whose pool is not torpor's cannot be paused", "leave `pool` out")
        import torch

        own = memory.new_pool()
        captured = torch.cuda.graph(cuda_graph, pool=own.id, stream=stream, capture_error_mode=capture_error_mode)
        with memory.scope(tag, keep=enable_cpu_backup), memory.allocating(capturing=True), captured:
            yield

    @property
    def enabled(self) -> bool:
        """Always true."""
        return True

    @property
    def hook_mode(self) -> str:
        """ "torch", the one that is offered; another raises Unsupported."""
        return "torch"

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        if mode != "torch":
            raise Unsupported(f"hook_mode={mode!r} is not offered", 'use "torch", which takes memory in region() only')

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether saved bytes stay in host memory after resume(). Setting it raises WrongState once there is memory."""
        return _core.memory_backups_kept()

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, retain: bool) -> None:
        _core.memory_keep_backups(retain)

    @property
    def memory_margin_bytes(self) -> int:
        """An allocation that would leave fewer bytes free on its device fails. It can only be set."""
        raise NotImplementedError("it can only be set")  # as there

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, margin: int) -> None:
        _core.memory_set_margin(margin)

    def set_disk_backup_dir(self, path: str) -> None:
        """Refused: there are no backups on disk."""
        raise Unsupported("backups on disk are not offered", "use enable_cpu_backup=True")

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """What is saved of a tensor that is paused, as a tensor on the CPU; None if nothing is.

        Always a copy: with `zero_copy` too, where the original gives its backup itself.
        """
        if not x.is_contiguous():
            raise ValueError("only a contiguous tensor has its backup in one piece")
        try:
            saved = memory.saved(x.data_ptr(), x.nbytes)
        except NotFound:
            return None
        import torch

        return torch.frombuffer(saved, dtype=torch.uint8).view(x.dtype).view(x.shape)

    @staticmethod
    def _wanted(tag: str | None, awake: bool) -> list[str]:
        """`tag` if it has memory; without one, every tag that is awake, or asleep, but for an engine's."""
        tags = [each for device in memory.ledger().values() for each in device["tags"].items()]
        held = [(name.removesuffix(_WITHOUT_BACKUP), tag_held["state"]) for name, tag_held in tags]
        if tag:  # the empty tag is none, as there
            return [tag] if any(name == tag for name, _ in held) else []
        engines = _core.memory_engine_tags()
        return sorted({name for name, state in held if (state == "attached") == awake and name not in engines})


def _check_backend(enable_cpu_backup: bool, cpu_backup_backend: str | None) -> None:
    if cpu_backup_backend is None:
        return
    if not enable_cpu_backup:
        raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
    if cpu_backup_backend != "pinned":
        raise Unsupported(
            f"cpu_backup_backend={cpu_backup_backend!r} is not offered",
            "leave it out; TORPOR_ARENA_KEEP_BYTES=0 gives host memory back after each resume()",
        )


torch_memory_saver = TorchMemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Around the start of a process that imports torch_memory_saver. It has nothing to preload: see hook_mode."""
    try:
        version(_DISTRIBUTION)
    except PackageNotFoundError:
        raise Unsupported(
            "a process started here would not find this torch_memory_saver: install() is of one process",
            f"install {_DISTRIBUTION}",
        ) from None
    yield


def install() -> None:
    """From now on `import torch_memory_saver` finds this module, in this process."""
    sys.modules["torch_memory_saver"] = sys.modules[__name__]
