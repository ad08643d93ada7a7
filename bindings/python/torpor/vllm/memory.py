# SPDX-License-Identifier: Apache-2.0
"""Weights and KV cache of a CPU worker inside torpor's regions.

vLLM enters `Worker._maybe_get_memory_pool_context(tag)` around loading the model ("weights") and around allocating the
KV cache ("kv_cache"); on the CPU it does nothing there. Here the KV allocation is answered from a region, and after
loading every parameter is moved into one. Linear layers that vLLM packs for oneDNN keep their plain weights in the
region, since the packed bytes cannot be read out; they are packed again after a wake.

New weights come by vLLM's reload_weights(), or straight by the model's load_weights(), as trainers call it: then packed
layers have their plain weights back while it runs.
"""

from __future__ import annotations

import ctypes
import functools
import json
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode

from torpor.errors import Unsupported
from torpor.vllm import kv_layout, weights_layout
from torpor.vllm.worker_memory import WorkerMemory, check_weights_awake

_ALIGNMENT = 64
_being_loaded: CpuWorkerMemory | None = None


def being_loaded() -> CpuWorkerMemory | None:
    """The memory of the worker of this process whose weights vLLM is loading."""
    return _being_loaded


def region_tensor(address: int, size: int) -> torch.Tensor:
    """The bytes at `address` as a flat uint8 tensor. The region outlives it: it lives as long as the worker."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def views_of_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are no tensors of their own, as those of Mamba layers that show the weights of a convolution."""
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if parameter.numel() > 0}
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.numel() > 0 and buffer.untyped_storage().data_ptr() in storages
    }


