# SPDX-License-Identifier: Apache-2.0
"""torpor replaces these attributes of vLLM's classes for the engines that asked. No file of vLLM is changed.

To be imported once the guards have passed. Each replacement does what vLLM does, unless torpor holds the
memory of the engine that it is called for.
"""

from __future__ import annotations

from types import SimpleNamespace

from torpor.vllm import engine_core, front_ends
from torpor.vllm.compat import lookup
from torpor.vllm.patching import Patches
from torpor.vllm.when_imported import when_imported


def install(patches: Patches, parts: tuple[str, ...]) -> None:
    """`parts` as in the manifest. A failure leaves undoing to the caller, who has `patches`."""
    front_ends.install(patches)
    engine_core.install(patches)
    if "cuda" in parts:
        _graph_pool(patches)
    _loader()


def _loader() -> None:
    """vLLM's load_format="torpor", in the process that loads a model."""

    def register() -> None:
        from torpor.vllm import loader

        loader.register()

    when_imported("vllm.model_executor.model_loader", register)


def _graph_pool(patches: Patches) -> None:
    """What CUDA graphs hold sleeps too; vLLM asks for that with `sleep_mode_offload_cudagraph`, if it can."""
    if lookup("vllm.compilation.cudagraph_pool", "capture_pool") is None:
        return
    from vllm.compilation import cudagraph_pool
    from vllm.config import VllmConfig

    stock_used = VllmConfig.use_cumem_cudagraph_pool.fget
    stock_instance = cudagraph_pool.get_mem_allocator_instance

    def used(self) -> bool:
        model = self.model_config
        if model is None or model.sleep_mode_backend != "torpor":
            return stock_used(self)
        as_stock = SimpleNamespace(
            sleep_mode_backend="cumem",
            enable_sleep_mode=model.enable_sleep_mode,
            sleep_mode_offload_cudagraph=model.sleep_mode_offload_cudagraph,
        )
        return stock_used(SimpleNamespace(model_config=as_stock, compilation_config=self.compilation_config))

    def instance():
        from torpor.vllm.gpu_allocator import TorporAllocator

        return TorporAllocator.of_this_process or stock_instance()  # made when weights were loaded, before any capture

    patches.set(VllmConfig, "use_cumem_cudagraph_pool", property(used))
    patches.set(cudagraph_pool, "get_mem_allocator_instance", instance)

    def of_adapters() -> None:
        """From vLLM 0.33 on the slots of LoRA adapters are of a tag of their own, too."""
        from vllm.v1.worker import lora_model_runner_mixin

        if hasattr(lora_model_runner_mixin, "get_mem_allocator_instance"):
            patches.set(lora_model_runner_mixin, "get_mem_allocator_instance", instance)

    when_imported("vllm.v1.worker.lora_model_runner_mixin", of_adapters)
