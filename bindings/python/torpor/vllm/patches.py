"""torpor replaces these attributes of vLLM's classes for the engines that asked. No file of vLLM is changed.

To be imported once the guards have passed. Each replacement does what vLLM does, unless torpor holds the
memory of the engine that it is called for.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace

from torpor.errors import Unsupported
from torpor.vllm import frontend, restored
from torpor.vllm import front_end_methods as methods
from torpor.vllm.compat import lookup
from torpor.vllm.options import holds_memory_of
from torpor.vllm.patching import Patches


def install(patches: Patches, parts: tuple[str, ...]) -> None:
    """`parts` as in the manifest. A failure leaves undoing to the caller, who has `patches`."""
    _grammars(patches)
    _engine_core(patches)
    _front_ends(patches)
    _ends_of_engine_cores(patches)
    _finish_reasons(patches)
    if "cpu" in parts:
        _cpu_generators(patches)
    if "cuda" in parts:
        _graph_pool(patches)
    _loader()


# --- engine core ----------------------------------------------------------------------------------------


def _grammars(patches: Patches) -> None:
    """Where the reasoning of a request stood when its grammar was asked for is remembered."""
    from vllm.v1.structured_output import StructuredOutputManager

    from torpor.vllm.grammar import remember_beginning

    stock_init = StructuredOutputManager.grammar_init

    def grammar_init(self, request) -> None:
        remember_beginning(request)
        stock_init(self, request)

    patches.set(StructuredOutputManager, "grammar_init", grammar_init)


def _engine_core(patches: Patches) -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from torpor.vllm import freezing, slots
    from torpor.vllm.engine_core import release_kv_cache_memory, torpor_call
    from torpor.vllm.weight_updates import doubt_weights_after, note_timeout

    stock_has_work = EngineCoreProc.has_work
    patches.set(EngineCoreProc, "has_work", lambda self: slots.has_work(self, stock_has_work))

    freezing.install(patches)
    patches.set(EngineCore, "torpor_call", torpor_call)
    stock_release = EngineCore.release_kv_cache_memory

    def release(self) -> None:
        config = getattr(self, "vllm_config", None)  # vLLM's own method does without one, and so do its tests
        (release_kv_cache_memory if config is not None and holds_memory_of(config) else stock_release)(self)

    patches.set(EngineCore, "release_kv_cache_memory", release)
    stock_rpc = EngineCore.collective_rpc

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        try:
            return stock_rpc(self, method, timeout, args, kwargs)
        except TimeoutError:
            note_timeout(self, method)
            raise
        finally:
            doubt_weights_after(self, method)

    patches.set(EngineCore, "collective_rpc", collective_rpc)
    _outputs_of_drained_batches(patches)


def _outputs_of_drained_batches(patches: Patches) -> None:
    """In this process nothing sends outputs to the front end: it takes them, and those of a drain come first."""
    from vllm.v1.engine.core_client import InprocClient

    stock_output = InprocClient.get_output

    def get_output(self):
        drained = getattr(self.engine_core, "torpor_outputs", None)
        return drained.pop(0) if drained else stock_output(self)

    patches.set(InprocClient, "get_output", get_output)


# --- front ends -------------------------------------------------------------------------------------------------------


def _front_ends(patches: Patches) -> None:
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    for name in ("step", "has_unfinished_requests"):
        setattr(frontend.stock, name, getattr(LLMEngine, name))
        patches.set(LLMEngine, name, getattr(frontend, name))
    for cls, ours in ((LLM, methods.Blocking), (LLMEngine, methods.Blocking), (AsyncLLM, methods.Awaited)):
        for name in ("sleep", "wake_up", "updating_weights", "checkpoint", "torpor"):
            patches.set(cls, name, _routed(getattr(ours, name), getattr(cls, name, None)))
    patches.set(LLM, "is_sleeping", lambda self: self.llm_engine.is_sleeping())
    restored.install(patches)


def _ends_of_engine_cores(patches: Patches) -> None:
    """The client closes when its engine core has ended."""
    from vllm.v1.engine.core_client import MPClient

    stock = MPClient.shutdown

    def shutdown(self, timeout=None) -> None:
        try:
            stock(self, timeout)
        finally:
            frontend.end_calls(self)

    patches.set(MPClient, "shutdown", shutdown)


def _routed(ours, theirs):
    """`ours` where torpor holds the memory; `theirs` otherwise, which knows none of torpor's own arguments."""
    parameters = inspect.signature(ours).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def is_ours(front_end) -> bool:
        return holds_memory_of(getattr(front_end, "llm_engine", front_end).vllm_config)

    def stock_arguments(given: dict) -> dict:
        asked = [name for name in given if name in own and given[name] != own[name]]
        if theirs is None or asked:
            what = f"{ours.__name__}({', '.join(f'{name}=…' for name in asked)})"
            raise Unsupported(
                f"{what}: torpor does not hold this engine's memory",
                "it needs vLLM on the CPU with the option enabled, or on a GPU with gpu_preserve_state, and a "
                "scheduler that derives from vLLM's",
            )
        return {name: value for name, value in given.items() if name not in own}

    if inspect.iscoroutinefunction(ours):

        @functools.wraps(ours)
        async def method(self, *args, **kwargs):
            if is_ours(self):
                return await ours(self, *args, **kwargs)
            return await theirs(self, *args, **stock_arguments(kwargs)) if theirs else stock_arguments(kwargs)

    else:

        @functools.wraps(ours)
        def method(self, *args, **kwargs):
            if is_ours(self):
                return ours(self, *args, **kwargs)
            return theirs(self, *args, **stock_arguments(kwargs)) if theirs else stock_arguments(kwargs)

    return method


def _finish_reasons(patches: Patches) -> None:
    """RequestState.make_request_output() is where every output of a request passes, and its end with its reason."""
    from vllm.v1.engine.output_processor import RequestState

    stock = RequestState.make_request_output

    def make_request_output(self, new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs):
        if finish_reason is not None:
            self.torpor_finish = (str(finish_reason), stop_reason)
        output = stock(self, new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs)
        if restored.is_restored(self) and output is not None:
            output.torpor_restored = True
        return output

    patches.set(RequestState, "make_request_output", make_request_output)


# --- workers on the CPU -----------------------------------------------------------------------------------------------


def _cpu_generators(patches: Patches) -> None:
    """A seeded request whose prompt is computed in several steps draws a number in each, and keeps only the last.

    vLLM takes the others back by the generator's offset, which generators of the CPU do not have: the engine ends with
    an error. Requests that are computed again after a wake run into it easily. Here their state is put back instead.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    stock_sample, stock_bookkeeping = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def sample(self, *args, **kwargs):
        if getattr(self, "torpor_held", False):
            discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
            generators = ((int(row), self.input_batch.generators.get(int(row))) for row in discarded)
            self.torpor_before_draw = {row: drawn.get_state() for row, drawn in generators if drawn is not None}
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

    patches.set(CPUModelRunner, "_sample", sample)
    patches.set(CPUModelRunner, "_bookkeeping_sync", bookkeeping_sync)


def _loader() -> None:
    """vLLM's load_format="torpor"."""
    from torpor.vllm import loader

    loader.register()


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
        from torpor.vllm.gpu_memory import TorporAllocator

        return TorporAllocator.of_this_process or stock_instance()  # made when weights were loaded, before any capture

    patches.set(VllmConfig, "use_cumem_cudagraph_pool", property(used))
    patches.set(cudagraph_pool, "get_mem_allocator_instance", instance)
