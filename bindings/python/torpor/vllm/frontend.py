# SPDX-License-Identifier: Apache-2.0
"""`sleep`, `wake_up` and their relatives on LLM, LLMEngine and AsyncLLM. The semantics are in docs/semantics.md."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import InvalidStateError
from typing import Any

from vllm.multimodal.cache import ShmObjectStoreSenderCache
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestState

from torpor import errors
from torpor.errors import Error, InvalidArgument, NotFound, TimedOut, Unsupported, WrongState
from torpor.vllm import data_parallel, restored, step_outputs
from torpor.vllm import outputs as front_end
from torpor.vllm.options import Options

_CHECKPOINT_SECONDS = 0.02  # between looks how far a checkpoint is
_DRAIN_SECONDS = 30.0  # for outputs that the engine sent before it was frozen to be processed here


class Report(dict):
    """What an operation did: `changed`, `seconds`, `phases`, `checkpoint`, `requests`, `freed_bytes`, `ledgers`, …

    Entries are attributes too.
    """

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class WakeReport(Report):
    """The report of a wake. It is true if the engine is fully awake, as vLLM's own wake_up() returns it."""

    def __bool__(self) -> bool:
        return self["fully_awake"]


def _unwrap(reply: dict):
    if "error" in reply:
        raise errors.from_dict(reply["error"])
    return reply["result"]


def _are_read_from_cache(engine: LLMEngine | AsyncLLM) -> bool:
    """Whether requests may still read images in shared memory. Clearing that cache would free what they read."""
    cached = isinstance(engine.renderer.mm_processor_cache, ShmObjectStoreSenderCache)
    return cached and bool(engine.output_processor.request_states)


# --- the flow, one for both kinds of front end ------------------------------------------------------------------------


