# SPDX-License-Identifier: Apache-2.0
"""The entry points: vLLM calls both in every process, the platform's first."""

from __future__ import annotations

import functools
import os

from gpu_path import active, collectives, interpreter, kernels, kv_layouts, pretends_cuda


def platform() -> str | None:
    """vLLM asks before it looks whether Triton can be used."""
    if not active():
        return None
    interpreter.offer_backend()
    return "gpu_path.platform.GpuPathPlatform"


@functools.cache
def install() -> None:
    """The rest, once a process: vLLM's modules can be imported now."""
    if not active():
        return
    interpreter.install()
    kernels.install()
    kv_layouts.install()
    collectives.install()
    _reports()
    if pretends_cuda():
        from gpu_path import cuda

        cuda.install()
    if os.environ.get("TORPOR_GPU_PATH_SLOW_COPIES") == "1":
        from gpu_path import slow_copies

        slow_copies.install()


def _reports() -> None:
    """Add `gpu_path_report` to engine cores and workers: what is in force there, for tests of other processes."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    EngineCore.gpu_path_report = report
    WorkerBase.gpu_path_report = _report_of_worker


def report(core) -> dict:
    """Which of vLLM's ways an engine core goes."""
    [worker, *others] = core.collective_rpc("gpu_path_report")
    assert all(other == worker for other in others), f"workers differ: {[worker, *others]}"
    return worker | {
        "workers": 1 + len(others),
        "scheduler": type(core.scheduler).__name__,
        "async_scheduling": core.vllm_config.scheduler_config.async_scheduling,
        "step": core.step_fn.__name__,
        "batches_at_most": core.batch_queue_size,
        "batches_in_flight": len(core.batch_queue or ()),
    }


def _report_of_worker(worker) -> dict:
    """The runner by the class of vLLM's that it is or derives from, outside of vLLM's package for CPUs."""
    from vllm.triton_utils import HAS_TRITON

    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(worker.model_runner).__mro__]
    return {
        "runner": next(name for name in names if not name.startswith("vllm.v1.worker.cpu")),
        "triton": HAS_TRITON,
        "kv_layout": worker.vllm_config.cache_config.kv_cache_layout,
    }
