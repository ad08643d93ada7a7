# SPDX-License-Identifier: Apache-2.0
"""The methods that LLM, LLMEngine and AsyncLLM get: what they take, and what it means. The flow: frontend.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from torpor import _core
from torpor.errors import InvalidArgument
from torpor.vllm import fork_calls, frontend, residency_calls, session_calls, tracing
from torpor.vllm.engine_values import (
    DeferredBlocks,
    EngineState,
    Forked,
    Hibernated,
    Moved,
    RankLedger,
    Resumed,
    SleepPlan,
)
from torpor.vllm.frontend import Report, WakeReport
from torpor.vllm.mixed_in import Stock
from torpor.vllm.paths import expanded
from torpor.vllm.progress import Watcher, watched
from torpor.vllm.weight_updates import UPDATING_WEIGHTS, Updating, UpdatingAwaited, kv_option

_SLEEP = """Gives the engine's memory back and returns when it is free. What each combination means: docs/semantics.md.

    level: 0 only pauses; 1 and 2 free weights and KV cache. Weights are copied first, but not at level 2 without
        preserve_state, as vLLM has it.
    mode: what becomes of requests without preserve_state. "abort" ends them, "keep" computes them again after the wake,
        "wait" lets those that run end first (with preserve_state too); queued ones stay queued until the wake. None:
        "abort"; at level 0 they stay, as with "keep".
    preserve_state: keep requests, their KV blocks, prefix cache and samplers; they go on without recompute.
    to: where saved bytes go, "host" (memory) or "disk" (a checkpoint in the option
        `checkpoint_dir`; it survives the process).
    on_save_error: "abort" stays awake when saving fails. "discard" sleeps anyway: what cannot go to disk is kept in
        host memory, and only requests that have no room there are dropped; the report's `to` and `note` say so.
    tags: only these of "weights" and "kv_cache"; None: both. An empty list is refused.
    timeout: most seconds to wait for the running step, and with mode="wait" for requests to end; None: no bound.
    weights: "store" keeps them, "reload" does not, at any level: the wake names them, and kept requests wait until they
        are loaded. None: as the level says.
    metadata: names and values of JSON for the checkpoint: `torpor ls`, the reports of the sleep and of the wake from
        it have them. At most 16, names of 64 and values of 512 bytes. Refused unless to="disk".
    swap_out_to: path of a swap channel (torpor.vllm.exchange.channel()): one half of a swap. The other half is a
        wake of another engine with `swap_in_from` of the same path. With preserve_state, to host memory, of all tags.
    progress: a function that is called with a torpor.vllm.progress.Progress about ten times a second meanwhile, from a
        thread of its own. If it returns False or raises, the sleep is undone and raises Aborted.

    Returns a Report. Raises an error of torpor.errors: InvalidArgument for wrong arguments, Unsupported for what cannot
    be preserved (the error names it), TimedOut, NotEnoughRoom, FileError. Unless the error says otherwise
    (`state_changed`) the engine stays awake and nothing is lost.
    """

_WAKE_UP = """Brings the memory back, and the requests with it. Returns when it is back.

    tags: of "weights" and "kv_cache" wake only these, with all other tags that sleep; the engine takes no step until
        all are back. None: all. An empty list is refused.
    from_checkpoint: path of a checkpoint, or of a directory whose newest is taken, for a new engine without requests.
        The report's `checkpoint` says which one it was; an error names it. It wakes whole, with its KV, so `tags` and
        `kv` are refused. None: no checkpoint, unless the option `wake_latest` is on.
    on_restore_error: with from_checkpoint. "abort" raises, "discard" wakes without the checkpoint.
    kv: new weights were loaded meanwhile: what becomes of KV of the old ones, which no new request finds. "recompute":
        it is computed again from the tokens so far. "keep": running requests go on with it. "abort": the requests end;
        the report's `aborted` has the prompt, tokens and weight versions of each. None: refused (WrongState) if
        requests have such KV and the weights were seen to be written, unless they are known to be the same again.
    weights_changed: True is kv="recompute".
    early: returns, and the engine runs, once weights and the KV of all requests are back. Cached prefixes come behind
        it; torpor.continue_wake() tells how far they are.
    identity: with from_checkpoint. "exact": an engine like the one that wrote it, and the very next token. "portable":
        an engine of the option sessions, also of another release of vLLM, with the same model, weights and KV layout:
        requests keep their tokens and KV, the prefix cache stays behind; later tokens are those of this engine.
    swap_in_from: path of a swap channel: the other half of a swap. The engine wakes on the memory that the
        other one releases there, with all tags.
    progress: as in sleep(). A wake that is cancelled leaves the engine asleep as it was.

    Returns a WakeReport, true if the engine is fully awake; `reload` names what has no content and must be loaded.
    Raises Incompatible (by field) for a checkpoint of another model or configuration, Damaged, Unauthenticated,
    NotFound, NotEnoughRoom; the engine stays as it was.
    """

_CHECKPOINT = """Writes a checkpoint of the running requests to the option `checkpoint_dir` while the engine serves.

    Returns a Report once it is safe on disk; `seconds` is how long the engine was stopped. Raises as sleep(to="disk")
    does, and Aborted if a sleep came first. An engine in this process takes no step meanwhile.

    metadata: as in sleep().
    progress: as in sleep(). One that is cancelled, or whose task is, leaves nothing; requests do not notice.
    """


def _documented(text: str):
    def add(function):
        function.__doc__ = text
        return function

    return add


class Torpor:
    """`torpor` of an LLM or LLMEngine. call(), hibernate(), resume(), move() and fork() can change the engine; the
    other methods look at it."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine

    def call(self, method: str, options: dict | None = None) -> Any:
        """Call a method of torpor in the engine core by its name. Takes and returns plain data."""
        return frontend.call(self._engine, method, options)

    def state(self) -> EngineState:
        """Return the state of the engine and of its memory, now."""
        return EngineState.from_value(self.call("state"))

    def ledger(self) -> list[RankLedger]:
        """Return the memory of each rank, now."""
        return [RankLedger.from_value(value) for value in self.call("ledger")]

    def plan_sleep(
        self,
        level: int = 1,
        mode: str | None = None,
        *,
        preserve_state: bool = False,
        to: str = "host",
        tags: Iterable[str] | None = None,
        weights: str | None = None,
    ) -> SleepPlan:
        """Return what a sleep with these arguments of sleep() would move and free."""
        options = sleep_options(level, mode, preserve_state, to, "abort", tags, None, weights, None)
        return SleepPlan.from_value(self.call("plan_sleep", options))

    def continue_wake(self, wait: bool = False) -> DeferredBlocks:
        """Return what has become of the KV blocks that a post-copy wake deferred. `wait`: until none is left."""
        return DeferredBlocks.from_value(self.call("continue_wake", {"wait": "all" if wait else "none"}))

    def check_directory(self) -> None:
        """Raise where the host of a rank does not see the directory of checkpoints."""
        self.call("check_directory")

    @_documented(session_calls.HIBERNATE)
    def hibernate(
        self,
        requests: str | Iterable[str],
        image: str | None = None,
        *,
        to: str = "host",
        timeout: float | None = None,
    ) -> Hibernated:
        side = frontend.BlockingSide(self._engine)
        return frontend.finish(session_calls.hibernate(side, requests, image, timeout, to))

    @_documented(session_calls.RESUME)
    def resume(self, image: str | os.PathLike) -> Resumed:
        return frontend.finish(session_calls.resume(frontend.BlockingSide(self._engine), image))

    @_documented(session_calls.MOVE)
    def move(
        self,
        requests: str | Iterable[str],
        to: Callable[[str], Any] | Any,
        image: str | None = None,
        *,
        timeout: float | None = None,
    ) -> Moved:
        side = frontend.BlockingSide(self._engine)
        return frontend.finish(session_calls.move(side, requests, to, image, timeout))

    @_documented(fork_calls.FORK)
    def fork(
        self,
        request: str,
        n: int,
        *,
        at: int | None = None,
        seeds: Sequence[int | None] | None = None,
        action: str | None = None,
        timeout: float | None = None,
    ) -> Forked:
        side = frontend.BlockingSide(self._engine)
        return frontend.finish(fork_calls.fork(side, request, n, at, seeds, action, timeout))

    @property
    def sessions(self) -> residency_calls.Sessions:
        """The finished sessions, whose KV blocks can be moved between tiers."""
        return residency_calls.Sessions(self._engine)

    def hibernated(self) -> list[Hibernated]:
        """Return the images whose requests are hibernated."""
        return frontend.finish(session_calls.images(frontend.BlockingSide(self._engine)))