class BlockingSide:
    """LLMEngine, and so LLM: calls return when they are done, none of these coroutines ever waits."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine

    async def call(self, method: str, options: dict | None = None):
        return call(self.engine, method, options)

    async def clear_caches(self) -> None:
        if not _are_read_from_cache(self.engine):
            self.engine.renderer.clear_mm_cache()

    def frozen_alone(self) -> contextlib.AbstractAsyncContextManager:
        """While it is held, no other call of this front end lets the engine stand still or go on."""
        return contextlib.nullcontext()

    def behind(self, sent: dict[str, int]) -> list[str]:
        return _behind(self.engine.output_processor, sent)

    async def receive(self) -> None:
        """Processes an output if one is there. Results come first from the next step()."""
        client = self.engine.engine_core
        if not isinstance(client, InprocClient) and client.outputs_queue.empty():
            time.sleep(0.001)  # noqa: ASYNC251  there is no event loop
        else:
            self._step()

    async def advance(self) -> None:
        """Lets the engine take a step, or receives what it does in its own process."""
        await self.receive()

    def serves_meanwhile(self) -> bool:
        """Whether the engine takes steps while this front end waits."""
        return not isinstance(self.engine.engine_core, InprocClient)

    async def pause(self) -> None:
        time.sleep(_CHECKPOINT_SECONDS)  # noqa: ASYNC251

    def _step(self) -> None:
        given = step_outputs.of(self.engine)
        given.first = given.first + LLMEngine.step(self.engine)

    def take(self, report: Report, lost: list[dict] | None = None) -> None:
        """Have the requests of a wake. `lost`: as of outputs.restore(); they fail too."""
        front_end.restore(self.engine.output_processor, report.pop("outputs"), with_queues=False, lost=lost)
        report["failed_requests"] = [*report.failed_requests, *(lost or ())]
        failed = front_end.fail(self.engine.output_processor, report.failed_requests)
        given = step_outputs.of(self.engine)
        given.first = given.first + failed

    def capture(self, requests: Iterable[str]) -> dict:
        """Return this front end's part of requests that leave for disk."""
        return front_end.capture(self.engine.output_processor, requests)

    def taken(self, outputs: dict) -> None:
        """Learn that the engine has the requests of take() for good."""

    async def lost_by_taker(self, requests: list[str]) -> str | None:
        """Return why nobody has these requests, whose image another engine took; None: that one has them, as far as is
        known. The call to it failed."""

    def adopt(self, states: list[RequestState], parent: RequestState, seeds: Sequence[int | None]) -> None:
        """Prepare for children of a fork, which are about to take steps. `seeds`: of each; None: its parent's."""

    def disown(self, states: list[RequestState]) -> None:
        """Undo adopt()."""

    def forget(self, outputs: dict) -> None:
        """Undo take() of these outputs, which may have come half-way."""
        front_end.forget(self.engine.output_processor, outputs)

    def fail(self, failed: list[dict]) -> None:
        """End requests with an error, as outputs.fail() takes them."""
        given = step_outputs.of(self.engine)
        given.first = given.first + front_end.fail(self.engine.output_processor, failed)

    def slept(self, report: Report, in_flight: str) -> None:
        step_outputs.of(self.engine).asleep = report.changed or not report.fully_awake
        self._take_outputs()
        ended = in_flight == "abort" or (report.level >= 1 and in_flight == "freeze")  # could not be kept
        if report.changed and not report.preserve_state and ended:
            self.aborted()

    def _take_outputs(self) -> None:
        """Process what an engine core in this process has put out in steps of its own: some may have ended."""
        client = self.engine.engine_core
        while isinstance(client, InprocClient) and getattr(client.engine_core, "torpor_outputs", None):
            self._step()

    def stays(self, state: str) -> None:
        """After a sleep that failed. It may have ended requests."""
        given = step_outputs.of(self.engine)
        given.asleep = state == "asleep"
        self._take_outputs()
        if not isinstance(self.engine.engine_core, InprocClient):  # it sends word of them
            return
        in_core = self.engine.engine_core.engine_core.scheduler.requests
        unfinished = {i for i, request in in_core.items() if not request.is_finished()} | given.hibernated
        self.aborted(i for i in self.engine.output_processor.request_states if i not in unfinished)

    def aborted(self, requests: Iterable[str] | None = None) -> None:
        """The engine core has these requests, or any, no more. One in another process sends word of it."""
        if isinstance(self.engine.engine_core, InprocClient):
            processor = self.engine.output_processor
            processor.abort_requests(list(processor.request_states if requests is None else requests), internal=True)

    def woken(self, report: Report) -> None:
        step_outputs.of(self.engine).asleep = not report.fully_awake


class AsyncSide:
    """AsyncLLM: a task of its own processes outputs as they come."""

    def __init__(self, engine: AsyncLLM):
        self.engine = engine

    async def call(self, method: str, options: dict | None = None):
        return await call_async(self.engine, method, options)

    async def clear_caches(self) -> None:
        if not _are_read_from_cache(self.engine):
            await self.engine.renderer.clear_mm_cache_async()

    def frozen_alone(self) -> contextlib.AbstractAsyncContextManager:
        if not hasattr(self.engine, "torpor_frozen_alone"):
            self.engine.torpor_frozen_alone = asyncio.Lock()
        return self.engine.torpor_frozen_alone

    def behind(self, sent: dict[str, int]) -> list[str]:
        return _behind(self.engine.output_processor, sent)

    async def receive(self) -> None:
        await asyncio.sleep(0.001)

    async def advance(self) -> None:
        await asyncio.sleep(0.001)

    def serves_meanwhile(self) -> bool:
        return not data_parallel.has_several(self.engine.engine_core)

    async def pause(self) -> None:
        await asyncio.sleep(_CHECKPOINT_SECONDS)

    def take(self, report: Report, lost: list[dict] | None = None) -> None:
        self.engine.torpor_collectors = getattr(self.engine, "torpor_collectors", {}) | front_end.restore(
            self.engine.output_processor, report.pop("outputs"), with_queues=True, lost=lost
        )
        report["failed_requests"] = [*report.failed_requests, *(lost or ())]
        front_end.fail(self.engine.output_processor, report.failed_requests)
        self.engine._run_output_handler()

    def capture(self, requests: Iterable[str]) -> dict:
        return front_end.capture(self.engine.output_processor, requests)

    def taken(self, outputs: dict) -> None:
        pass

    async def lost_by_taker(self, requests: list[str]) -> str | None:
        return None

    def adopt(self, states: list[RequestState], parent: RequestState, seeds: Sequence[int | None]) -> None:
        pass

    def disown(self, states: list[RequestState]) -> None:
        pass

    def forget(self, outputs: dict) -> None:
        front_end.forget(self.engine.output_processor, outputs)
        for item in outputs["requests"]:
            getattr(self.engine, "torpor_collectors", {}).pop(item["external_id"], None)

    def fail(self, failed: list[dict]) -> None:
        front_end.fail(self.engine.output_processor, failed)

    def slept(self, report: Report, in_flight: str) -> None:
        pass

    def stays(self, state: str) -> None:
        pass

    def aborted(self, requests: Iterable[str] | None = None) -> None:
        pass

    def woken(self, report: Report) -> None:
        pass


