"""The calls of torch_memory_saver over torpor's memory: region, pause, resume, cpu backup; for callers that know those.

    from torpor.torch_memory_saver import torch_memory_saver     # or install() first, and import it under its own name

Regions take memory through torch's MemPool, as in that package's "torch" mode. What is not offered is refused by name.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager

from torpor import memory
from torpor.errors import Unsupported

_DEFAULT_TAG = "default"


class TorchMemorySaver:
    @contextmanager
    def region(self, tag: str = _DEFAULT_TAG, enable_cpu_backup: bool = False, enable_disk_backup: bool = False, cpu_backup_backend: str | None = None):
        if enable_disk_backup:
            raise Unsupported("a backup on disk for single regions is not offered", "use enable_cpu_backup=True")
        with memory.region(tag, keep=enable_cpu_backup):
            yield

    def pause(self, tag: str | None = None) -> None:
        memory.sleep(tag)

    def resume(self, tag: str | None = None) -> None:
        memory.wake(tag)

    def cuda_graph(self, *_, **__):
        raise Unsupported("memory of CUDA graphs cannot be paused this way", "capture inside region()")

    def disable(self):
        raise Unsupported("there is nothing to disable: only region() takes memory here", "leave the region instead")

    @property
    def enabled(self) -> bool:
        return True


torch_memory_saver = TorchMemorySaver()


def install() -> None:
    """From now on `import torch_memory_saver` finds this module."""
    sys.modules["torch_memory_saver"] = sys.modules[__name__]
