"""The entry point `vllm.general_plugins`. vLLM calls register() in every process, before its classes are built.

What is changed, all on classes and none in files: the scheduler can be frozen and counts recomputed tokens; the engine
core gets `torpor_call`; workers get the methods of torpor.vllm.worker and allocate in torpor's regions; LLM, LLMEngine and
AsyncLLM get the further arguments of `sleep` and `wake_up`. Each change checks first that vLLM is as it expects.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext

from torpor.errors import Unsupported

SUPPORTED_VLLM = "0.32"


def register() -> None:
    """Installs everything once; later calls do nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, "torpor_frozen"):
        return
    import vllm

    if not vllm.__version__.startswith(SUPPORTED_VLLM + "."):
        raise Unsupported(f"torpor's adapter is for vLLM {SUPPORTED_VLLM}, this is {vllm.__version__}", "install the torpor that fits this vLLM")
    _install_scheduler(Scheduler)
    _install_engine_core()
    _install_worker()
    _install_front_end()


def _check(function, *parameters: str) -> None:
    found = list(inspect.signature(function).parameters)
    if found[: len(parameters)] != list(parameters):
        raise Unsupported(f"vLLM's {function.__qualname__} takes {found}, torpor expects {list(parameters)}", "install the torpor that fits this vLLM")


def _install_scheduler(scheduler_class) -> None:
    from torpor.vllm.engine_core import count_recomputed

    stock_has_requests, stock_schedule = scheduler_class.has_requests, scheduler_class.schedule
    _check(stock_has_requests, "self")
    _check(stock_schedule, "self")

    def has_requests(self) -> bool:
        return not self.torpor_frozen and stock_has_requests(self)

    def schedule(self, *args, **kwargs):
        output = stock_schedule(self, *args, **kwargs)
        count_recomputed(self, output.num_scheduled_tokens)
        return output

    scheduler_class.torpor_frozen = False
    scheduler_class.has_requests = has_requests
    scheduler_class.schedule = schedule


def _install_engine_core() -> None:
    from vllm.v1.engine.core import EngineCore

    from torpor.vllm.engine_core import torpor_call

    _check(EngineCore.pause_scheduler, "self", "mode", "clear_cache")
    _check(EngineCore.collective_rpc, "self", "method", "timeout", "args")
    EngineCore.torpor_call = torpor_call


def _install_worker() -> None:
    from vllm.platforms import current_platform

    _install_sleep_backend()
    if current_platform.is_cuda():
        _install_gpu_worker()
    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_worker import CPUWorker

    from torpor.vllm import worker

    _check(CPUWorker._maybe_get_memory_pool_context, "self", "tag")
    for name in vars(worker):
        if name.startswith("torpor_"):
            setattr(CPUWorker, name, getattr(worker, name))
    CPUWorker._maybe_get_memory_pool_context = _memory_context
    stock_reload = CPUWorker.reload_weights

    def reload_weights(self, *args, **kwargs) -> None:
        with self.torpor_memory.reloading_weights() if hasattr(self, "torpor_memory") else nullcontext():
            stock_reload(self, *args, **kwargs)

    CPUWorker.reload_weights = reload_weights
    _install_cpu_generators()


def _install_cpu_generators() -> None:
    """A seeded request whose prompt is computed in several steps draws a number in each, and keeps only the last.

    vLLM takes the others back by the generator's offset, which generators of the CPU do not have: the engine ends with
    an error. Requests that are computed again after a wake run into it easily. Here their state is put back instead.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    stock_sample, stock_bookkeeping = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync
    _check(stock_sample, "self")
    _check(stock_bookkeeping, "self", "scheduler_output", "sampler_output")

    def sample(self, *args, **kwargs):
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
        self.torpor_before_draw = {int(row): generator.get_state() for row in discarded if (generator := self.input_batch.generators.get(int(row))) is not None}
        return stock_sample(self, *args, **kwargs)

    def bookkeeping_sync(self, *args, **kwargs):
        batch, before = self.input_batch, getattr(self, "torpor_before_draw", {})
        generators = batch.generators
        for row, state in before.items():
            generators[row].set_state(state)
        batch.generators = {row: generator for row, generator in generators.items() if row not in before}
        try:
            return stock_bookkeeping(self, *args, **kwargs)
        finally:
            batch.generators = generators

    CPUModelRunner._sample = sample
    CPUModelRunner._bookkeeping_sync = bookkeeping_sync


def _install_sleep_backend() -> None:
    """vLLM's own sleep mode, by the option `sleep_mode_backend="torpor"`."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    SleepModeBackendFactory.register_backend("torpor", "torpor.vllm.gpu_memory", "TorporBackend")


def _install_gpu_worker() -> None:
    """With that option, workers allocate in torpor's regions what sleeps."""
    from vllm.v1.worker.gpu_worker import Worker

    stock_context = Worker._maybe_get_memory_pool_context
    _check(stock_context, "self", "tag")

    def context(self, tag: str):
        config = self.vllm_config.model_config
        if config.sleep_mode_backend != "torpor" or not config.enable_sleep_mode:
            return stock_context(self, tag)
        from torpor.vllm.gpu_memory import TorporAllocator

        return TorporAllocator.get_instance().use_memory_pool(tag)

    Worker._maybe_get_memory_pool_context = context
    _install_graph_pool()


