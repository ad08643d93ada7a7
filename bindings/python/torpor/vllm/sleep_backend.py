# SPDX-License-Identifier: Apache-2.0
"""Which backend vLLM's sleep mode has, on a GPU."""

from __future__ import annotations

from torpor.errors import InvalidArgument
from torpor.vllm import variables
from torpor.vllm.options import VARIABLES, Options, has_torpor_backend, names_torpor

_DEFAULT_BACKEND, _BACKEND = "cumem", "torpor"


def choose(vllm_config, options: Options) -> None:
    """On a GPU: vLLM 0.31 and 0.32 have no argument for the backend of their sleep mode, so it follows from torpor's.

    gpu_preserve_state switches the sleep mode on. Other options of torpor leave that to enable_sleep_mode.
    """
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    if model is None or not current_platform.is_cuda():
        return
    if options.gpu_preserve_state:
        if model.sleep_mode_backend not in (_DEFAULT_BACKEND, _BACKEND):
            raise InvalidArgument(
                f"gpu_preserve_state beside sleep_mode_backend={model.sleep_mode_backend!r}", "leave one of them out"
            )
        if getattr(model, "enable_nccl_comm_suspend", False):
            raise InvalidArgument(
                "gpu_preserve_state beside enable_nccl_comm_suspend: torpor's sleep keeps the communicators",
                "leave one of them out",
            )
        model.enable_sleep_mode = True
        model.enable_cumem_allocator = True  # as vLLM does with its sleep mode: the name says less than it means
    elif not (model.enable_sleep_mode and model.sleep_mode_backend == _DEFAULT_BACKEND and names_torpor(vllm_config)):
        return
    model.sleep_mode_backend = _BACKEND


def choose_worker(vllm_config) -> None:
    """Have workers allocate torpor's memory, if vLLM's sleep mode is on with torpor's backend."""
    if has_torpor_backend(vllm_config):
        from torpor.vllm import memory_worker  # for GPUs alone

        memory_worker.choose(vllm_config)


def finish_memory_alone(vllm_config) -> None:
    """Called with a VllmConfig that asks for torpor, where torpor can give vLLM's sleep mode its memory and no more."""
    options = Options.of(vllm_config)
    if not options.enabled:
        return
    variables.refuse_misspelt(VARIABLES)
    choose(vllm_config, options)
    choose_worker(vllm_config)