class AwaitedTorpor:
    """`torpor` of an AsyncLLM. Its methods are those of Torpor, and are awaited."""

    def __init__(self, engine: AsyncLLM):
        self._engine = engine

    async def call(self, method: str, options: dict | None = None) -> Any:
        return await frontend.call_async(self._engine, method, options)

    async def state(self) -> EngineState:
        return EngineState.from_value(await self.call("state"))

    async def ledger(self) -> list[RankLedger]:
        return [RankLedger.from_value(value) for value in await self.call("ledger")]

    async def plan_sleep(
        self,
        level: int = 1,
        mode: str | None = None,
        *,
        preserve_state: bool = False,
        to: str = "host",
        tags: Iterable[str] | None = None,
        weights: str | None = None,
    ) -> SleepPlan:
        options = sleep_options(level, mode, preserve_state, to, "abort", tags, None, weights, None)
        return SleepPlan.from_value(await self.call("plan_sleep", options))

    async def continue_wake(self, wait: bool = False) -> DeferredBlocks:
        return DeferredBlocks.from_value(await self.call("continue_wake", {"wait": "all" if wait else "none"}))

    async def check_directory(self) -> None:
        await self.call("check_directory")

    @_documented(session_calls.HIBERNATE)
    async def hibernate(
        self,
        requests: str | Iterable[str],
        image: str | None = None,
        *,
        to: str = "host",
        timeout: float | None = None,
    ) -> Hibernated:
        return await session_calls.hibernate(frontend.AsyncSide(self._engine), requests, image, timeout, to)

    @_documented(session_calls.RESUME)
    async def resume(self, image: str | os.PathLike) -> Resumed:
        return await session_calls.resume(frontend.AsyncSide(self._engine), image)

    @_documented(session_calls.MOVE)
    async def move(
        self,
        requests: str | Iterable[str],
        to: Callable[[str], Any] | Any,
        image: str | None = None,
        *,
        timeout: float | None = None,
    ) -> Moved:
        return await session_calls.move(frontend.AsyncSide(self._engine), requests, to, image, timeout)

    @_documented(fork_calls.FORK)
    async def fork(
        self,
        request: str,
        n: int,
        *,
        at: int | None = None,
        seeds: Sequence[int | None] | None = None,
        action: str | None = None,
        timeout: float | None = None,
    ) -> Forked:
        side = frontend.AsyncSide(self._engine)
        return await fork_calls.fork(side, request, n, at, seeds, action, timeout)

    @property
    def sessions(self) -> residency_calls.AwaitedSessions:
        return residency_calls.AwaitedSessions(self._engine)

    async def hibernated(self) -> list[Hibernated]:
        return await session_calls.images(frontend.AsyncSide(self._engine))


