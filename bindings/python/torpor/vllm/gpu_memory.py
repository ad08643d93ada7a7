# SPDX-License-Identifier: Apache-2.0
"""A worker's memory on a GPU, as the controller sees it: what CpuWorkerMemory is on a CPU.

With the option gpu_preserve_state it takes the place of vLLM's sleep mode (gpu_allocator.py), over the same regions.
"""

from __future__ import annotations

import bisect
import fnmatch
import gc
import sys
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from torpor import _core, memory
from torpor.errors import InvalidArgument, Unsupported
from torpor.vllm import kv_layout
from torpor.vllm.gpu_allocator import TorporAllocator, check_alone
from torpor.vllm.memory import region_tensor
from torpor.vllm.worker_memory import WorkerMemory, check_weights_awake

_SMALL_BYTES = 1 << 20  # a tensor of at most so many stays when vLLM lets go of it (_Loaded.small)


class GpuWorkerMemory(WorkerMemory):
    """The regions below torch's allocations on its device."""

    weights_layout = None  # where torch puts what depends on all that it allocated before

    def __init__(self, device: torch.device, options: dict, preserved_parameters: Sequence[str] = ()):
        """preserved_parameters: patterns of names that keep their content where the weights are dropped."""
        ordinal = device.index or 0
        check_alone(ordinal)  # before the memory gets these options
        self.rank_memory = _core.memory_of(ordinal, options)
        self.new_weights = 0
        self.kv_is_bf16 = False
        self._preserved_parameters = preserved_parameters
        self._model: torch.nn.Module  # when its weights are loaded
        self._beside: list[weakref.ref[torch.Tensor]] = []  # in the memory of the weights, and no parameters
        self._kept: list[torch.Tensor] = []  # the small ones of these, so that they stay
        # Over a sleep of the weights: a tensor of the device, and its content on the host.
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._weights_left = False  # and are not back

    @contextmanager
    def allocating(self, tag: str, model_runner):
        if tag != "weights":
            with TorporAllocator.get_instance().use_memory_pool(tag):
                yield
            return
        # The first product of matrices makes cuBLAS take a workspace: not among the weights.
        torch.ones((1, 1), device=model_runner.device).mm(torch.ones((1, 1), device=model_runner.device))
        # vLLM makes the sampler, adapters' slots and a draft model there too. Requests write into them, so they are no
        # weights: a sleep always keeps them, and no digest has them.
        with TorporAllocator.get_instance().use_memory_pool("runtime"), _weights_apart(model_runner) as found:
            yield
        if not found.loaded:
            raise Unsupported("vLLM loads the model otherwise than torpor expects", "switch gpu_preserve_state off")
        self._model, self._beside, self._kept = model_runner.model, found.beside, found.small
        self._name_weights(found)
        self._guard_load_weights(model_runner.get_model())

    def _name_weights(self, found: _Loaded) -> None:
        """Say what of the weights' memory decides tokens: where it lies and what is beside it is of this process."""
        tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        places: dict[int, int] = {}
        forms = []
        for name, tensor in sorted(tensors.items()):
            at = _storage(tensor)
            if at is not None and found.holds(at):
                forms.append(f"{name} {tensor.dtype} {list(tensor.shape)} {list(tensor.stride())}")
                places.setdefault(at, tensor.untyped_storage().nbytes())
        self.rank_memory.name_weights(_core.digest("\n".join(forms).encode()), list(places.items()))

    def _guard_load_weights(self, model: torch.nn.Module) -> None:
        """Trainers call the model's load_weights() themselves."""
        stock = getattr(type(model), "load_weights", None)
        if stock is None:
            return
        # vLLM freezes its heap: were it to hold the model, nothing would free both of them.
        guarded = weakref.ref(model)

        def load_weights(*args, **kwargs):
            check_weights_awake(self.rank_memory, "load_weights()")
            try:
                return stock(guarded(), *args, **kwargs)
            finally:
                self.note_new_weights()

        model.load_weights = load_weights

    def start_prefault(self) -> None:
        self.rank_memory.start_prefault()

    def close(self) -> None:
        self._saved, self._beside, self._kept, self._model = [], [], [], torch.nn.Module()
        TorporAllocator.get_instance().release_pools()

    def note_new_weights(self) -> None:
        self.new_weights += 1
        self.rank_memory.mark_dirty("weights")

    @contextmanager
    def reloading_weights(self):
        check_weights_awake(self.rank_memory, "reload_weights()")
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

    def release_unused(self) -> None:
        gc.collect()
        memory.release_unused()

    def keep_derived(self) -> None:
        """Do nothing: what release_derived() saves is device memory, which a sleep has to release."""

    def release_derived(self) -> None:
        """Save what weight files do not have: buffers, tensors of no name, and parameters that vLLM's option keeps."""
        state = self.rank_memory.states().get("weights", "attached")
        # Without memory, or half restored by a wake that could not be undone, they are as they were saved before.
        if state in ("attached", "saving") or (state == "restoring" and not self._saved):
            self._save_derived()
        self.release_unused()

    def _save_derived(self) -> None:
        written = {_storage(parameter) for parameter in self._model.parameters()}  # with new weights
        beside = [tensor for each in self._beside if (tensor := each()) is not None]
        own = [tensor for tensor in (*self._model.buffers(), *beside) if _storage(tensor) not in written]
        tensors = {id(tensor): tensor for tensor in (*own, *self._preserved())}.values()
        self._saved = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
        self._weights_left = False

    def make_room(self) -> None:
        if "detached" in self.rank_memory.states().values():
            memory.make_room()

    def note_order(self) -> None:
        """Copy back what release_derived() saved once the weights are back, before somebody loads new ones."""
        if not self._saved:
            return
        state = self.rank_memory.states().get("weights")
        if state == "detached":
            self._weights_left = True
        elif state in ("restoring", "attached"):
            self._bring_back()

    def rebuild_derived(self) -> None:
        self._bring_back()
        self._saved = []  # not before: a wake that fails takes the weights away again

    @torch.no_grad()
    def _bring_back(self) -> None:
        if self._weights_left:
            for tensor, content in self._saved:
                tensor.copy_(content)
            self._weights_left = False

    def _preserved(self) -> list[torch.Tensor]:
        """The parameters that vLLM's option sleep_preserve_parameter_names names. A draft model is kept as a whole."""
        parameters = dict(self._model.named_parameters())
        names: set[str] = set()
        for pattern in self._preserved_parameters:
            found = fnmatch.filter(parameters, pattern)
            if not found and not pattern.startswith("draft."):
                raise InvalidArgument(f"sleep_preserve_parameter_names: no parameter is {pattern!r}", "name one")
            names.update(found)
        return [parameters[name] for name in sorted(names)]