async def sleep(side: BlockingSide | AsyncSide, mode: str | None, values: dict) -> Report:
    level = values["level"]
    preserves = values["preserve_state"] and level >= 1
    loggers = side.engine.logger_manager
    if level >= 1:
        await side.clear_caches()
    if mode == "wait" and (await side.call("state"))["engine"] == "awake":
        await _finish_running(side, values)
    try:
        report = await _preserving(side, values) if preserves else Report(await side.call("sleep", values))
    except BaseException as problem:
        if mode == "wait":
            await side.call("end_drain")
        if getattr(problem, "state_changed", False):  # it may be asleep all the same
            side.stays((await side.call("state"))["engine"])
        raise
    side.slept(report, values["in_flight"])
    if report.changed and loggers is not None:
        loggers.record_sleep_state(1, level)
    return report


async def _preserving(side: BlockingSide | AsyncSide, values: dict) -> Report:
    """Sleep with the requests. Nothing is asked before the engine stands still: it would cost clients a step each."""
    async with side.frozen_alone():
        stands = await _freeze(side, values)
        if stands["engine"] not in ("awake", "asleep"):
            return Report(await side.call("sleep", values))
        return await _with_outputs(side, "sleep", values, stands["sent"])


async def _finish_running(side: BlockingSide | AsyncSide, values: dict) -> None:
    """Running requests end, queued ones stay queued. Outputs are processed meanwhile."""
    deadline = None if values.get("timeout") is None else time.monotonic() + values["timeout"]
    planned = values | {"preserve_state": False, "in_flight": "freeze" if values["level"] == 0 else "recompute"}
    try:
        while unfinished := await side.call("drain", planned):
            if deadline is not None and time.monotonic() >= deadline:
                what = f"{unfinished} requests have not ended"
                raise TimedOut(what, 'wait longer, or sleep with mode="abort" or "keep"')
            await side.advance()
    except BaseException:
        await side.call("end_drain")
        raise


async def _freeze(side: BlockingSide | AsyncSide, values: dict) -> dict[str, Any]:
    """Let the engine stand still, unless it is asleep. Return what EngineSide.freeze() says of it."""
    try:
        return await side.call(
            "freeze", {name: values[name] for name in ("timeout", "level", "tags") if name in values}
        )
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):  # the engine core does it all the same
        await side.call("unfreeze")
        raise


async def while_frozen(side: BlockingSide | AsyncSide, method: str, values: dict) -> Report:
    """Let the engine stand still, and call `method` of it with this front end's part under "outputs"."""
    async with side.frozen_alone():
        stands = await _freeze(side, values)
        return await _with_outputs(side, method, values, stands["sent"])


async def _with_outputs(side: BlockingSide | AsyncSide, method: str, values: dict, sent: dict[str, int]) -> Report:
    """Call `method` of an engine that stands still. If that fails, the engine goes on."""
    try:
        await caught_up(side, sent)
        return Report(await side.call(method, values | {"outputs": front_end.capture(side.engine.output_processor)}))
    except BaseException:
        await side.call("unfreeze")
        raise


