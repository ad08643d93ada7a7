"""vLLM's platform for CPUs, without the one thing that keeps it from batches in flight."""

from vllm.platforms.cpu import CpuPlatform


class RigPlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        """Async scheduling stays as it was asked for, or as vLLM decided: on."""
        scheduler = vllm_config.scheduler_config
        decided = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = decided