class _Loaded:
    """Record of what vLLM's loader has made."""

    def __init__(self) -> None:
        self.loaded = False
        self.beside: list[weakref.ref[torch.Tensor]] = []  # in the memory of the weights, and no parameters
        # The small ones of these, as scales. vLLM makes new ones when it loads weights again, and graphs read the old
        # ones on. They stay, so that each sleep saves them: else the digest of the weights would be another one.
        self.small: list[torch.Tensor] = []
        self._segments: list[tuple[int, int]] = []  # of that memory: begin and end of each, in order

    def look_at(self, model: torch.nn.Module, pool: torch.cuda.MemPool) -> None:
        gc.collect()
        segments = pool.snapshot(include_traces=False)
        _clear_unused(segments)
        self._segments = sorted((each["address"], each["address"] + each["total_size"]) for each in segments)
        written = {_storage(parameter) for parameter in model.parameters()}
        for each in gc.get_objects():
            # isinstance() would ask objects that stand for others, and import what those are.
            at = _storage(each) if issubclass(type(each), torch.Tensor) else None
            if at is not None and at not in written and self.holds(at):
                self.beside.append(weakref.ref(each))
                if each.untyped_storage().nbytes() <= _SMALL_BYTES:
                    self.small.append(each)
        self.loaded = True

    def holds(self, address: int) -> bool:
        place = bisect.bisect_right(self._segments, (address, sys.maxsize)) - 1
        return place >= 0 and address < self._segments[place][1]


@contextmanager
def _weights_apart(model_runner):
    """While vLLM loads the model, what its loader allocates has the tag "weights". Yields a _Loaded."""
    modules = (sys.modules[cls.__module__] for cls in type(model_runner).__mro__)
    module: Any = next(module for module in modules if hasattr(module, "get_model_loader"))
    stock, found = module.get_model_loader, _Loaded()

    def get_model_loader(*args, **kwargs):
        loader = stock(*args, **kwargs)
        load = loader.load_model

        def load_model(*args, **kwargs):
            with memory.region("weights", engine=True) as pool:
                model = load(*args, **kwargs)
                found.look_at(model, pool)
                del pool  # region() ends it
            return model

        loader.load_model = load_model
        return loader

    module.get_model_loader = get_model_loader
    try:
        yield found
    finally:
        module.get_model_loader = stock


def _storage(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's memory; None if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # of a kind without storage
        return None


def _clear_unused(segments: list[dict]) -> None:
    """Write zeros where a pool has nothing that is in use: that is what such memory has when it comes back unsaved.

    So the digest of the weights is the same after they were loaded again, and in another process.
    """
    for segment in segments:
        for block in segment["blocks"]:
            used = 0 if block["state"] == "inactive" else block["requested_size"]
            if block["size"] > used:
                _bytes_at(block["address"] + used, block["size"] - used).zero_()


def _bytes_at(address: int, size: int) -> torch.Tensor:
    if not torch.version.cuda:
        return region_tensor(address, size)
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")
