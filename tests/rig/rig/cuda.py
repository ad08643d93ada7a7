"""TORPOR_RIG_CUDA=1: memory as torpor has it on a GPU, below tensors of the CPU; platform.py says CUDA to torpor.

Workers have GpuWorkerMemory, with vLLM's tags of a GPU (weights, kv_cache, runtime, workspace). region() takes memory
from the device without a GPU (TORPOR_MEMORY_DEVICE=host) instead of a torch.cuda.MemPool: each tensor that is made
inside has a region of its own, which is given back with the tensor. Memory that sleeps cannot be touched.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def install() -> None:
    import vllm.model_executor.layers.utils as layer_utils

    from torpor import memory

    memory.region = region
    stock = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer, remove_weight) -> None:
        """Weights stay as they are loaded, as on a GPU."""
        if layer.weight.is_meta or layer.weight.ndim != 2:
            stock(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch


@contextmanager
def region(tag: str, keep: bool = True):
    """torpor.memory.region(), for CPU tensors."""
    from torpor import memory

    with memory.scope(tag, keep), _InRegions():
        yield


class _InRegions(TorchDispatchMode):
    """What an operation allocates for its results is moved into regions."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before = () if function is torch.ops.aten.lift_fresh.default else (args, kwargs)  # of torch.tensor()
        known = {_address(tensor) for tensor in tree_leaves(before) if _has_storage(tensor)}
        for tensor in tree_leaves(result):
            if _has_storage(tensor) and _address(tensor) not in known:
                known.add(_move(tensor, zeros=function is torch.ops.aten.zeros.default))
        return result


def _has_storage(item) -> bool:
    return isinstance(item, torch.Tensor) and item.device.type == "cpu" and item.untyped_storage().nbytes() > 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _move(tensor: torch.Tensor, zeros: bool) -> int:
    """Returns the new address. Memory of a region is zeros when it is new."""
    from torpor import memory

    old = tensor.untyped_storage()
    size = old.nbytes()
    address = memory.allocate(size)
    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, memory.free, address).atexit = False
    if not zeros:
        ctypes.memmove(address, old.data_ptr(), size)
    new = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()  # it holds the buffer
    tensor.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
    return address
