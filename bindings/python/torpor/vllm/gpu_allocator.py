# SPDX-License-Identifier: Apache-2.0
"""vLLM's sleep mode on a GPU through torpor's memory; sleep_backend.py says when it is chosen.

TorporAllocator has the calls of vLLM's MemAllocator; workers allocate through it where they would through
CuMemAllocator. TorporBackend is vLLM's SleepModeBackend: level 1 keeps weights, runtime state and graph pools, level 2
all but the weights; a wake of some tags brings back every tag that may not be deferred.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager

import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from torpor import _core, memory
from torpor.errors import Unsupported, WrongState
from torpor.vllm.compat import lookup

# A wake of some tags brings back all others.
DEFERRABLE_TAGS = lookup("vllm.device_allocator", "DEFERRABLE_TAGS") or ("weights", "kv_cache")
ALWAYS_KEPT = ("runtime", "cudagraph")


class TorporAllocator:
    """One a process, as vLLM has it."""

    of_this_process: TorporAllocator | None = None

    def __init__(self) -> None:
        self._graph_pool: torch.cuda.MemPool | None = None

    @classmethod
    def get_instance(cls) -> TorporAllocator:
        if cls.of_this_process is None:
            cls.of_this_process = cls()
        return cls.of_this_process

    @contextmanager
    def use_memory_pool(self, tag: str | None = None):
        with memory.region(tag or "default", engine=True):
            yield

    @contextmanager
    def cudagraph_pool(self):
        """Give the tag "cudagraph" to what a graph captured inside allocates. Yield the id of the pool of all graphs.

        The capture itself sends allocations to the pool; use_mem_pool would do it twice.
        """
        if self._graph_pool is None:
            self._graph_pool = memory.new_pool()
        with memory.scope("cudagraph", engine=True), memory.allocating(capturing=True):
            yield self._graph_pool.id

    def release_pools(self) -> None:
        """Give up the pool of CUDA graphs, and give memory of pools of which nothing is in use back to the device."""
        if self._graph_pool is not None:
            memory.retire(self._graph_pool, "cudagraph")
            self._graph_pool = None
        gc.collect()
        memory.release_unused()

    def _tags(self, state: str, wanted) -> list[str]:
        found = {tag for tag, held in self._held() if (held["state"] == "attached") == (state == "awake")}
        return sorted(tag for tag in found if wanted(tag))

    @staticmethod
    def _held() -> list[tuple[str, dict]]:
        """Return the engine's tags, as the ledger of each device has them. Those of its program are not its own."""
        engines = _core.memory_engine_tags()
        held = [each for device in memory.ledger().values() for each in device["tags"].items()]
        return [(tag, of_tag) for tag, of_tag in held if tag in engines]

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Frees all that is awake; what is in `offload_tags` is saved before."""
        kept = (
            ("default",)
            if offload_tags is None
            else (offload_tags,)
            if isinstance(offload_tags, str)
            else tuple(offload_tags)
        )
        gc.collect()
        memory.release_unused()  # what was freed is not to be copied
        if awake := self._tags("awake", lambda tag: True):
            # Kept backups are compared: vLLM says neither of new weights nor of LoRA adapters what it wrote.
            memory.sleep(*awake, keep=kept, check=True)

    def discard(self, tags: tuple[str, ...] | str) -> None:
        named = (tags,) if isinstance(tags, str) else tags
        if awake := self._tags("awake", lambda tag: tag in named):
            memory.sleep(*awake, keep=())

    def wake_up(self, tags: list[str] | None = None) -> None:
        gc.collect()
        memory.release_unused()
        if asleep := self._tags("asleep", lambda tag: tags is None or tag in tags or tag not in DEFERRABLE_TAGS):
            memory.wake(*asleep)

    def get_current_usage(self) -> int:
        return sum(held["region_bytes"] for _, held in self._held())


def check_alone(device: int) -> None:
    """Before an engine takes memory: raise Unsupported if another one of this process has memory on the device, or
    the program a region with a name that the engine needs.

    Tags have plain names, so a sleep of one would take the other's memory too. vLLM's own allocator refuses it as well.
    Of an engine that has ended, vLLM may keep tensors among the weights, but no KV cache.
    """
    gc.collect()
    memory.release_unused()
    tags, engines = memory.ledger().get(device, {"tags": {}})["tags"], _core.memory_engine_tags()
    if taken := sorted({"weights", "kv_cache", "workspace", *ALWAYS_KEPT}.intersection(tags) - engines):
        raise Unsupported(
            f"the program of this engine has a region with the tag {taken[0]!r}, which is the engine's",
            "give that region another tag",
        )
    if tags.get("kv_cache", {"region_bytes": 0})["region_bytes"] > 0:
        raise Unsupported(
            f"another engine of this process has its memory on device {device}",
            "shut that one down first, or run each engine in a process of its own",
        )


class TorporBackend(SleepModeBackend):
    def suspend(self, level: int = 1) -> None:
        if level not in (1, 2):
            raise WrongState(f"there is no sleep level {level} for memory", "use 1 or 2")
        TorporAllocator.get_instance().sleep(("weights", *ALWAYS_KEPT) if level == 1 else ALWAYS_KEPT)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RESUMING"
        try:
            TorporAllocator.get_instance().wake_up(tags)
        except Exception:
            self._state = "SUSPENDED"
            raise
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        TorporAllocator.get_instance().discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True  # they are not in its memory

    @classmethod
    def is_supported(cls) -> bool:
        return _core.built_with_cuda()
