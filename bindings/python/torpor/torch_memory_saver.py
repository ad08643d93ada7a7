"""The calls of torch_memory_saver (0.0.10) over torpor's memory: region, pause, resume, cpu backup.

    from torpor.torch_memory_saver import torch_memory_saver     # or install() first, and import it under its own name

Regions take memory through torch's MemPool, as in that package's "torch" mode. What is not offered is refused by name.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Literal

from torpor import memory
from torpor.errors import Unsupported

_DEFAULT_TAG = "default"
_WITHOUT_BACKUP = " (not kept)"  # how the ledger names what of a tag comes back without content


class TorchMemorySaver:
    def __init__(self) -> None:
        self._pools: dict[tuple[str, bool, int], object] = {}  # one for (tag, backup, device), as there

    @contextmanager
    def region(
        self,
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: Literal["mmap", "pinned"] | None = None,
    ):
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
        with memory.scope(tag, keep=enable_cpu_backup), torch.cuda.use_mem_pool(self._pools[key]):
            yield

    def pause(self, tag: str | None = None) -> None:
        """Gives back what was allocated under `tag`, or all that is not paused. Nothing if that tag has no memory.

        Raises WrongState for a tag that is paused already, where torch_memory_saver ends the process.
        """
        if wanted := self._wanted(tag, awake=True):
            memory.sleep(*wanted)

    def resume(self, tag: str | None = None) -> None:
        """The reverse of pause(), with the same rules."""
        if wanted := self._wanted(tag, awake=False):
            memory.wake(*wanted)

    def cuda_graph(
        self,
        cuda_graph,
        pool=None,
        stream=None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: Literal["mmap", "pinned"] | None = None,
    ):
        """As there in "torch" mode: not offered."""
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        raise Unsupported("memory of CUDA graphs cannot be paused this way", "capture inside region()")

    def disable(self):
        raise Unsupported("there is nothing to disable: only region() takes memory here", "leave the region instead")

    @property
    def enabled(self) -> bool:
        return True

    @staticmethod
    def _wanted(tag: str | None, awake: bool) -> list[str]:
        """`tag` if it has memory; without one, every tag that is awake, or asleep."""
        tags = [each for device in memory.ledger().values() for each in device["tags"].items()]
        held = [(name.removesuffix(_WITHOUT_BACKUP), tag_held["state"]) for name, tag_held in tags]
        if tag:  # the empty tag is none, as there
            return [tag] if any(name == tag for name, _ in held) else []
        return sorted({name for name, state in held if (state == "attached") == awake})


def _check_backend(enable_cpu_backup: bool, cpu_backup_backend: str | None) -> None:
    if cpu_backup_backend is None:
        return
    if not enable_cpu_backup:
        raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
    if cpu_backup_backend != "pinned":
        raise Unsupported(f"cpu_backup_backend={cpu_backup_backend!r} is not offered", 'use "pinned", or leave it out')


torch_memory_saver = TorchMemorySaver()


def install() -> None:
    """From now on `import torch_memory_saver` finds this module."""
    sys.modules["torch_memory_saver"] = sys.modules[__name__]
