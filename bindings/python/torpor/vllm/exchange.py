# SPDX-License-Identifier: Apache-2.0
"""`torpor.swap(a, b)`: one engine falls asleep while another wakes on its memory, each in a process of its own.

Each engine core does its half (engine/swap_out.h); they meet in a page of memory that both map
(base/swap_channel.h). Here the two calls are made at once, and one that fails is told to the other."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from torpor import _core
from torpor.errors import Aborted, InvalidArgument, TimedOut, Unsupported
from torpor.vllm import data_parallel, frontend, tracing
from torpor.vllm.front_end_methods import sleep_options, wake_options
from torpor.vllm.frontend import Report
from torpor.vllm.progress import Watcher, watched

PEER_SECONDS = 60.0
_WHICH = ("goes", "comes")
_left: set[asyncio.Future] = set()  # halves of engines that do not answer


def swap(a, b, *, timeout: float | None = None, peer_timeout: float = PEER_SECONDS, progress: Watcher | None = None):
    """`a`, which serves, falls asleep to host memory with all its requests, and `b`, which sleeps and kept all, wakes
    at the same time, on the memory that `a` gives page by page. `b` runs only when `a` is asleep.

    a, b: two LLM or LLMEngine; or two AsyncLLM, then the call is to be awaited. Rank by rank on the same devices.
    timeout: most seconds to wait for the running step of `a`; None: no bound.
    peer_timeout: seconds after which an engine stops the swap, if it has no heartbeat of the other one, which is
        stopped or hangs. `b` waits for the step of `a`, too.
    progress: as in sleep(); bytes are those of both, the phase is that of whichever began one last. If it returns False
        or raises while `a` is not asleep yet, both are as before, and it raises Aborted.

    Returns a Report: `slept` and `woken` are those of the two, `seconds` of both together. After an error `a` serves on
    and `b` is asleep as before, unless the error says otherwise (`state_changed`); where the engine core of one of them
    ends meanwhile, so is the other one. Raises the error of the one that failed first, and TimedOut where one of them
    does not answer: it undoes its half once it goes on.
    """
    engines = [getattr(each, "llm_engine", each) for each in (a, b)]
    awaited = [isinstance(each, AsyncLLM) for each in engines]
    if engines[0] is engines[1] or awaited[0] != awaited[1]:
        raise InvalidArgument("swap: these are not two engines of one kind", "name two LLM, or two AsyncLLM")
    if any(data_parallel.has_several(each.engine_core) for each in engines):
        raise Unsupported("swap: data parallel engines", "put one to sleep, then wake the other")
    start: Callable = _swap_awaited if awaited[0] else _swap
    return start(*engines, timeout, peer_timeout, progress)


@contextmanager
def channel(peer_timeout: float = PEER_SECONDS) -> Iterator[tuple[_core.SwapChannel, str]]:
    folder = _core.SharedFolder()
    try:
        path = os.path.join(folder.path, "channel")
        yield _core.SwapChannel(path, peer_timeout), path
    finally:
        folder.remove()


async def publish_failure(channel: _core.SwapChannel, side: str, half: Awaitable):
    """Return the result of one half. If it fails, the other half learns of it by the channel."""
    try:
        return await half
    except BaseException:
        channel.stop(side)
        raise


def _halves(side, engines, timeout: float | None, values: dict, channel: _core.SwapChannel, path: str) -> list:
    going = sleep_options(1, "abort", True, "host", "abort", None, timeout, "store", path) | values
    coming = wake_options(None, None, "abort", None, False, False, path) | values
    slept = tracing.traced(engines[0], "sleep", frontend.sleep(side(engines[0]), "abort", going))
    woken = tracing.traced(engines[1], "wake_up", frontend.wake_up(side(engines[1]), coming))
    return [publish_failure(channel, "out", slept), publish_failure(channel, "in", woken)]


def _swap(a, b, timeout: float | None, peer_timeout: float, progress: Watcher | None) -> Report:
    began = time.monotonic()
    with channel(peer_timeout) as (meeting, path), watched(progress, {}) as values:
        halves = [_begun(half) for half in _halves(frontend.BlockingSide, (a, b), timeout, values, meeting, path)]
        try:
            futures.wait(halves, return_when=futures.FIRST_COMPLETED)
        except BaseException:
            meeting.stop("out")  # undone, where it is not too late for that
            futures.wait(halves, peer_timeout)
            raise
        futures.wait(halves, peer_timeout)
        return _ended(meeting, halves, began)


def _begun(half: Awaitable) -> Future:
    """A coroutine that never waits, in a thread of its own. One that does not come to its end is left alone."""
    result: Future = Future()

    def run() -> None:
        try:
            result.set_result(frontend.finish(half))
        except BaseException as error:
            result.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="torpor-swap", daemon=True).start()
    return result


async def _swap_awaited(
    a: AsyncLLM, b: AsyncLLM, timeout: float | None, peer_timeout: float, progress: Watcher | None
) -> Report:
    began = time.monotonic()
    with channel(peer_timeout) as (meeting, path), watched(progress, {}) as values:
        both = _halves(frontend.AsyncSide, (a, b), timeout, values, meeting, path)
        halves = [asyncio.ensure_future(half) for half in both]
        for half in halves:
            _left.add(half)
            half.add_done_callback(_forget)
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(halves, timeout=peer_timeout)
        except asyncio.CancelledError:
            meeting.stop("out")
            await asyncio.wait(halves, timeout=peer_timeout)
            raise
        return _ended(meeting, halves, began)


def _forget(half: asyncio.Future) -> None:
    _left.discard(half)
    if not half.cancelled():
        half.exception()  # it is not asked for where nobody waits any more


def _ended(channel: _core.SwapChannel, halves: Sequence[Future | asyncio.Future], began: float) -> Report:
    """One of them has ended, and the other one had its time to."""
    errors = [
        _named(half.exception(), which) if half.done() else _does_not_answer(which)
        for half, which in zip(halves, _WHICH, strict=True)
    ]
    _raise_first(channel, errors)
    slept, woken = (half.result() for half in halves)
    return Report(slept=slept, woken=woken, fully_awake=bool(woken), seconds=time.monotonic() - began)


def _does_not_answer(which: str) -> TimedOut:
    what = f"swap: the engine core of the one that {which} does not answer"
    return TimedOut(what, "see what it does: once it goes on it ends its half", state_changed=True)


def _raise_first(channel: _core.SwapChannel, errors: Sequence[BaseException | None]) -> None:
    """The error of the side that failed first: that of the other one says only that it did."""
    for error in errors[::-1] if channel.stopped_by() == "in" else errors:
        if error is not None:
            raise error


def _named(error: BaseException | None, which: str) -> BaseException | None:
    if not isinstance(error, EngineDeadError):
        return error
    return Aborted(f"swap: the engine core of the one that {which} has ended", "start it again", state_changed=True)
