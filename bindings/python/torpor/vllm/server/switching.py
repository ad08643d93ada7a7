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
from torpor.errors import Busy, Error, InvalidArgument, NotEnoughRoom, Unsupported, WrongState
from torpor.vllm import frontend
from torpor.vllm.server import ending, listening, loopback, owning
from torpor.vllm.server.other_server import Other
from torpor.vllm.server.standby import Parts

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_COMES_SECONDS = 60.0  # for a standby to own the directory or to fail, once its answer has got lost
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
                ready = await other.take_over("prepare", asked)
                if ready.get("process") != process:
                    what = f"{other} is process {ready.get('process')}, the recorded standby {process}"
                    raise InvalidArgument(what, "give the URL of the standby of this server")
            except Error as problem:
                raise self._serves_on(problem) from None
            logger.info("torpor: handing over to the standby at %s (process %s)", other.url, process)
            report, parts = await self._stop(other, asked, bool(ready["room"]))
            try:
                taken = await other.take_over("commit", asked)
            except Error as problem:
                taken = await self._whether_taken(other, problem)
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
            raise WrongState(f"the server is {server.state}", "wake it first (POST /wake_up)")
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
        return Other(await loopback.checked(address), headers), look["pid"]

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
            await server.sessions.bring_back()  # no checkpoint has a request that is hibernated
            await server.sync_log()
            report = await frontend.checkpoint(frontend.AsyncSide(server.engine), {}, stay=True)
            server.metrics.record("checkpoint", "disk", report)
            server.remember(report, time.time())
            parts = Parts(report["stands_since"])
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
                await other.take_over("cancel", asked)
            if isinstance(problem, Error):
                raise self._serves_on(problem) from None
            raise

    async def _whether_taken(self, other: Other, problem: Error) -> dict:
        """Return what is known of a standby that serves. If it does not, serve on, and raise `problem`."""
        server = self._server
        deadline = time.monotonic() + _COMES_SECONDS
        ended = problem.state_changed  # it has failed, and owns the directory until it ends
        while True:
            if ended or time.monotonic() > deadline:
                logger.error("torpor: the standby could not go on, and is ended: %s", problem)
                ended, deadline = False, time.monotonic() + _COMES_SECONDS  # until the lock is free, or another try
                try:
                    await asyncio.to_thread(self._watch.end_owner, _END_SECONDS)
                except Error as lives:  # the lock says whether it still owns the directory
                    logger.error("torpor: %s", lives)
            try:
                await asyncio.to_thread(server.recorder.answers.take_back)
                break
            except Busy:  # the standby has it
                state = await other.state()
                if state in _SERVES:
                    return {}
                ended = state in ("failed", "ending")
            except Error as behind:  # the standby went on, or this server cannot write
                server.fail(WrongState(behind.what, "restart the server"), unrecoverable=True)
                raise
            await asyncio.sleep(_LOOK_SECONDS)
        await owning.begin(server)
        await self._go_on()
        raise self._serves_on(problem) from None

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
                    return server.enter("asleep")
                await asyncio.sleep(_LOOK_SECONDS)
            except (Error, EngineDeadError) as problem:  # a new process goes on from the checkpoint and the log
                what = f"the engine does not wake after a switch that failed: {problem}"
                return server.fail(WrongState(what, "restart the server"), unrecoverable=True)
        with suppress(Error, EngineDeadError):  # /health says so
            await frontend.go_on(frontend.AsyncSide(server.engine))
        server.enter("awake")
        if server.settings.listen_fd > 0 and server.listener is None:
            server.tasks.keep(lambda: listening.when_awake(server), "listening for clients")

    def _serves_on(self, problem: Error) -> Error:
        state = self._server.state
        what = f"{problem.what}; this server {'serves on' if state == 'awake' else f'is {state}'}"
        return errors.make(problem.code, what, problem.next_step, problem.origin, problem.native)
