# SPDX-License-Identifier: Apache-2.0
"""What a zygote (zygote.py) does before it forks: imports, and work that vLLM or torpor would repeat each time."""

from __future__ import annotations

import contextlib
import os

# What vLLM imports until an engine and a server are up. Importing them must start no thread; main() looks.
_IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.llama.modeling_llama",
    "uvloop",
)
# Not in each version.
_IMPORTS_IF_THERE = (
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.async_scheduler",
)
_IMPORTS_OF_V2 = ("vllm.v1.worker.cpu.model_runner",)


def import_vllm() -> None:
    for name in _IMPORTS + (_IMPORTS_OF_V2 if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else ()):
        __import__(name)
    for name in _IMPORTS_IF_THERE:
        with contextlib.suppress(ModuleNotFoundError):
            __import__(name)


def prepare(with_torpor: bool) -> None:
    _wait_without_spinning()
    _replace_kernels()
    _look_at_models_here()
    _list_processors_here()
    if with_torpor:
        _import_torpor()
    _set_up_logging()


def _wait_without_spinning() -> None:
    """vLLM's workers and engine cores spin for a second for each other's next message, which takes a core each.

    Here they look every two milliseconds. (They are sent a word too, but it may get lost, as vLLM knows.)
    """
    from vllm.distributed.device_communicators import shm_broadcast

    assert shm_broadcast.SpinCondition.__init__.__defaults__ == (1,)
    assert shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS > 2
    shm_broadcast.SpinCondition.__init__.__defaults__ = (0,)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 2


def _replace_kernels() -> None:
    """vLLM's workers look through all modules for Triton kernels that a CPU has others for. That is done once here."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def _look_at_models_here() -> None:
    """vLLM has each kind of model looked at by an interpreter of its own, lest the engine's begins with CUDA."""
    from vllm.model_executor.models import registry

    assert callable(registry._run_in_subprocess)
    registry._run_in_subprocess = lambda look: look()


def _list_processors_here() -> None:
    """vLLM has `lscpu` list them twice for each engine."""
    with contextlib.suppress(ImportError, AttributeError):  # vLLM 0.31 has no such module
        from vllm.utils import cpu_resource_utils

        processors = cpu_resource_utils._get_cpu_list()
        cpu_resource_utils._get_cpu_list = lambda: list(processors)


def _import_torpor() -> None:
    """And it compares vLLM with its manifest, for which it remembers what it has read of vLLM's code."""
    import vllm
    from torpor.errors import Unsupported
    from torpor.vllm import compat

    with contextlib.suppress(Unsupported):
        compat.check(vllm.__version__, "engine", "cpu")
        import torpor.vllm.patches  # noqa: F401


def _set_up_logging() -> None:
    """As each engine does it: it looks at all loggers, which an engine that wants nothing else need not do again."""
    with contextlib.suppress(ImportError):  # vLLM 0.31 does it when it is imported, and not again
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging

        configure_logging(LoggingConfig())
