# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform for CPUs, without the one thing that keeps it from batches in flight.

With TORPOR_GPU_PATH_CUDA=1 it is CUDA to torpor, and stays a CPU to vLLM.
"""

import sys

from gpu_path import pretends_cuda
from vllm.platforms.cpu import CpuPlatform


class GpuPathPlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        """Async scheduling stays as it was asked for, or as vLLM decided: on."""
        scheduler = vllm_config.scheduler_config
        decided = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = decided

    def is_cuda(self) -> bool:
        return pretends_cuda() and _torpor_asks()

    def is_cpu(self) -> bool:
        return not (pretends_cuda() and _torpor_asks())

    def is_sleep_mode_available(self) -> bool:
        return pretends_cuda() or super().is_sleep_mode_available()

    def is_cumem_allocator_available(self) -> bool:
        return pretends_cuda() or super().is_cumem_allocator_available()


def _torpor_asks() -> bool:
    return sys._getframe(2).f_globals["__name__"].split(".")[0] == "torpor"
