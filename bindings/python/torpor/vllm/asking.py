# SPDX-License-Identifier: Apache-2.0
"""An engine asks for torpor. In a process where no engine asks, vLLM stays as it is but for what watch() sets."""

from __future__ import annotations

import os

from torpor.errors import Unsupported
from torpor.vllm import connector_options
from torpor.vllm.options import VARIABLES, has_torpor_backend
from torpor.vllm.patching import Patches


def asks(engine) -> bool:
    """Return whether an engine asks for torpor. `engine`: its VllmConfig, or the arguments of its server.

    Any option of torpor in the environment asks for all engines. `enabled=False` in the engine's own options is a no.
    """
    additional = getattr(engine, "additional_config", None)
    own = additional.get("torpor") if isinstance(additional, dict) else None
    if isinstance(own, dict) and own.get("enabled") is False:
        return False
    model = getattr(engine, "model_config", None) or engine  # arguments have what VllmConfig has in its parts
    load = getattr(engine, "load_config", None) or engine
    transfer = getattr(engine, "kv_transfer_config", None)
    worker = getattr(getattr(engine, "parallel_config", None), "worker_cls", None)
    return (
        own is not None
        or (isinstance(worker, str) and worker.startswith("torpor."))  # chosen in a process with another environment
        or not VARIABLES.isdisjoint(os.environ)
        or getattr(model, "sleep_mode_backend", None) == "torpor"
        or getattr(load, "load_format", None) == "torpor"
        or (transfer is not None and connector_options.is_ours(transfer))
    )


def watch(patches: Patches) -> None:
    """Look at each VllmConfig, when vLLM has finished it, whether its engine asks."""
    from vllm.config import VllmConfig
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.platforms import current_platform

    stock = VllmConfig._post_init_kv_transfer_config

    def post_init(self) -> None:
        stock(self)
        if asks(self) and _is_active():
            from torpor.vllm import configuration

            configuration.finish(self)
        elif asks(self) and _memory_fits():
            from torpor.vllm import sleep_backend

            sleep_backend.finish_memory_alone(self)
        elif has_torpor_backend(self):  # which would free nothing
            from torpor.vllm import plugin

            raise Unsupported(f'sleep_mode_backend="torpor": {plugin.inactive()}', 'use "cumem"')
        elif current_platform.is_cpu() and self.model_config is not None and self.model_config.enable_sleep_mode:
            raise ValueError("Sleep mode is not supported on current platform.")  # as vLLM says without torpor

    SleepModeBackendFactory.register_backend("torpor", "torpor.vllm.gpu_allocator", "TorporBackend")
    patches.set(VllmConfig, "_post_init_kv_transfer_config", post_init)
    if current_platform.is_cpu():  # vLLM looks there before it knows whether the engine asks for torpor
        from vllm.platforms.cpu import CpuPlatform

        patches.set(CpuPlatform, "is_sleep_mode_available", lambda self: True)


def _is_active() -> bool:
    from torpor.vllm import plugin  # which imports this module

    return plugin.activate()


def _memory_fits() -> bool:
    from torpor.vllm import plugin

    return plugin.memory_fits()
