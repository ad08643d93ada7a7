# SPDX-License-Identifier: Apache-2.0
"""POST /swap: this server falls asleep while another one of this host wakes on the memory that this one gives.

Each has its engine do its half (../exchange.py). This one makes the channel and asks the other one to come by its own
POST /wake_up. Nothing has changed here before it has come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from vllm.v1.engine.exceptions import EngineDeadError

from torpor import _core, errors
from torpor.errors import Aborted, Error, NotEnoughRoom, TimedOut, WrongState
from torpor.vllm import exchange
from torpor.vllm.frontend import Report
from torpor.vllm.progress import Watcher
from torpor.vllm.server import loopback
from torpor.vllm.server.front import summary
from torpor.vllm.server.other_server import Other

_COMES_SECONDS = 30.0  # the other one, before this one stands still for it
_MEMORY_SECONDS = 30.0  # what a process had is free some time after its end
_LOOK_SECONDS = 0.005
_RETRY_SECONDS = 0.5


async def swap(server, to: str, peer_timeout: float, headers: Mapping[str, str], progress: Watcher | None) -> dict:
    """`headers` of the call: the other server is asked with the same key. It goes on to its end without its caller."""
    other = Other(await loopback.checked(to), headers, server.app_state.args)
    return await asyncio.shield(server.tasks.run(_swap(server, other, peer_timeout, progress)))


async def _swap(server, other: Other, peer_timeout: float, progress: Watcher | None) -> dict:
    began = time.monotonic()
    async with server.only_one():
        if server.state != "awake":
            raise WrongState(f"this server is {server.state}", "wake it, or ask the one that serves")
        with exchange.channel(peer_timeout) as (channel, path):
            comes = asyncio.ensure_future(exchange.publish_failure(channel, "in", other.wake_up(path)))
            slept: dict = {}
            failed: Error | None = None
            try:
                await exchange.publish_failure(channel, "out", _come(channel, comes, other))
                slept = await exchange.publish_failure(channel, "out", _give(server, path, progress))
            except Error as problem:
                failed = problem
            woken, lost = await _last_word(comes, other, peer_timeout if channel.has_joined("in") else 0)
            if failed is not None:
                raise failed if lost is None or channel.stopped_by() == "out" else lost
    if lost is not None:
        await _asleep_alone(server, other, lost)
    seconds = round(time.monotonic() - began, 6)
    return {"status": "sleeping", "to": other.url, "seconds": seconds, "slept": summary(slept), "woken": woken}


async def _come(channel: _core.SwapChannel, comes: asyncio.Future, other: Other) -> None:
    deadline = time.monotonic() + _COMES_SECONDS
    while not channel.has_joined("in"):
        if comes.done():
            raise Aborted(f"{other} does not come", "see its error")
        if time.monotonic() > deadline:
            raise TimedOut(f"{other} has not come in {_COMES_SECONDS:g} s", "see what it does, and try again")
        await asyncio.sleep(_LOOK_SECONDS)


async def _give(server, path: str, progress: Watcher | None) -> Report:
    if server.state != "awake":
        raise WrongState(f"this server is {server.state}")
    try:
        return await server.fall_asleep(1, "abort", True, "host", {"swap_out_to": path, "progress": progress})
    except Error as problem:
        raise _of("this server", problem) from None
    except EngineDeadError:
        raise Aborted("this server: its engine core has ended", "start it again", state_changed=True) from None


async def _last_word(comes: asyncio.Future, other: Other, seconds: float) -> tuple[dict | None, Error | None]:
    """Report of the other one, or its error. This half is over."""
    await asyncio.wait({comes}, timeout=seconds)
    if not comes.done():
        comes.cancel()
        return None, Aborted(f"{other} does not answer", "see what it does")
    problem = comes.exception()
    return (None, problem) if isinstance(problem, Error) else (comes.result(), None)


async def _asleep_alone(server, other: Other, lost: Error) -> None:
    """Both halves came to their end, but nobody knows of the other server. If it has ended, this one serves again."""
    if await other.is_there():
        raise Aborted(f"{lost.what}; this server is asleep", "see whether the other one serves", state_changed=True)
    deadline = time.monotonic() + _MEMORY_SECONDS
    while True:
        try:
            await server.wake_up()
            break
        except NotEnoughRoom as problem:
            if time.monotonic() > deadline:
                what = f"{lost.what}; this server stays asleep: {problem.what}"
                raise NotEnoughRoom(what, problem.next_step, state_changed=True) from None
        await asyncio.sleep(_RETRY_SECONDS)
    raise Aborted(f"{lost.what}; this server serves on", lost.next_step)


def _of(who: str, problem: Error) -> Error:
    what = f"{who}: {problem.what}"
    return errors.make(problem.code, what, problem.next_step, problem.origin, problem.native, problem.state_changed)
