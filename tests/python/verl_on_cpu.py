# SPDX-License-Identifier: Apache-2.0
"""A platform of verl without an accelerator, by verl's own seam for other devices: VERL_PLATFORM=cpu.

A whole training runs on it, if VERL_ENGINE_DEVICE=cuda also names the training engine (verl has none for CPUs) and Ray
is told of a GPU (`ray.init(num_gpus=1)`), by which verl places its workers.
"""

import contextlib
from types import SimpleNamespace

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA

_MEMORY = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


def _nothing(*_) -> int:
    return 0


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformCUDA):
    device_name = vendor_name = "cpu"
    device_module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
        **dict.fromkeys((*_MEMORY, "empty_cache", "ipc_collect"), _nothing),
        mem_get_info=lambda *_: (0, 0), get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state,
        get_device_name=lambda *_: "CPU",
    )  # fmt: skip

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check=False) -> bool:
        return True

    def current_device(self) -> str:  # verl gives it to Tensor.to()
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index=None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:  # weights go by shared memory
        return False

    def nvtx_range(self, msg: str):
        return contextlib.nullcontext()

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def cudart(self) -> None:
        return None


_init_process_group = torch.distributed.init_process_group


def _init_process_group_once(backend=None, *args, **kwargs) -> None:
    """verl asks for gloo on the CPU and the platform's backend on its device: here both are one, torch refuses it."""
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _init_process_group_once
