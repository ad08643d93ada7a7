"""`torpor.swap(a, b)`: one engine falls asleep while another wakes on its memory, each in a process of its own.

Each engine core does its half (engine/sleep_controller_swap.cpp); they meet in a page of memory that both map
(base/room_file.h). Here the two calls are made at once, and one that fails is told to the other."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from torpor import _core
from torpor.errors import Aborted, InvalidArgument, Unsupported
from torpor.vllm import data_parallel, frontend, tracing
from torpor.vllm.front_end_methods import sleep_options, wake_options
from torpor.vllm.frontend import Report
from torpor.vllm.progress import DIRECTORY, Watcher, watched


def swap(a, b, *, timeout: float | None = None, progress: Watcher | None = None):
    """`a`, which serves, falls asleep to host memory with all its requests, and `b`, which is asleep at level 1, wakes
    at the same time, on the memory that `a` gives page by page. `b` runs only when `a` is asleep.

    a, b: two LLM or LLMEngine; or two AsyncLLM, then the call is to be awaited. Rank by rank on the same devices.
    timeout: most seconds to wait for the running step of `a`; None: no bound.
    progress: as in sleep(); bytes are those of both, the phase is that of whichever began one last. If it returns False
        or raises while `a` is not asleep yet, both are as before, and it raises Aborted.

    Returns a Report: `slept` and `woken` are those of the two, `seconds` of both together. After an error `a` serves on
    and `b` is asleep as before, unless the error says otherwise (`state_changed`); where the engine core of one of them
    ends meanwhile, so is the other one. Raises the error of the one that failed first.
    """
    engines = [getattr(each, "llm_engine", each) for each in (a, b)]
    awaited = [isinstance(each, AsyncLLM) for each in engines]
    if engines[0] is engines[1] or awaited[0] != awaited[1]:
        raise InvalidArgument("swap: these are not two engines of one kind", "name two LLM, or two AsyncLLM")
    if any(data_parallel.has_several(each.engine_core) for each in engines):
        raise Unsupported("swap: data parallel engines", "put one to sleep, then wake the other")
    return (_swap_awaited if awaited[0] else _swap)(*engines, timeout, progress)


@contextmanager
def room() -> Iterator[tuple[_core.RoomFile, str]]:
    with tempfile.TemporaryDirectory(prefix="torpor-", dir=DIRECTORY if os.path.isdir(DIRECTORY) else None) as folder:
        path = os.path.join(folder, "room")
        yield _core.RoomFile(path), path


async def told(room: _core.RoomFile, side: str, half: Awaitable):
    """The result of one half. If it fails, the other one learns of it."""
    try:
        return await half
    except BaseException:
        room.stop(side)
        raise


def _halves(side, engines, timeout: float | None, values: dict, room: _core.RoomFile, path: str) -> list:
    gives = sleep_options(1, "abort", True, "host", "abort", None, timeout, "store", path) | values
    takes = wake_options(None, None, "abort", None, False, False, path) | values
    slept = tracing.traced(engines[0], "sleep", frontend.sleep(side(engines[0]), "abort", gives))
    woken = tracing.traced(engines[1], "wake_up", frontend.wake_up(side(engines[1]), takes))
    return [told(room, "gives", slept), told(room, "takes", woken)]


def _swap(a, b, timeout: float | None, progress: Watcher | None) -> Report:
    began = time.monotonic()
    with room() as (meeting, path), watched(progress, {}) as values, ThreadPoolExecutor(1, "torpor-swap") as other:
        slept, woken = _halves(frontend.BlockingSide, (a, b), timeout, values, meeting, path)
        taken = other.submit(frontend.finish, woken)
        errors = [None, None]
        try:
            given = frontend.finish(slept)
        except BaseException as error:
            errors[0] = error
        errors[1] = taken.exception()
        _raise_first(meeting, errors)
        return _report(given, taken.result(), began)


async def _swap_awaited(a: AsyncLLM, b: AsyncLLM, timeout: float | None, progress: Watcher | None) -> Report:
    began = time.monotonic()
    with room() as (meeting, path), watched(progress, {}) as values:
        halves = _halves(frontend.AsyncSide, (a, b), timeout, values, meeting, path)
        both = asyncio.gather(*map(asyncio.ensure_future, halves), return_exceptions=True)
        try:
            results = await asyncio.shield(both)
        except asyncio.CancelledError:
            meeting.stop("gives")  # undone, where it is not too late for that
            await both
            raise
        _raise_first(meeting, [each if isinstance(each, BaseException) else None for each in results])
        return _report(*results, began)


def _raise_first(room: _core.RoomFile, errors: list) -> None:
    """The error of the side that failed first: that of the other one says only that it did."""
    named = [_named(error, which) for error, which in zip(errors, ("goes", "comes"))]
    for error in named[::-1] if room.stopped_by() == "takes" else named:
        if error is not None:
            raise error


def _named(error: BaseException | None, which: str) -> BaseException | None:
    if not isinstance(error, EngineDeadError):
        return error
    return Aborted(f"swap: the engine core of the one that {which} has ended", "start it again", state_changed=True)


def _report(slept: Report, woken: Report, began: float) -> Report:
    return Report(slept=slept, woken=woken, fully_awake=bool(woken), seconds=time.monotonic() - began)
