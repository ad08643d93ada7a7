# SPDX-License-Identifier: Apache-2.0
"""What LLM, LLMEngine and AsyncLLM of an engine that asks do otherwise than vLLM's, as mixins (mixed_in.py)."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, NoReturn

from vllm import LLM
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import InprocClient, MPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Metric

from torpor.errors import Unsupported
from torpor.vllm import engine_core, frontend, metrics_snapshot, restored
from torpor.vllm.asking import asks
from torpor.vllm.front_end_methods import Awaited, Blocking
from torpor.vllm.mixed_in import mix_in, mix_in_behind
from torpor.vllm.options import holds_memory_of
from torpor.vllm.patching import Patches


class LLMMixin(Blocking):
    def is_sleeping(self) -> bool:
        return self.llm_engine.is_sleeping()

    # It is asked before vLLM adds the requests: it would answer them with those of the next call.

    def _run_completion(self, *args, **kwargs):
        frontend.refuse_while_asleep(self.llm_engine)
        return super()._run_completion(*args, **kwargs)

    def _run_chat(self, *args, **kwargs):
        frontend.refuse_while_asleep(self.llm_engine)
        return super()._run_chat(*args, **kwargs)

    def _render_and_run_requests(self, *args, **kwargs):
        frontend.refuse_while_asleep(self.llm_engine)
        return super()._render_and_run_requests(*args, **kwargs)

    def _run_engine(self, *args, **kwargs):
        with restored.run_without(self.llm_engine):
            return super()._run_engine(*args, **kwargs)

    def _run_tiling_engine(self, *args, **kwargs):
        with restored.run_without(self.llm_engine):
            return super()._run_tiling_engine(*args, **kwargs)

    def wait_for_completion(self, *args, **kwargs):
        own = super().wait_for_completion(*args, **kwargs)
        return restored.finish(self.llm_engine) + own


class LLMEngineMixin(Blocking):
    def step(self) -> list:
        return frontend.step(self, super().step)

    def has_unfinished_requests(self) -> bool:
        return frontend.has_unfinished_requests(self, super().has_unfinished_requests)

    def get_metrics(self) -> list[Metric]:
        return super().get_metrics() + metrics_snapshot.snapshot()


class NotHeld:
    """Mixin of an engine that asks while torpor does not hold its memory. Refuses what is torpor's, by name."""

    def sleep(self, *args, **arguments):
        return _stock_of(self).sleep(self, *args, **_without_torpors(Blocking.sleep, arguments))

    def wake_up(self, *args, **arguments):
        return _stock_of(self).wake_up(self, *args, **_without_torpors(Blocking.wake_up, arguments))

    def checkpoint(self, **_):
        _refuse("checkpoint()")

    def updating_weights(self, version: str | None = None):
        _refuse("updating_weights()")

    @property
    def torpor(self) -> RefusedTorpor:
        return RefusedTorpor()


class RefusedTorpor:
    def __getattr__(self, name: str):
        _refuse(f"torpor.{name}()")


def _without_torpors(method, arguments: dict) -> dict:
    """Return `arguments` without torpor's own. Refuses those of torpor's that are not their default."""
    own = {p.name: p.default for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY}
    if asked := [name for name, value in arguments.items() if name in own and value != own[name]]:
        _refuse(f"{method.__name__}({', '.join(f'{name}=…' for name in asked)})")
    return {name: value for name, value in arguments.items() if name not in own}


def _refuse(call: str) -> NoReturn:
    raise Unsupported(
        f"{call}: torpor does not hold this engine's memory",
        "it needs vLLM on the CPU with the option enabled, or on a GPU with gpu_preserve_state, and a "
        "scheduler that derives from vLLM's",
    )


class InprocClientMixin(InprocClient):
    """An engine core in this process sends no outputs. The front end takes them; those of a drain come first."""

    def get_output(self):
        drained = getattr(self.engine_core, "torpor_outputs", None)
        return drained.pop(0) if drained else super().get_output()


class MPClientMixin(MPClient):
    """Ends calls that wait for an engine core that has ended. vLLM shuts the client down, and leaves them waiting."""

    def shutdown(self, timeout=None) -> None:
        try:
            super().shutdown(timeout)
        finally:
            frontend.end_calls(self)


def _of_async(mixin: type) -> type:
    """Return `mixin` as a class that derives from AsyncLLM, which is abstract (mixed_in.py)."""
    methods = ("sleep", "wake_up", "checkpoint", "updating_weights", "torpor")
    return type(mixin.__name__, (AsyncLLM,), {name: vars(mixin)[name] for name in methods})


_MIXINS = {  # where torpor holds the engine's memory, and where it does not
    LLM: (LLMMixin, NotHeld),
    LLMEngine: (LLMEngineMixin, NotHeld),
    AsyncLLM: (_of_async(Awaited), _of_async(NotHeld)),
}


def _stock_of(front_end) -> Any:
    return next(cls for cls in _MIXINS if isinstance(front_end, cls))


def install(patches: Patches) -> None:
    """Watch for front ends as vLLM makes them. An LLM is made before its engine asks: it is seen when it gets it."""
    for cls in (LLMEngine, AsyncLLM):
        patches.set(cls, "__init__", _then_adopt(cls.__init__))

    def llm_engine(self) -> LLMEngine:
        try:
            return vars(self)["llm_engine"]
        except KeyError:
            raise AttributeError("llm_engine") from None

    def set_llm_engine(self, engine: LLMEngine | None) -> None:
        vars(self)["llm_engine"] = engine
        if isinstance(engine, LLMEngine):
            adopt(self, engine.vllm_config)

    def delete_llm_engine(self) -> None:
        llm_engine(self)
        del vars(self)["llm_engine"]

    patches.set(LLM, "llm_engine", property(llm_engine, set_llm_engine, delete_llm_engine))


def _then_adopt(stock):
    @functools.wraps(stock)
    def init(self, *args, **kwargs) -> None:
        stock(self, *args, **kwargs)
        adopt(self, self.vllm_config)

    return init


def adopt(front_end: LLM | LLMEngine | AsyncLLM, vllm_config) -> None:
    """Give this front end, and its client, what an engine with this configuration has asked for."""
    if not asks(vllm_config):
        return
    stock = _stock_of(front_end)
    held, not_held = _MIXINS[stock]
    mix_in_behind(front_end, held if holds_memory_of(vllm_config) else not_held, stock)
    client = getattr(front_end, "engine_core", None)
    if isinstance(client, InprocClient):
        mix_in(client, InprocClientMixin)
        engine_core.adopt(client.engine_core)
    elif isinstance(client, MPClient):
        adopt_client(client)


def adopt_client(client: MPClient) -> None:
    """Give the client of engine cores in other processes its mixin.

    An engine core that ends by itself says so first: vLLM does not shut the client down then.
    """
    mix_in(client, MPClientMixin)
    resources, known = client.resources, weakref.ref(client)
    stock = resources.validate_alive

    def validate_alive(frames) -> None:
        try:
            stock(frames)
        except EngineDeadError:
            if (client := known()) is not None:
                frontend.end_calls(client)
            raise

    resources.validate_alive = validate_alive  # the task, or thread, that receives holds `resources` alone
