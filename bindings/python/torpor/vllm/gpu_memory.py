"""vLLM's sleep mode on a GPU through torpor's memory; configuration.py says when it is chosen.

TorporAllocator has the calls of vLLM's MemAllocator; workers allocate through it where they would through
CuMemAllocator. TorporBackend is vLLM's SleepModeBackend: level 1 keeps weights, runtime state and graph pools, level 2
all but the weights; a wake of some tags brings back every tag that may not be deferred.

With the option gpu_preserve_state the controller takes their place: GpuWorkerMemory is to it what CpuWorkerMemory is on
the CPU, over the same regions.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from torpor import _core, memory
from torpor.errors import Unsupported, WrongState
from torpor.vllm import kv_layout
from torpor.vllm.compat import lookup
from torpor.vllm.memory import views_of_parameters
from torpor.vllm.worker_memory import WorkerMemory

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
        with memory.region(tag or "default"):
            yield

    @contextmanager
    def cudagraph_pool(self):
        """What a graph captured here allocates has the tag "cudagraph". Yields the id of its pool, one for all graphs.

        The capture itself sends allocations to the pool; use_mem_pool would do it twice.
        """
        if self._graph_pool is None:
            self._graph_pool = memory.new_pool()
        with memory.scope("cudagraph"):
            yield self._graph_pool.id

    def _tags(self, state: str, wanted) -> list[str]:
        found = {
            tag
            for device in memory.ledger().values()
            for tag, held in device["tags"].items()
            if (held["state"] == "attached") == (state == "awake")
        }
        return sorted(tag for tag in found if wanted(tag))

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
        if awake := self._tags("awake", lambda tag: True):
            # Kept backups are compared: vLLM says neither of new weights nor of LoRA adapters what it wrote.
            memory.sleep(*awake, keep=kept, check=True)
        _empty_cache()

    def discard(self, tags: tuple[str, ...] | str) -> None:
        named = (tags,) if isinstance(tags, str) else tags
        if awake := self._tags("awake", lambda tag: tag in named):
            memory.sleep(*awake, keep=())

    def wake_up(self, tags: list[str] | None = None) -> None:
        gc.collect()
        _empty_cache()
        if asleep := self._tags("asleep", lambda tag: tags is None or tag in tags or tag not in DEFERRABLE_TAGS):
            memory.wake(*asleep)

    def get_current_usage(self) -> int:
        return sum(held["region_bytes"] for device in memory.ledger().values() for held in device["tags"].values())


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


class GpuWorkerMemory(WorkerMemory):
    """The regions below torch's allocations on its device."""

    weights_layout = None  # where torch puts what depends on all that it allocated before

    def __init__(self, device: torch.device, options: dict):
        self.rank_memory = _core.memory_of(device.index or 0, options)
        self.new_weights = 0
        self.kv_is_bf16 = False
        self._model: torch.nn.Module  # when its weights are loaded
        self._buffers: dict[str, torch.Tensor] = {}  # on the host, while the weights are away

    @contextmanager
    def allocating(self, tag: str, model_runner):
        if tag != "weights":
            with TorporAllocator.get_instance().use_memory_pool(tag):
                yield
            return
        # vLLM makes the sampler, adapters' slots and a draft model there too. Requests write into them, so they are no
        # weights: a sleep always keeps them, and no digest has them.
        with TorporAllocator.get_instance().use_memory_pool("runtime"), _weights_apart(model_runner) as loaded:
            yield
        if not loaded:
            raise Unsupported("vLLM loads the model otherwise than torpor expects", "switch gpu_preserve_state off")
        self._model = model_runner.model

    def note_new_weights(self) -> None:
        self.new_weights += 1
        self.rank_memory.mark_dirty("weights")

    @contextmanager
    def reloading_weights(self):
        try:
            yield
        finally:
            self.note_new_weights()

    def elsewhere(self, model: torch.nn.Module) -> list[str]:
        return []  # the allocator sees all that torch allocates

    def describe_kv(self, model_runner) -> None:
        """Tells the core where each block lies."""
        kv_cache_config = model_runner.kv_cache_config
        self.kv_is_bf16 = kv_layout.is_bf16(kv_cache_config)
        if kv_layout.scattered_blocks(kv_cache_config):  # it sleeps whole; preserve_state is refused
            return
        addresses = {cache.untyped_storage().data_ptr() for cache in model_runner.kv_caches}
        if len(addresses) != 1:
            raise Unsupported(f"the KV cache lies in {len(addresses)} allocations", "switch gpu_preserve_state off")
        self.rank_memory.set_kv_layout("kv_cache", kv_layout.to_value(kv_cache_config, addresses.pop()))

    def release_derived(self) -> None:
        """Weight files have no buffers, and a sleep may not keep the weights."""
        views = views_of_parameters(self._model)  # new weights must not be written over with old ones
        self._buffers = {
            name: buffer.to("cpu", copy=True) for name, buffer in self._model.named_buffers() if name not in views
        }
        gc.collect()
        _empty_cache()

    def rebuild_derived(self) -> None:
        for name, buffer in self._model.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])
        self._buffers = {}


@contextmanager
def _weights_apart(model_runner):
    """While vLLM loads the model, what its loader allocates has the tag "weights". Yields the models' names, once there
    are any."""
    modules = (sys.modules[cls.__module__] for cls in type(model_runner).__mro__)
    module: Any = next(module for module in modules if hasattr(module, "get_model_loader"))
    stock, loaded = module.get_model_loader, []

    def get_model_loader(*args, **kwargs):
        loader = stock(*args, **kwargs)
        load = loader.load_model

        def load_model(*args, **kwargs):
            with TorporAllocator.get_instance().use_memory_pool("weights"):
                model = load(*args, **kwargs)
            loaded.append(type(model).__name__)
            return model

        loader.load_model = load_model
        return loader

    module.get_model_loader = get_model_loader
    try:
        yield loaded
    finally:
        module.get_model_loader = stock


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
