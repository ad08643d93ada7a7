# SPDX-License-Identifier: Apache-2.0
"""POST /torpor/switch: the owner of a directory hands its requests over to its standby, and ends.

The standby says first whether it could go on; until then nothing changes here. Then the engine stops with a checkpoint,
and the response log and its lock are released. The standby owns the directory, wakes, and says that it serves. If it
does not, this server owns the directory again, and its engine goes on from where it stopped: it still has everything.
The lock of the response log decides which of the two may go on, whatever was heard of the other one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from torpor import _core, errors
from torpor.errors import Aborted, Busy, Error, InvalidArgument, NotEnoughRoom, Unsupported, WrongState
from torpor.vllm import frontend
from torpor.vllm.server import ending, listening, loopback, owning
from torpor.vllm.server.other_server import Other
from torpor.vllm.server.standby import Parts

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_STALL_SECONDS = 120.0  # a standby that makes no progress for so long hangs
_PROGRESS_SECONDS = 1.0  # between two looks at its progress
_LOCK_SECONDS = 60.0  # for a server that is neither of the two to release the lock
_BACK_SECONDS = 60.0  # for hibernated requests to come back: new requests wait meanwhile
_END_SECONDS = 60.0  # for the processes of a standby to end after SIGKILL
_MEMORY_SECONDS = 60.0  # what a process had is free some time after its end
_LOOK_SECONDS = 0.05
# States of a standby that has taken over, whatever its operator did with it since.
_SERVES = ("awake", "falling asleep", "asleep", "waking", "handing over")


async def switch(server, to: str | None, headers: Mapping[str, str]) -> dict:
    """Hand over to the standby. It goes on to its end without its caller.

    to: URL of the standby; None: as it has recorded itself. headers: of the call; the standby is asked with its key.
    """
    return await asyncio.shield(server.tasks.run(Switch(server).run(to, headers)))


class Switch:
    """One hand-over of a life.Server, in its event loop."""

    def __init__(self, server):
        self._server = server
        self._watch: _core.OwnerWatch  # of the standby, from _standby() on
        self._slept = False

    async def run(self, to: str | None, headers: Mapping[str, str]) -> dict:
        server, began = self._server, time.monotonic()
        async with server.only_one():
            await self._check()
            other, process = await self._standby(to, headers)
            asked = {"owner": os.getpid(), "fingerprint": await server.engine.torpor.call("fingerprint")}
            try:
                ready = await _answer_of(other, "prepare", asked, _Restoring(other))
                if ready.get("process") != process:
                    what = f"{other} is process {ready.get('process')}, the recorded standby {process}"
                    raise InvalidArgument(what, "give the URL of the standby of this server")
            except Error as problem:
                raise self._serves_on(problem) from None
            logger.info("torpor: handing over to the standby at %s (process %s)", other.url, process)
            report, parts = await self._stop(other, asked, bool(ready["room"]))
            restoring = _Restoring(other)
            try:
                taken = await _answer_of(other, "commit", asked, restoring)
            except Error as problem:
                taken = await self._whether_taken(other, problem, restoring)
            served_at = taken.get("served_at", time.monotonic())
            server.handed_over = True
            server.enter("ending")
        server.tasks.run(ending.after_switch(server), "ending")
        result = {
            "status": "handed over", "to": other.url, "process": process, "requests": report.requests,
            "kv": taken.get("kv", ready["kv"]), "seconds": round(time.monotonic() - began, 6),
            "pause_seconds": round(served_at - parts.began, 6), "parts": parts.ended | taken.get("parts", {}),
        }  # fmt: skip
        logger.info("torpor: handed over: %s", result)
        return result

    async def _check(self) -> None:
        server = self._server
        if server.state != "awake":
            raise WrongState(f"the server is {server.state}", "wake it first: POST /wake_up")
        if await server.engine.is_paused():
            raise WrongState("the engine is paused", "resume it first (POST /resume)")
        if not server.has_log or not server.options.checkpoint_dir:
            raise Unsupported(
                "a switch without a response log and a directory",
                "start both servers with --torpor-checkpoint-dir and --torpor-response-log on, or use SIGTERM",
            )
        if server.remote is not None:
            raise Unsupported("a switch with --torpor-object-store", "use SIGTERM, and start the next server")

    async def _standby(self, to: str | None, headers: Mapping[str, str]) -> tuple[Other, int]:
        self._watch = await asyncio.to_thread(_core.OwnerWatch, self._server.options.checkpoint_dir, "standby")
        look = await asyncio.to_thread(self._watch.wait, 0)
        if look["state"] != "serves" or look["pid"] == os.getpid():
            why = look["why"] or "the last standby is this server"
            raise WrongState(
                f"there is no standby: {why}", "start one with --torpor-standby-of, and wait until it follows"
            )
        if not (address := to or look["address"]):
            raise InvalidArgument("the standby has recorded no address", "give its URL as `to`")
        return Other(await loopback.checked(address), headers, self._server.app_state.args), look["pid"]

    async def _stop(self, other: Other, asked: dict, room: bool) -> tuple[frontend.Report, Parts]:
        """Stop with a checkpoint, and release the log. Return the report of the checkpoint, and the parts of the pause.

        room: the standby has its memory, so this engine keeps its own until it ends. After an error this server serves
            on.
        """
        server = self._server
        server.enter("handing over")
        try:
            if server.listener is not None:  # who connects from now on waits there for the server that goes on
                listening.stop(server)
            while server.adding:
                await asyncio.sleep(0.001)
            await server.sessions.bring_back(_BACK_SECONDS)  # no checkpoint has a request that is hibernated
            await server.sync_log()
            began = time.monotonic()
            report = await frontend.checkpoint(frontend.AsyncSide(server.engine), {}, stay=True)
            server.metrics.record("checkpoint", "disk", report)
            server.metrics.checkpoint_seconds.observe(time.monotonic() - began)
            server.remember(report, time.time())
            parts = Parts(report["stopped_since"])
            parts.end("checkpoint")
            if not room:
                await server.engine.sleep(1, preserve_state=True)
                self._slept = True
                parts.end("slept")
            await asyncio.to_thread(server.recorder.answers.hand_over)
            owning.end(server)
            parts.end("log_released")
            return report, parts
        except BaseException as problem:
            await self._go_on()
            with suppress(Error):
                await _answer_of(other, "cancel", asked, _Restoring(other))
            if isinstance(problem, Error):
                raise self._serves_on(problem) from None
            raise

    async def _whether_taken(self, other: Other, problem: Error, restoring: _Restoring) -> dict:
        """Return what is known of a standby that serves. If it does not, serve on, and raise `problem`."""
        server = self._server
        failed = problem.state_changed  # it owns the directory until it ends
        ended = False  # by this server
        foreign_since: float | None = None  # the lock is neither this server's nor the standby's
        while True:
            if not ended and (failed or await restoring.stalls()):
                await self._end_standby(problem)
                ended = True
            try:
                await asyncio.to_thread(server.recorder.answers.take_back)
                break
            except Busy:
                state = "ended" if ended else await other.state()
                if state in _SERVES:
                    return {}
                failed = state in ("failed", "ending")
                if state not in ("standby", "ended"):  # it has the lock
                    foreign_since = None
                elif foreign_since is None:
                    foreign_since = time.monotonic()
                elif time.monotonic() - foreign_since > _LOCK_SECONDS:
                    raise await self._failed(problem, await self._who_owns()) from None
            except Error as behind:  # the standby went on, or this server cannot write
                server.handed_over = True
                server.fail(WrongState(behind.what, "restart the server"), unrecoverable=True)
                raise
            await asyncio.sleep(_LOOK_SECONDS)
        await owning.begin(server)
        await self._go_on()
        raise self._serves_on(problem) from None

    async def _end_standby(self, problem: Error) -> None:
        logger.error("torpor: the standby could not go on, and is ended: %s", problem)
        try:
            await asyncio.to_thread(self._watch.end_owner, _END_SECONDS)
        except Error as lives:  # the lock says whether it still owns the directory
            logger.error("torpor: %s", lives)

    async def _who_owns(self) -> str:
        """Return which process owns the directory, as far as it is known."""
        with suppress(Error):
            watch = await asyncio.to_thread(_core.OwnerWatch, self._server.options.checkpoint_dir)
            look = await asyncio.to_thread(watch.wait, 0)
            if look["state"] == "serves":
                return f"process {look['pid']}{' at ' + look['address'] if look['address'] else ''}"
        return "a process that has not named itself"

    async def _failed(self, problem: Error, owner: str) -> Error:
        """Fail, because a server that is neither this one nor the standby owns the directory."""
        what = f"{owner} owns the directory {self._server.options.checkpoint_dir}, and holds the lock of its answers"
        self._server.handed_over = True
        self._server.fail(WrongState(what, "end that process, or let it go on, and restart this server"), True)
        return errors.make(problem.code, f"{problem.what}; {what}; this server is failed", "see its /torpor/ready")

    async def _go_on(self) -> None:
        """Have the engine take steps again, which still has all requests."""
        server = self._server
        deadline = time.monotonic() + _MEMORY_SECONDS
        while self._slept:
            try:
                await server.engine.wake_up()
                self._slept = False
            except NotEnoughRoom as problem:
                if time.monotonic() > deadline:
                    logger.error("torpor: this server is asleep, POST /wake_up wakes it: %s", problem)
                    server.enter("asleep")
                    return self._listen_again()
                await asyncio.sleep(_LOOK_SECONDS)
            except (Error, EngineDeadError) as problem:  # a new process goes on from the checkpoint and the log
                what = f"the engine does not wake after a switch that failed: {problem}"
                return server.fail(WrongState(what, "restart the server"), unrecoverable=True)
        with suppress(Error, EngineDeadError):  # /health says so
            await frontend.go_on(frontend.AsyncSide(server.engine))
        server.enter("awake")
        self._listen_again()

    def _listen_again(self) -> None:
        server = self._server
        if server.settings.listen_fd > 0 and server.listener is None:
            server.tasks.keep(lambda: listening.when_awake(server), "listening for clients")

    def _serves_on(self, problem: Error) -> Error:
        state = self._server.state
        what = f"{problem.what}; this server {'serves on' if state == 'awake' else f'is {state}'}"
        return errors.make(problem.code, what, problem.next_step, problem.origin, problem.native)


class _Restoring:
    """Watches whether a standby makes progress. The progress decides, not the time: a large model takes long."""

    def __init__(self, other: Other):
        self._other = other
        self._done: int | None = None
        self._since = self._looked = time.monotonic()

    async def stalls(self) -> bool:
        """Return whether it has made no progress, or given no answer, for _STALL_SECONDS."""
        if time.monotonic() - self._looked >= _PROGRESS_SECONDS:
            done = await self._other.progress()
            self._looked = time.monotonic()
            if done is not None and done != self._done:
                self._done, self._since = done, self._looked
        return self._looked - self._since > _STALL_SECONDS


async def _answer_of(other: Other, step: str, asked: dict, restoring: _Restoring) -> dict:
    """Return the answer of a standby to a step of a take-over, as long as it gets on with it. Raise its error, or
    Aborted."""
    asking = asyncio.ensure_future(other.take_over(step, asked))
    try:
        while not (await asyncio.wait({asking}, timeout=_PROGRESS_SECONDS))[0]:
            if await restoring.stalls() and not asking.done():
                what = f"{other} has made no progress with the step {step} of the switch for {_STALL_SECONDS:g} s"
                raise Aborted(what, "see its log")
        return asking.result()
    finally:
        asking.cancel()
