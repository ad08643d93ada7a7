# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: what torpor replaces in vLLM, beside what the known releases call there by."""

import ast
import inspect
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from devtool import golden

from vllm import LLM
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import InprocClient, MPClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from torpor.vllm import asking, engine_core, front_end_methods, front_ends, patches
from torpor.vllm.cpu_generators import CpuGenerators
from torpor.vllm.deferred_blocks import DeferredBlocks
from torpor.vllm.outputs import KnownEnd
from torpor.vllm.patching import Patches
from torpor.vllm.scheduler import SchedulerMixin
from torpor.vllm.worker import WorkerMixin

IN_FRONT = (
    (Scheduler, SchedulerMixin),
    (Worker, WorkerMixin),
    (BlockPool, DeferredBlocks),
    (KVCacheManager, DeferredBlocks),
    (LLM, front_end_methods.Blocking),
    (LLM, front_ends.LLMMixin),
    (LLM, front_ends.NotHeld),
    (LLMEngine, front_end_methods.Blocking),
    (LLMEngine, front_ends.LLMEngineMixin),
    (AsyncLLM, front_end_methods.Awaited),
    (AsyncLLM, front_ends.NotHeld),
    (InprocClient, front_ends.InprocClientMixin),
    (MPClient, front_ends.MPClientMixin),
    (EngineCore, engine_core.EngineCoreMixin),
    (EngineCoreProc, engine_core.EngineCoreProcMixin),
    (RequestState, KnownEnd),
    (CPUModelRunner, CpuGenerators),
)


class Noted(Patches):
    """And each that replaces something: where, its name, and by what."""

    def __init__(self):
        super().__init__()
        self.replaced = []

    def set(self, owner, name, value):
        if hasattr(owner, name) and callable(value):
            self.replaced.append((owner, name, value))
        super().set(owner, name, value)


def does_not_take(value, signature: str) -> str | None:
    """Why it cannot be called as a function of this signature is: all by position, or all by name."""
    arguments = ast.parse(f"def f({signature}): pass").body[0].args
    by_position = [argument.arg for argument in arguments.posonlyargs]
    either = [argument.arg for argument in arguments.args]
    by_name = {argument.arg: None for argument in arguments.kwonlyargs}
    first = [*by_position, *either][:1]  # self
    try:
        inspect.signature(value).bind(*by_position, *either, **by_name)
        inspect.signature(value).bind(
            *(by_position or first), **dict.fromkeys(name for name in either if name not in first), **by_name
        )
    except TypeError as problem:
        return str(problem)
    return None


def main() -> None:
    made = Noted()
    asking.watch(made)
    patches.install(made, ("cpu", "cuda"))
    replaced = made.replaced + [
        (owner, name, value)
        for owner, ours in IN_FRONT
        for name, value in vars(ours).items()
        if not name.startswith("__") and callable(value) and hasattr(owner, name)
    ]
    seen, problems = [], []
    for owner, name, value in replaced:
        in_module = inspect.ismodule(owner)
        full = owner.__name__ if in_module else f"{owner.__module__}.{owner.__qualname__}"
        seen.append(f"{full}.{name}")
        for version, release in golden.known().items():
            try:
                noted = release.module(full) if in_module else golden.GoldenClass(release, full)
            except LookupError as problem:
                if full not in ("vllm.compilation.cudagraph_pool",) or version != "0.31.0":
                    problems.append(f"{version}: {full}: {problem}")
                continue
            if noted.has(name) and (why := does_not_take(value, noted.signature(name))):
                problems.append(f"{version}: {full}.{name}({noted.signature(name)}): {why}")
    print("RESULT " + json.dumps({"seen": seen, "problems": problems}), flush=True)


if __name__ == "__main__":
    main()