class CpuWorkerMemory(WorkerMemory):
    """Which parameters and linear layers live in which region."""

    def __init__(self, rank_memory, rank: int, cpu_linear: str):
        self.rank_memory = rank_memory
        self.rank = rank
        self.cpu_linear = cpu_linear
        self._packed: list[PackedLinear] = []
        self._derived = True  # packed weights exist
        self._keeps_derived = False  # over the next sleep
        self._kept_of: int | None = None  # new_weights when packed weights were kept for a sleep; None: they were not
        self._reloading = False
        self.filled_from = None  # the checkpoint that the weights come from, as loader.StoredWeights
        self.weights_layout: str | None = None
        self.new_weights = 0  # how often
        self._weights_address = self._weights_bytes = 0
        self.kv_address = self._kv_bytes = 0
        self.kv_is_bf16 = False

    def allocating(self, tag: str, model_runner) -> AbstractContextManager[None]:
        if tag == "weights":
            return self.loading_weights(model_runner)
        return self.allocating_kv(model_runner) if tag == "kv_cache" else nullcontext()

    def start_prefault(self) -> None:
        self.rank_memory.start_prefault()

    def close(self) -> None:
        """The regions go with the RankMemory, which is this worker's own."""

    def release_unused(self) -> None:
        """Do nothing: nothing keeps memory of a region that nobody uses."""

    def make_room(self) -> None:
        """Do nothing: torch keeps no memory of a CPU that it does not use."""

    def note_order(self) -> None:
        """Parameters and buffers need nothing: buffers stay where they are, parameters are always saved."""

    @contextmanager
    def loading_weights(self, model_runner):
        global _being_loaded
        _being_loaded = self
        try:
            with replaced_dispatch(self._pack_first):
                yield
        finally:
            _being_loaded = None
        model = model_runner.model
        self._keep_layers_of(model)
        self._all_packed_here(model)
        if self.filled_from is None:
            self._move_parameters(model)
        self.weights_layout = weights_layout.describe(model, self._packed, self._weights_address, self._weights_bytes)
        if self.filled_from is not None:
            weights_layout.check_same(self.filled_from.layout, json.loads(self.weights_layout))
            if self.rank_memory.proven_digest("weights") is None:
                raise Unsupported("vLLM has written into the weights after they were filled", weights_layout.OWN_FILES)
        self._install_load_weights(model)

    def fill(self, model: torch.nn.Module, stored) -> None:
        """The parameters, which vLLM has just made, get their places in the region of a checkpoint, and its bytes."""
        offsets = weights_layout.offsets_of(model, stored.layout)
        tensors = [p for _, p in model.named_parameters(remove_duplicate=False) if p.numel() > 0]
        self._allocate_weights(stored.layout["bytes"])
        self.rank_memory.load_tag("weights", stored.path, stored.generation, stored.id)
        self._put_in_region([*tensors, *views_of_parameters(model).values()], offsets)
        self.filled_from = stored

    def note_new_weights(self) -> None:
        self.new_weights += 1
        self.rank_memory.mark_dirty("weights")

    @contextmanager
    def reloading_weights(self):
        """Around vLLM's reload_weights: the region gets the new weights too, and everything is packed from it again."""
        check_weights_awake(self.rank_memory, "reload_weights()")
        self._reloading = True
        try:
            with replaced_dispatch(self._pack_again):
                yield
        finally:
            self._reloading = False
            self.note_new_weights()
        self.rebuild_derived()

    def _install_load_weights(self, model: torch.nn.Module) -> None:
        """Trainers call model.load_weights() themselves, often once for each parameter."""
        stock = getattr(model, "load_weights", None)
        if stock is None:
            return

        @functools.wraps(stock)
        def load_weights(weights, *args, **kwargs):
            if self._reloading:
                return stock(weights, *args, **kwargs)
            check_weights_awake(self.rank_memory, "load_weights()")
            with self._plain_weights():
                try:
                    loaded = stock(weights, *args, **kwargs)
                finally:
                    self.note_new_weights()
                written = self._written(model, loaded)
            for linear in self._packed:
                if self._derived and (written is None or linear.plain.data_ptr() in written):
                    linear.pack()
            return loaded

        model.load_weights = load_weights

    @contextmanager
    def _plain_weights(self):
        """Packed layers have the parameters that they were loaded with: those know how to load."""
        emptied = [(linear, linear.layer.weight) for linear in self._packed if linear.remove_weight]
        for linear, _ in emptied:
            linear.layer.weight = linear.parameter
        try:
            yield
        finally:
            for linear, empty in emptied:
                linear.layer.weight = empty

    @staticmethod
    def _written(model: torch.nn.Module, loaded) -> set[int] | None:
        """Addresses of the parameters that load_weights() says it has loaded; None: any of them."""
        if not isinstance(loaded, (set, frozenset)):
            return None
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if not loaded <= parameters.keys():
            return None
        return {parameters[name].data_ptr() for name in loaded}

    def elsewhere(self, model: torch.nn.Module) -> list[str]:
        """Parameters that somebody has put out of the region: they would be neither freed nor saved."""
        end = self._weights_address + self._weights_bytes
        return [
            name
            for name, parameter in model.named_parameters()
            if parameter.numel() > 0 and not self._weights_address <= parameter.data_ptr() < end
        ]

    @contextmanager
    def allocating_kv(self, model_runner):
        """Around the allocation of the KV cache, when the runner has its description. An encoder's has no KV."""
        with _KvFromRegion(self):
            yield
        if not self.kv_address and model_runner.kv_cache_config.kv_cache_tensors:
            raise _other_allocation("no torch.zeros(bytes, dtype=int8) allocated the KV cache")

    def allocate_kv(self, size: int) -> torch.Tensor:
        self.kv_address = self.rank_memory.allocate("kv_cache", "kv", size)
        self._kv_bytes = size
        return region_tensor(self.kv_address, size).view(torch.int8)

    def describe_kv(self, model_runner) -> None:
        """Tells the core where each block lies."""
        kv_cache_config = model_runner.kv_cache_config
        self.check_kv(model_runner.kv_caches, kv_cache_config.kv_cache_tensors)
        self.kv_is_bf16 = kv_layout.is_bf16(kv_cache_config)
        if not kv_layout.scattered_blocks(kv_cache_config):  # else it sleeps whole; preserve_state is refused
            self.rank_memory.set_kv_layout("kv_cache", kv_layout.to_value(kv_cache_config, self.kv_address))

    def check_kv(self, caches: list[torch.Tensor], described: list) -> None:
        """All KV that attention reads and writes lies in the region, as described."""
        end = self.kv_address + self._kv_bytes
        for cache in caches:
            if not self.kv_address <= cache.data_ptr() < end:
                raise _other_allocation("KV cache tensors lie outside of torpor's region")
        for tensor in described:
            if tensor.size > self._kv_bytes:
                raise _other_allocation(f"a KV cache of {tensor.size} bytes, allocated were {self._kv_bytes}")

    def keep_derived(self) -> None:
        self._keeps_derived = True

    def release_derived(self) -> None:
        if self._keeps_derived:
            self._kept_of = self.new_weights
            return
        self._derived = False
        for linear in self._packed:
            linear.release()

    def rebuild_derived(self) -> None:
        """Pack the linear layers, unless their packed weights were kept and are still those of the plain ones."""
        kept, self._kept_of, self._keeps_derived = self._kept_of == self.new_weights, None, False
        if kept:
            return
        for linear in self._packed:
            linear.pack()
        self._derived = True

    def _pack_first(self, layer: torch.nn.Module, remove_weight: bool, stock) -> None:
        if self.cpu_linear == "plain":
            layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)
            return
        parameter = layer.weight
        stock(layer, remove_weight)
        self._packed.append(PackedLinear(layer, parameter, remove_weight, stock))

    def _pack_again(self, layer: torch.nn.Module, remove_weight: bool, stock) -> None:
        if self.cpu_linear == "plain":
            return
        linear = next(known for known in self._packed if known.layer is layer)
        linear.plain.copy_(layer.weight.data)
        stock(layer, remove_weight)

    def _keep_layers_of(self, model: torch.nn.Module) -> None:
        """A draft model's weights stay where they are: vLLM does not load them again with the model's."""
        layers = {id(layer) for layer in model.modules()}
        self._packed = [linear for linear in self._packed if id(linear.layer) in layers]

    def _all_packed_here(self, model: torch.nn.Module) -> None:
        """Weights that were packed without _pack_first() are gone: they could be neither saved nor packed again."""
        ours = {id(linear.layer) for linear in self._packed}
        for name, layer in model.named_modules():
            layer = getattr(layer, "base_layer", layer)  # of a LoRA layer, which shows its base's attributes as its own
            weight = getattr(layer, "weight", None)
            packed = getattr(layer, "cpu_linear", None) is not None and weight is not None and weight.numel() == 0
            if packed and id(layer) not in ours:
                raise _other_allocation(f"the weights of {name} were packed by other code than expected")

    def _move_parameters(self, model: torch.nn.Module) -> None:
        """Every parameter, and the plain weights of packed layers, into one region, sharing storages as they did."""
        tensors = [p for _, p in model.named_parameters(remove_duplicate=False) if p.numel() > 0]
        views = list(views_of_parameters(model).values())
        tensors += views
        tensors += [linear.plain for linear in self._packed]
        offsets: dict[int, int] = {}
        size = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in offsets:
                offsets[storage.data_ptr()] = size
                size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        if size == 0:
            return
        region = self._allocate_weights(size)
        for storage in {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values():
            start = offsets[storage.data_ptr()]
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            region[start : start + storage.nbytes()].copy_(whole)
        self._put_in_region(tensors, offsets)
        for linear in self._packed:
            linear.parameter.data = linear.plain

    def _allocate_weights(self, size: int) -> torch.Tensor:
        self._weights_address, self._weights_bytes = self.rank_memory.allocate("weights", "parameters", size), size
        return region_tensor(self._weights_address, size)

    def _put_in_region(self, tensors: list[torch.Tensor], offsets: dict[int, int]) -> None:
        """Each shows the region's bytes from now on, where `offsets` puts its storage."""
        region = region_tensor(self._weights_address, self._weights_bytes)
        moved = []
        for tensor in tensors:
            view = torch.empty(0, dtype=tensor.dtype)
            offset = offsets[tensor.untyped_storage().data_ptr()] // tensor.element_size() + tensor.storage_offset()
            moved.append(view.set_(region.untyped_storage(), offset, tensor.size(), tensor.stride()))
        for tensor, place in zip(tensors, moved, strict=True):  # only now: memory that goes may be given out again
            tensor.data = place


class PackedLinear:
    """A linear layer whose weights vLLM has packed for the CPU's matrix kernels."""

    def __init__(self, layer: torch.nn.Module, parameter: torch.nn.Parameter, remove_weight: bool, dispatch):
        self.layer = layer
        self.parameter = parameter  # as loaded, with vLLM's loader
        self.plain = parameter.data  # what is saved, and packed again
        self.remove_weight = remove_weight
        self._dispatch = dispatch

    def release(self) -> None:
        self.layer.cpu_linear = None

    def pack(self) -> None:
        if self.remove_weight:
            self.layer.weight = self.parameter
        self._dispatch(self.layer, self.remove_weight)


@contextmanager
def replaced_dispatch(ours):
    """While vLLM loads weights, its packing of a linear layer becomes ours(layer, remove_weight, stock)."""
    import vllm.model_executor.layers.utils as layer_utils

    stock = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer, remove_weight):
        if layer.weight.is_meta or layer.weight.ndim != 2:
            stock(layer, remove_weight)
        else:
            ours(layer, remove_weight, stock)

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch  # its users look it up when they call it
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = stock


def _other_allocation(what: str) -> Unsupported:
    what = f"vLLM allocates otherwise than torpor expects: {what}"
    return Unsupported(what, "set TORPOR_ENABLED=0 to run without torpor")


class _KvFromRegion(TorchFunctionMode):
    """Answers the one `torch.zeros(bytes, dtype=int8)` that backs the KV cache."""

    def __init__(self, memory: CpuWorkerMemory):
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and len(args) == 1
            and isinstance(args[0], int)
            and kwargs.get("dtype") is torch.int8
            and not self._memory.kv_address
        ):
            return self._memory.allocate_kv(args[0])
        return func(*args, **kwargs)
