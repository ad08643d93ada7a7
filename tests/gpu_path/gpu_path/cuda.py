# SPDX-License-Identifier: Apache-2.0
"""TORPOR_GPU_PATH_CUDA=1: memory as torpor has it on a GPU, below tensors of the CPU; platform.py says CUDA to torpor.

Workers have GpuWorkerMemory, and torch has pools (pools.py) over the device without a GPU (TORPOR_MEMORY_DEVICE=host).
Memory that sleeps cannot be touched. Of a GPU's five tags the engine makes weights, kv_cache and runtime itself. The
gpu_path makes the other two, when the engine has warmed up:

- workspace: vLLM's WorkspaceManager, which grows once. Each step writes into it, and expects nothing of it.
- cudagraph: what a captured graph has. Each step expects what the step before has left there.

With TORPOR_HOST_DEVICE_BYTES the device has so many bytes, and vLLM checks what of them is free when a worker starts.
With TORPOR_HOST_DEVICE_SHARED_FILE all processes that name that file share them, as one GPU.
"""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import torch
from torpor import memory

WORKSPACE_BYTES = 300 << 10
GRAPH_VALUES = 40_000  # more than a small segment


def install() -> None:
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.v1.worker.cpu_worker import CPUWorker

    from gpu_path import pools

    pools.install()
    stock = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer, remove_weight) -> None:
        """Weights stay as they are loaded, as on a GPU."""
        if layer.weight.is_meta or layer.weight.ndim != 2:
            stock(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch
    warm_up, execute_model = CPUWorker.compile_or_warm_up_model, CPUWorker.execute_model

    def compile_or_warm_up_model(self):
        result = warm_up(self)
        self.gpu_path_scratch = _Scratch(self)
        return result

    def execute_and_check(self, scheduler_output, *args, **kwargs):
        scratch = getattr(self, "gpu_path_scratch", None)
        if scratch is not None and scheduler_output.total_num_scheduled_tokens > 0:  # else no kernel runs
            scratch.step()
        return execute_model(self, scheduler_output, *args, **kwargs)

    CPUWorker.compile_or_warm_up_model, CPUWorker.execute_model = compile_or_warm_up_model, execute_and_check
    if "TORPOR_HOST_DEVICE_BYTES" in os.environ:
        _check_free_memory()


def _check_free_memory() -> None:
    """A worker starts only where vLLM's own check of a GPU's free memory allows it."""
    from vllm.v1.worker import utils
    from vllm.v1.worker.cpu_worker import CPUWorker

    init_device = CPUWorker.init_device

    def init_device_if_there_is_room(self):
        init_device(self)
        with memory.scope("probe", keep=False):
            memory.free(memory.allocate(1))
        [device] = memory.ledger().values()
        total, used = device["device_capacity_bytes"], device["device_used_bytes"]
        snapshot = SimpleNamespace(free_memory=total - used, total_memory=total, device_="gpu_path")
        utils.request_memory(snapshot, self.cache_config)

    CPUWorker.init_device = init_device_if_there_is_room


class _Scratch:
    """Memory of the tags workspace and cudagraph, of one worker."""

    def __init__(self, worker):
        from gpu_path import pools
        from torpor.vllm.gpu_allocator import TorporAllocator
        from vllm.v1.worker import workspace

        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(worker.device)
        self._workspace = workspace.current_workspace_manager()
        # vLLM 0.31 has its workspace in torch's own pool
        self._workspace._alloc_context = lambda: worker._maybe_get_memory_pool_context("workspace")
        for part in (3, 1):  # it grows, and outgrown memory is to be given back
            self._workspace.get_simultaneous(((WORKSPACE_BYTES // part,), torch.uint8))
        self._workspace.lock()
        with TorporAllocator.get_instance().cudagraph_pool() as pool_id, pools.captured(pool_id):
            self._graph = torch.zeros(GRAPH_VALUES, dtype=torch.int64)
        self._numbers = itertools.count(1)
        self._left = 0

    def step(self) -> None:
        [scratch] = self._workspace.get_simultaneous(((WORKSPACE_BYTES,), torch.uint8))
        scratch.fill_(0xA5)
        assert self._graph.eq(self._left).all(), "what a graph has is not what its last step left there"
        self._left = next(self._numbers)
        self._graph.fill_(self._left)