async def checkpoint(side: BlockingSide | AsyncSide, values: dict, stay: bool = False) -> Report:
    """Write a checkpoint while the engine serves, where it can: it stops for the state and the last blocks alone.

    stay: the engine takes no step after the moment that the checkpoint has, until it sleeps or go_on() is called. An
        error lets it go on.
    """
    staying = {"stay": True} if stay else {}
    if not side.serves_meanwhile():
        return await while_frozen(side, "checkpoint", values | staying)
    begun = True  # also if this is cancelled before the engine core has answered
    try:
        try:
            await side.call("begin_checkpoint", values)
        except Error:
            begun = False  # another one may be under way
            raise
        await _beyond(side, "copying")
        taken = await while_frozen(side, "take_checkpoint", staying)
        await _beyond(side, "writing")
        return Report(await side.call("end_checkpoint") | taken)
    except BaseException:
        if begun:
            with contextlib.suppress(Exception):
                await side.call("cancel_checkpoint")
        if stay:
            with contextlib.suppress(Exception):
                await go_on(side)
        raise


async def go_on(side: BlockingSide | AsyncSide) -> None:
    """Let an engine take steps that stayed after a checkpoint."""
    await side.call("unfreeze")


async def _beyond(side: BlockingSide | AsyncSide, stage: str) -> None:
    while True:
        async with side.frozen_alone():  # it may let the engine stand still, and then go on
            if await side.call("continue_checkpoint") != stage:
                return
        await side.pause()


async def caught_up_with(side: BlockingSide | AsyncSide, sent: dict[str, int], ended: Iterable[str] = ()) -> None:
    """Return when this front end has processed all that the engine has sent of these requests, which take no step, and
    of those that have ended."""
    states = side.engine.output_processor.request_states

    def behind() -> list[str]:
        late = [i for i in sent if i in states and _lags(states[i], sent[i])]
        return late + [i for i in ended if i in states]

    await _received(behind, lambda _: side.receive())


async def caught_up(side: BlockingSide | AsyncSide, sent: dict[str, int]) -> None:
    """Returns when this front end has processed all that its engine, which stands still, has sent.

    sent: what freeze() said. A request that came meanwhile reaches the engine core behind the freeze: ask it again.
    """
    still = {"sent": sent}

    async def receive(behind: list[str]) -> None:
        await side.receive()
        if any(request_id not in still["sent"] for request_id in behind):
            still["sent"] = await side.call("sent")

    await _received(lambda: side.behind(still["sent"]), receive)


async def _received(still_behind: Callable[[], list[str]], receive: Callable[[list[str]], Awaitable[None]]) -> None:
    deadline = time.monotonic() + _DRAIN_SECONDS
    while behind := still_behind():
        if time.monotonic() > deadline:
            raise TimedOut(f"outputs of {len(behind)} requests did not arrive", "try again")
        await receive(behind)


async def _so_far(side: BlockingSide | AsyncSide) -> dict[str, dict]:
    """The tokens of all requests of an engine that is asleep, by their ids there. Of several engines some may be."""
    sent = await side.call("sent", {"of_asleep": True})
    await caught_up_with(side, sent)
    return front_end.so_far(side.engine.output_processor, sent)


async def _note_aborted(side: BlockingSide | AsyncSide, so_far: dict[str, dict]) -> None:
    """After a wake that did not come to its end: what has ended all the same is for the report of the next one."""
    kept = await side.call("sent")
    aborted = {request_id: answer for request_id, answer in so_far.items() if request_id not in kept}
    side.engine.torpor_aborted = [*getattr(side.engine, "torpor_aborted", ()), *aborted.values()]
    side.aborted(aborted)


async def wake_up(side: BlockingSide | AsyncSide, values: dict) -> WakeReport:
    if values.pop("portable", False):
        if "progress" in values:
            raise InvalidArgument('progress with identity="portable"', "leave progress out")
        return await wake_portable(side, values["from_checkpoint"])
    if directory := await _latest(side, values):
        try:
            return await _wake_up(side, values | {"from_checkpoint": directory, "hold": True})
        except WrongState as problem:  # a request has come since
            if problem.state_changed or await _latest(side, values):
                raise
    return await _wake_up(side, values)