class Blocking(Stock):
    """Of LLM and LLMEngine. They return when they are done."""

    @_documented(_SLEEP)
    def sleep(
        self,
        level: int = 1,
        mode: str | None = None,
        *,
        preserve_state: bool = False,
        to: str = "host",
        on_save_error: str = "abort",
        tags: Iterable[str] | None = None,
        timeout: float | None = None,
        weights: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        swap_out_to: str | os.PathLike | None = None,
        progress: Watcher | None = None,
    ) -> Report:
        options = sleep_options(level, mode, preserve_state, to, on_save_error, tags, timeout, weights, swap_out_to)
        options |= metadata_option(metadata, to)
        side = frontend.BlockingSide(_engine(self))
        with watched(progress, options) as values:
            return frontend.finish(tracing.traced(side.engine, "sleep", frontend.sleep(side, mode, values)))

    @_documented(_WAKE_UP)
    def wake_up(
        self,
        tags: Iterable[str] | None = None,
        *,
        from_checkpoint: str | os.PathLike | None = None,
        on_restore_error: str = "abort",
        kv: str | None = None,
        weights_changed: bool = False,
        early: bool = False,
        identity: str = "exact",
        swap_in_from: str | os.PathLike | None = None,
        progress: Watcher | None = None,
    ) -> WakeReport:
        options = wake_options(
            tags, from_checkpoint, on_restore_error, kv, weights_changed, early, swap_in_from, identity
        )
        side = frontend.BlockingSide(_engine(self))
        with watched(progress, options) as values:
            return frontend.finish(tracing.traced(side.engine, "wake_up", frontend.wake_up(side, values)))

    @_documented(_CHECKPOINT)
    def checkpoint(self, *, metadata: Mapping[str, Any] | None = None, progress: Watcher | None = None) -> Report:
        side = frontend.BlockingSide(_engine(self))
        with watched(progress, metadata_option(metadata)) as values:
            return frontend.finish(tracing.traced(side.engine, "checkpoint", frontend.checkpoint(side, values)))

    @_documented(UPDATING_WEIGHTS)
    def updating_weights(self, version: str | None = None) -> Updating:
        return Updating(frontend.call, _engine(self), version)

    @property
    def torpor(self) -> Torpor:
        """What torpor in the engine core says of the engine."""
        return Torpor(_engine(self))