def _install_graph_pool() -> None:
    """What CUDA graphs hold sleeps with torpor's backend too; vLLM asks for that with `sleep_mode_offload_cudagraph`."""
    from types import SimpleNamespace

    from vllm.compilation import cudagraph_pool
    from vllm.config import VllmConfig

    stock_used, stock_instance = VllmConfig.use_cumem_cudagraph_pool.fget, cudagraph_pool.get_mem_allocator_instance
    _check(cudagraph_pool.capture_pool, "pool", "vllm_config")

    def used(self) -> bool:
        model = self.model_config
        if model is None or model.sleep_mode_backend != "torpor":
            return stock_used(self)
        as_stock = SimpleNamespace(sleep_mode_backend="cumem", enable_sleep_mode=model.enable_sleep_mode, sleep_mode_offload_cudagraph=model.sleep_mode_offload_cudagraph)
        return stock_used(SimpleNamespace(model_config=as_stock, compilation_config=self.compilation_config))

    def instance():
        from torpor.vllm.gpu_memory import TorporAllocator

        return TorporAllocator.of_this_process or stock_instance()  # made when weights were loaded, before any capture

    VllmConfig.use_cumem_cudagraph_pool = property(used)
    cudagraph_pool.get_mem_allocator_instance = instance


def _memory_context(self, tag: str):
    """CPUWorker._maybe_get_memory_pool_context: where vLLM is about to allocate weights or KV, it does so in regions."""
    from torpor import _core
    from torpor.vllm.memory import WorkerMemory
    from torpor.vllm.options import Options

    options = Options.of(self.vllm_config)
    if not options.enabled or tag not in ("weights", "kv_cache"):
        return nullcontext()
    if not hasattr(self, "torpor_memory"):
        ranks = _core.RankMemory({"rank": self.rank, "arena_budget_bytes": options.arena_budget_bytes, "arena_prefault_bytes": options.arena_prefault_bytes, "key_file": options.key_file})
        self.torpor_memory = WorkerMemory(ranks, options.cpu_linear)
    if tag == "weights":
        return self.torpor_memory.loading_weights(self.model_runner)
    return self.torpor_memory.allocating_kv()


def _install_front_end() -> None:
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    from torpor.vllm import frontend

    for cls in (LLM, LLMEngine, AsyncLLM):
        _check(cls.sleep, "self", "level", "mode")
        _check(cls.wake_up, "self", "tags")
    stock = {(cls, name): getattr(cls, name) for cls in (LLMEngine, AsyncLLM) for name in ("sleep", "wake_up")}

    def routed(cls, name, ours):
        """Ours where torpor holds the memory; vLLM's own otherwise, which knows no further arguments."""
        theirs = stock[cls, name]

        def method(self, *args, **kwargs):
            if holds_memory_of(self.vllm_config):
                return ours(self, *args, **kwargs)
            if set(kwargs) - {"level", "mode", "tags"}:
                raise Unsupported("torpor does not hold this engine's memory", "it supports vLLM on the CPU; set the option enabled")
            return theirs(self, *args, **kwargs)

        method.__doc__ = ours.__doc__ or theirs.__doc__
        return method

    LLMEngine.torpor_stock_step = LLMEngine.step
    LLMEngine.step = frontend.step
    LLMEngine.torpor_stock_has_unfinished_requests = LLMEngine.has_unfinished_requests
    LLMEngine.has_unfinished_requests = frontend.has_unfinished_requests
    LLMEngine.sleep = routed(LLMEngine, "sleep", frontend.sleep)
    LLMEngine.wake_up = routed(LLMEngine, "wake_up", frontend.wake_up)
    LLMEngine.checkpoint = frontend.checkpoint
    LLMEngine.torpor = frontend.call
    AsyncLLM.sleep = routed(AsyncLLM, "sleep", frontend.sleep_async)
    AsyncLLM.wake_up = routed(AsyncLLM, "wake_up", frontend.wake_up_async)
    AsyncLLM.checkpoint = frontend.checkpoint_async
    AsyncLLM.torpor = frontend.call_async
    stock_run = LLM._run_engine

    def run_engine(self, *args, **kwargs):
        if holds_memory_of(self.llm_engine.vllm_config):
            frontend.refuse_while_asleep(self.llm_engine)
        return stock_run(self, *args, **kwargs)

    LLM._run_engine = run_engine
    LLM.sleep = lambda self, level=1, mode="abort", **options: self.llm_engine.sleep(level=level, mode=mode, **options)
    LLM.wake_up = lambda self, tags=None, **options: self.llm_engine.wake_up(tags, **options)
    LLM.checkpoint = lambda self: self.llm_engine.checkpoint()
    LLM.is_sleeping = lambda self: self.llm_engine.is_sleeping()
    LLM.torpor = lambda self, method, options=None: self.llm_engine.torpor(method, options)


def holds_memory_of(vllm_config) -> bool:
    from vllm.platforms import current_platform

    from torpor.vllm.options import Options

    return current_platform.is_cpu() and Options.of(vllm_config).enabled