async def wake_portable(side: BlockingSide | AsyncSide, directory: str) -> WakeReport:
    """Requests of a checkpoint come into this engine, whichever engine wrote it (sessions.py)."""
    call = {"call": uuid.uuid4().hex}
    try:
        report = WakeReport(await side.call("wake_portable", call | {"from_checkpoint": directory}))
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):  # the engine core does it all the same
        with contextlib.suppress(Error):
            await side.call("end_portable", call | {"keep": False})
        raise
    outputs = report["outputs"]
    lost: list[dict] = []
    try:
        await side.clear_caches()
        side.take(report, lost)
    except BaseException:
        try:
            side.forget(outputs)
        finally:  # else the engine core would wait for this for ever
            await side.call("end_portable", call | {"keep": False})
        raise
    await side.call("end_portable", call | {"keep": True, "lost": [each["id"] for each in lost]})
    report["requests"] -= len(lost)
    side.woken(report)
    return report


async def _latest(side: BlockingSide | AsyncSide, values: dict) -> str:
    """Return the directory of checkpoints if this call is to take the newest one (option `wake_latest`), else ""."""
    if values.keys() - {"on_restore_error", "progress"} or not Options.of(side.engine.vllm_config).wake_latest:
        return ""
    return await side.call("checkpoint_to_wake")


async def _wake_up(side: BlockingSide | AsyncSide, values: dict) -> WakeReport:
    so_far = await _so_far(side) if values.get("kv") == "abort" else {}
    if values.get("kv") in ("recompute", "abort"):  # the engine core will clear its own, whose shadow this is
        await side.clear_caches()
    try:
        report = WakeReport(await side.call("wake_up", values))
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        if values.get("hold"):  # the engine core goes on with it, and would hold what it restored for ever
            with contextlib.suppress(Error):  # nothing is held if it failed
                await side.call("end_hold", {"keep": False})
        raise
    except Error as problem:
        if so_far and problem.state_changed:
            with contextlib.suppress(Exception):
                await _note_aborted(side, so_far)
        raise
    if values.get("hold") and report.changed:
        outputs = report["outputs"]
        try:
            await side.clear_caches()  # of images: the engine core has cleared its own
            side.take(report)
        except BaseException:
            try:
                side.forget(outputs)
            finally:  # else the engine core would wait for this for ever
                await side.call("end_hold", {"keep": False})
            raise
        await side.call("end_hold", {"keep": True})
    side.woken(report)
    aborted: list[dict] = []
    if report.fully_awake:
        if report.changed and so_far:
            aborted += so_far.values()
            side.aborted()
        aborted = vars(side.engine).pop("torpor_aborted", []) + aborted
    elif so_far:
        await _note_aborted(side, so_far)
    if aborted or values.get("kv") == "abort":
        report["aborted"] = aborted
    if report and side.engine.logger_manager is not None:
        side.engine.logger_manager.record_sleep_state(0, 0)
    return report


def _behind(processor, sent: dict[str, int]) -> list[str]:
    """Requests of which the front end has processed less than the engine put out.

    One that the engine has no more has ended: its last output is on the way.
    """
    return [i for i, state in processor.request_states.items() if i not in sent or _lags(state, sent[i])]


def _lags(state: RequestState, sent: int) -> bool:
    return state.detokenizer is not None and state.detokenizer.num_output_tokens() < sent


# --- LLM and LLMEngine ------------------------------------------------------------------------------------------------


def call(engine: LLMEngine, method: str, options: dict | None = None):
    client = engine.engine_core
    if isinstance(client, InprocClient):
        return _unwrap(client.engine_core.torpor_call(method, options or {}))
    if data_parallel.has_several(client):
        raise Unsupported(
            "data parallel engines behind an LLMEngine: vLLM gives requests to the first of them only", "use AsyncLLM"
        )
    return _unwrap(client.call_utility("torpor_call", method, options or {}))


def finish(coroutine):
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a coroutine of BlockingSide waited")