class Awaited(Stock):
    """Of AsyncLLM."""

    @_documented(_SLEEP)
    async def sleep(
        self,
        level: int = 1,
        mode: str | None = None,
        *,
        preserve_state: bool = False,
        to: str = "host",
        on_save_error: str = "abort",
        tags: Iterable[str] | None = None,
        timeout: float | None = None,
        weights: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        swap_out_to: str | os.PathLike | None = None,
        progress: Watcher | None = None,
    ) -> Report:
        options = sleep_options(level, mode, preserve_state, to, on_save_error, tags, timeout, weights, swap_out_to)
        options |= metadata_option(metadata, to)
        side = frontend.AsyncSide(self)
        with watched(progress, options) as values:
            return await tracing.traced(self, "sleep", frontend.sleep(side, mode, values))

    @_documented(_WAKE_UP)
    async def wake_up(
        self,
        tags: Iterable[str] | None = None,
        *,
        from_checkpoint: str | os.PathLike | None = None,
        on_restore_error: str = "abort",
        kv: str | None = None,
        weights_changed: bool = False,
        early: bool = False,
        identity: str = "exact",
        swap_in_from: str | os.PathLike | None = None,
        progress: Watcher | None = None,
    ) -> WakeReport:
        options = wake_options(
            tags, from_checkpoint, on_restore_error, kv, weights_changed, early, swap_in_from, identity
        )
        side = frontend.AsyncSide(self)
        with watched(progress, options) as values:
            return await tracing.traced(self, "wake_up", frontend.wake_up(side, values))

    @_documented(_CHECKPOINT)
    async def checkpoint(self, *, metadata: Mapping[str, Any] | None = None, progress: Watcher | None = None) -> Report:
        side = frontend.AsyncSide(self)
        with watched(progress, metadata_option(metadata)) as values:
            return await tracing.traced(self, "checkpoint", frontend.checkpoint(side, values))

    @_documented(UPDATING_WEIGHTS)
    def updating_weights(self, version: str | None = None) -> UpdatingAwaited:
        return UpdatingAwaited(frontend.call_async, self, version)

    @property
    def torpor(self) -> AwaitedTorpor:
        """What torpor in the engine core says of the engine."""
        return AwaitedTorpor(self)


def _engine(front_end) -> LLMEngine:
    return getattr(front_end, "llm_engine", front_end)


def metadata_option(metadata: Mapping[str, Any] | None, to: str = "disk") -> dict:
    """Return the option for the controller, checked."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata is {metadata!r}", "give a dict of names and values of JSON")
    _core.check_metadata(dict(metadata), to == "disk")  # before anything stands still for it
    return {"metadata": dict(metadata)}


def sleep_options(level, mode, preserve_state, to, on_save_error, tags, timeout, weights, swap_out_to) -> dict:
    """Options for the controller. `mode` is vLLM's name for what becomes of requests without preserve_state."""
    # "wait" has ended what ran.
    in_flight = {None: "abort", "abort": "abort", "keep": "recompute", "wait": "recompute"}.get(mode)
    if in_flight is None:
        raise InvalidArgument(f"mode is {mode!r}", 'use "abort", "wait" or "keep"')
    values = {
        "level": level, "preserve_state": preserve_state, "to": to, "on_save_error": on_save_error,
        "in_flight": "freeze" if preserve_state or (level == 0 and mode != "abort") else in_flight,
    }  # fmt: skip
    if weights is not None:
        values["weights"] = weights
    if tags is not None:
        values["tags"] = list(tags)
    if timeout is not None:
        values["timeout"] = float(timeout)
    if swap_out_to is not None:
        values["swap_out_to"] = os.fspath(swap_out_to)
    return values


def wake_options(
    tags,
    from_checkpoint,
    on_restore_error: str,
    kv: str | None,
    weights_changed: bool,
    early: bool,
    swap_in_from,
    identity: str = "exact",
) -> dict:
    if identity not in ("exact", "portable"):
        raise InvalidArgument(f"identity is {identity!r}", 'use "exact" or "portable"')
    values: dict[str, Any] = {"on_restore_error": on_restore_error}
    if (kv := kv_option(kv, weights_changed)) is not None:
        values["kv"] = kv
    if early:
        values["early"] = True
    if swap_in_from is not None:
        values["swap_in_from"] = os.fspath(swap_in_from)
    if tags is not None:
        values["tags"] = list(tags)
    if from_checkpoint is not None:
        values |= {"from_checkpoint": str(expanded(from_checkpoint)), "hold": True}
    if identity == "portable":
        if from_checkpoint is None:
            raise InvalidArgument('identity="portable" without a checkpoint', "name it in from_checkpoint")
        if set(values) != {"on_restore_error", "from_checkpoint", "hold"} or on_restore_error != "abort":
            raise InvalidArgument(
                'identity="portable" with other arguments than from_checkpoint',
                "leave them out",
            )
        values["portable"] = True
    return values