def step(engine: LLMEngine, stock) -> list:
    """LLMEngine.step(): what arrived during a sleep comes first; while the engine is asleep there is nothing."""
    return restored.others(engine, _step(engine, stock))


def _step(engine: LLMEngine, stock) -> list:
    given = step_outputs.of(engine)
    if first := given.first:
        given.first = []
        return first
    client = engine.engine_core
    stands = given.asleep or given.weight_update is not None
    if stands and not isinstance(client, InprocClient) and client.outputs_queue.empty():
        return []  # the stock step would wait for an engine that takes none
    return stock()


def refuse_while_asleep(engine: LLMEngine) -> None:
    """Before LLM runs its engine until all requests have ended: asleep, or in an update of its weights, it would wait
    for ever."""
    if (why := step_outputs.of(engine).weight_update) is not None:
        raise WrongState(why, "end it, or load them in updating_weights() first")
    if not engine.is_sleeping():
        return
    missing = [tag for tag, state in call(engine, "state")["tags"].items() if state != "attached"]
    raise WrongState(f"the engine is asleep ({', '.join(missing) or 'paused'})", "call wake_up() first")


def has_unfinished_requests(engine: LLMEngine, stock) -> bool:
    """LLMEngine.has_unfinished_requests(): also while step() still has stashed outputs to return. Hibernated requests
    do not count: a loop over step() until all have ended would never end."""
    given = step_outputs.of(engine)
    if given.aside is not None:
        return restored.has_others(engine)
    if not given.hibernated:
        return bool(given.first) or stock()
    given.hibernated &= engine.output_processor.request_states.keys()
    return bool(given.first) or len(engine.output_processor.request_states) > len(given.hibernated)


# --- AsyncLLM ---------------------------------------------------------------------------------------------------------


async def call_async(engine: AsyncLLM, method: str, options: dict | None = None):
    if data_parallel.has_several(engine.engine_core):
        if options and ("swap_out_to" in options or "swap_in_from" in options):
            raise Unsupported("a swap of data parallel engines", "put one to sleep, then wake the other")
        if not hasattr(engine, "torpor_ranks"):
            engine.torpor_ranks = data_parallel.Ranks(engine.engine_core, engine.vllm_config)
        return await engine.torpor_ranks.call(method, options or {})
    return _unwrap(await engine.engine_core.call_utility_async("torpor_call", method, options or {}))


def end_calls(client) -> None:
    """Who waits for an answer of an engine core that has ended is told so: vLLM leaves them waiting for ever."""
    for waiting in list(getattr(client, "utility_results", {}).values()):
        if isinstance(waiting, asyncio.Future):
            with contextlib.suppress(RuntimeError):  # its loop has ended
                waiting.get_loop().call_soon_threadsafe(_end_call, waiting)
        else:
            _end_call(waiting)


def _end_call(waiting) -> None:
    if not waiting.done():
        with contextlib.suppress(InvalidStateError):  # it has just been answered
            waiting.set_exception(EngineDeadError())


async def attach(engine: AsyncLLM, request_id: str) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs, from the next token on, of a request that came by `wake_up(from_checkpoint=…)` or
    `resume(path)`, or of a child of a fork.

    `request_id` is the one that the request was made with, or that `Forked` names. As with `generate()`, the request is
    aborted if its reader goes away: the task that reads is cancelled, or the generator closed. Raises NotFound for
    other ids, and for one that has been attached to.
    """
    collector = getattr(engine, "torpor_collectors", {}).pop(request_id, None)
    if collector is None:
        raise NotFound(
            f"no request {request_id!r} waits here for a reader",
            "attach once, by the id that the request was made with",
        )
    finished = False
    try:
        while not finished:
            output = collector.get_nowait() or await collector.get()
            finished = output.finished
            yield output
    except (asyncio.CancelledError, GeneratorExit):  # its reader has gone
        states = [state for state in engine.output_processor.request_states.values() if state.queue is collector]
        # Of several answers to one prompt vLLM aborts the request that has them all.
        if unfinished := {(state.parent_req or state).request_id for state in states}:
            await engine.abort(unfinished, internal=True)
        raise
