# SPDX-License-Identifier: Apache-2.0
"""A server that waits to take over from the one that owns its directory (--torpor-standby-of).

It has started and taken its first steps, and sleeps with its weights in host memory: a wake copies them to the device,
which is faster than any file is read. It follows the owner's record (engine/delivery/owner_processes.h). When the owner
has ended or is silent, it ends what is left of it, then asks for the lock of the response log like any server, wakes,
and goes on from the newest checkpoint and the log. An owner that lives hands over to it (switching.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid

from vllm.sampling_params import SamplingParams
from vllm.logger import init_logger

from torpor import _core, errors
from torpor.errors import (
    Aborted,
    Busy,
    Error,
    Incompatible,
    InvalidArgument,
    NotEnoughRoom,
    NotFound,
    Unsupported,
    WrongState,
)
from torpor.vllm.frontend import Report
from torpor.vllm.progress import Progress
from torpor.vllm.server import owning

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

STATES = ("standby", "taking over")
_LOOK_SECONDS = 1.0  # one call of the watch, which returns at once when the owner ends
_END_SECONDS = 60.0  # for the owner's processes to end after SIGKILL: a device driver may take its time
_ROOM_SECONDS = 60.0  # for the device to have the memory that the owner had
_ROOM_RETRY_SECONDS = 0.05
_AHEAD_SECONDS = 120.0  # for an owner to hand over once the memory is awake for it
# First steps of greedy and of seeded sampling: what vLLM compiles or makes when it is first used, it has then.
_FIRST_STEPS = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 1})


class Standby:
    """The standby's part of one life.Server, in its event loop."""

    def __init__(self, server, fingerprint: dict):
        directory, owners = server.options.checkpoint_dir, server.settings.standby_of
        if not directory or os.path.realpath(directory) != os.path.realpath(owners):
            raise InvalidArgument(
                f"standby of {owners}, with the directory {directory}",
                "give the owner's --torpor-checkpoint-dir as both",
            )
        parallel = server.engine.vllm_config.parallel_config
        if getattr(parallel, "nnodes", 1) > 1 or getattr(parallel, "distributed_executor_backend", None) == "ray":
            raise Unsupported(
                "a standby of a server whose workers it did not start, or which run on other machines",
                "start the server on one machine, with --distributed-executor-backend mp",
            )
        self._server, self._fingerprint = server, fingerprint
        self._watch = _core.OwnerWatch(server.options.checkpoint_dir)
        self._ahead = self._new_ahead()
        self._logged = self._logged_of_reading = ""
        self._reading: asyncio.Task | None = None
        self._due: dict | None = None  # the owner to take over from again, because another server was faster
        self.tried = False  # to take over
        self._advance = Advance()
        self._awake_until: float | None = None  # its memory is, ahead of a hand-over; None: it sleeps
        self.owner: dict = {"state": "none", "pid": 0, "why": "not looked yet"}
        self.read_ahead: dict = {"checkpoint": "", "bytes": 0, "ahead_bytes": 0, "read_bytes": 0}
        self.failover: dict | None = None  # from whom, why and how fast; None: it has not

    def _new_ahead(self) -> _core.ReadAhead:
        server = self._server
        return _core.ReadAhead(
            server.options.checkpoint_dir, server.options.key_file, server.settings.standby_read_ahead_bytes
        )

    def to_dict(self) -> dict:
        return {"owner": self.owner, "read_ahead": self.read_ahead, "failover": self.failover}

    async def begin(self) -> None:
        """Take first steps, then sleep."""
        server = self._server
        await asyncio.to_thread(self._watch.wait, 0)  # an owner that ends before this one sleeps has been seen
        for sampling in _FIRST_STEPS:
            parameters = SamplingParams(max_tokens=2, **sampling)
            async for _ in server.engine.generate({"prompt_token_ids": [1, 2, 3]}, parameters, uuid.uuid4().hex):
                pass
        await server.engine.reset_prefix_cache()
        report = await self._sleep()
        server.metrics.record("sleep", "host", report)
        logger.info(
            "torpor: standby of %s; %.1f MB of device memory released", server.options.checkpoint_dir,
            report.freed_bytes / 1e6,
        )  # fmt: skip
        await owning.begin_standby(server)

    async def _sleep(self) -> Report:
        if self._server.settings.standby_packed_weights == "keep":
            await self._server.engine.torpor.call("keep_derived")  # over one sleep
        return await self._server.engine.sleep(1, preserve_state=True)

    async def follow(self) -> None:
        """Return when this server has taken over, has failed to, or ends."""
        self._ahead = self._new_ahead()  # an error may have ended an earlier call, which stopped that one
        try:
            await self._follow()
        finally:
            self._ahead.stop()  # a process ends when its threads have

    async def _follow(self) -> None:
        while self._server.state in STATES:
            if self._server.state != "standby":  # the owner hands over
                await self._server.changed()
                continue
            self.owner = await asyncio.to_thread(self._watch.wait, _LOOK_SECONDS)
            if self._server.state != "standby":
                continue
            if self.owner["state"] == "ended" or (self.owner["state"] == "silent" and await self._hangs()):
                self._due = None
                await self._take_over(self.owner)
                continue
            await self._sleep_if_forgotten()
            if self.owner["state"] == "silent":
                await asyncio.sleep(_LOOK_SECONDS)
            elif self.owner["state"] == "serves":
                self._due = None
                self._log_change(f"follows process {self.owner['pid']}")
                if self._reading is None or self._reading.done():  # not waited for: an end is noticed meanwhile
                    self._reading = self._server.tasks.run(self._read_ahead(), "following the owner")
            elif self._due is not None:  # the faster server has not named itself: it may have released the lock
                await asyncio.sleep(_LOOK_SECONDS)
                if self._server.state == "standby":
                    await self._take_over(self._due)
            else:
                self._log_change(f"no owner to take over from: {self.owner['why']}")
                await asyncio.sleep(_LOOK_SECONDS / 10)

    async def _hangs(self) -> bool:
        """Return whether a silent owner hangs. Where the directory refuses heartbeats, an owner that is well has none,
        and a take-over would end it and then fail."""
        refused = await owning.why_refused(self._server)
        if refused:
            self._log_change(f"does not take over, though {self.owner['why']}: {refused}", logging.ERROR)
        return not refused

    def _log_change(self, what: str, level: int = logging.INFO) -> None:
        if what != self._logged:
            self._logged = what
            logger.log(level, "torpor: standby of %s: %s", self._server.options.checkpoint_dir, what)

    async def _read_ahead(self) -> None:
        try:
            self.read_ahead = await asyncio.to_thread(self._ahead.follow)
            self._logged_of_reading = ""
        except (NotFound, Aborted):
            pass  # no checkpoint yet, or one that was just retired; or the server takes over
        except Error as problem:
            if str(problem) != self._logged_of_reading:
                self._logged_of_reading = str(problem)
                logger.warning("torpor: the newest checkpoint is not read ahead: %s", problem)

    async def _take_over(self, owner: dict) -> None:
        server, again = self._server, self._due is not None
        if not again:
            logger.warning("torpor: taking over from process %s: %s", owner["pid"], owner["why"])
        self.tried = True
        self._ahead.stop()  # the take-over reads from the same disk
        server.enter("taking over")
        parts = Parts(advance=self._advance)
        async with server.operation:
            try:
                await asyncio.to_thread(self._watch.end_owner, _END_SECONDS)
                parts.end("owner_ended")
                if server.state == "ending":  # the next server goes on
                    return
                await self._own(parts)
            except Exception as problem:
                if isinstance(problem, Busy) and not server.holds_directory():  # another server was faster
                    if not again:
                        logger.warning("torpor: not taken over: %s", problem)
                        server.metrics.failovers.labels("lost").inc()
                    self._due, self.tried = owner, False
                    self._ahead = self._new_ahead()
                    return server.enter("standby")
                await self._failed(problem)
                return
        self._took_over(owner, parts)

    async def _own(self, parts: Parts) -> None:
        await self._server.own(self._fingerprint, parts, self._wake)

    async def _failed(self, problem: Exception) -> Error:
        """Fail with this problem. Return it as an error of torpor."""
        server = self._server
        server.metrics.failovers.labels("failed").inc()
        if not isinstance(problem, Error):
            server.tasks.failed("following the owner", problem)
            problem = Error(f"the take-over failed: {type(problem).__name__}: {problem}", "restart the server")
        await server.failed_to_go_on(problem)
        return problem

    # --- an owner that lives hands over ---

    async def take_over_from(self, step: str, asked: dict) -> dict:
        """Carry out a step of the hand-over of an owner that lives (switching.py).

        step: "prepare": say whether this server could go on, and wake its memory if there is room for both. "commit":
            own the directory, which the owner has released, and serve. "cancel": sleep again. "progress": say how much
            of a step in progress is done, at once.
        asked: `owner`: process of the owner; `fingerprint`: of its engine.

        Raises WrongState and Incompatible where it cannot; then nothing has changed. An error of "commit" with
        `state_changed` says that this server has failed, and that the owner is to end it.
        """
        if step == "progress":
            return {"done": self._advance.done}
        async with self._server.operation:
            if step == "cancel":
                return await self._cancel()
            owner = self._check_follows(asked.get("owner"))
            if step == "prepare":
                kv = self._kv_from(asked.get("fingerprint"))
                room = await self._wake_ahead()
                return {"process": os.getpid(), "room": room, "kv": kv}
            return await self._commit(owner)

    def _check_follows(self, owner) -> dict:
        state = self._server.state
        if state != "standby":
            raise WrongState(f"this server is {state}, and no standby", "see /torpor/state")
        if self.owner["state"] != "serves" or self.owner["pid"] != owner:
            follows = f"process {self.owner['pid']}" if self.owner["state"] == "serves" else "no owner"
            what = f"this standby follows {follows}, and process {owner} wants to hand over"
            raise WrongState(what, "give both servers the same directory, and try again in a second")
        return self.owner

    def _kv_from(self, fingerprint) -> str:
        """Return what becomes of the KV of an owner with this engine. Raises Incompatible if its requests end."""
        if not isinstance(fingerprint, dict):
            raise InvalidArgument("the owner names no fingerprint of its engine", "start both with one torpor")
        try:
            _core.check_same_engine(fingerprint, self._fingerprint)
        except Incompatible as problem:
            if self._server.settings.on_wake_error != "recompute":
                next_step = "start the standby with --torpor-on-wake-error recompute, which computes KV anew"
                raise Incompatible(f"this standby has another engine: {problem.what}", next_step) from None
            return "restored" if self._server.options.sessions and self._is_portable(fingerprint) else "recomputed"
        return "restored"

    def _is_portable(self, fingerprint: dict) -> bool:
        """Return whether KV of an engine with this fingerprint means the same here."""
        try:
            _core.check_portable(fingerprint, self._fingerprint)
        except Incompatible:
            return False
        return True

    async def _wake_ahead(self) -> bool:
        """Wake the memory while the owner has its own, if the device has room. Return whether it is awake."""
        try:
            await self._server.engine.wake_up(progress=self._advance.watch)
        except NotEnoughRoom:
            return False
        self._awake_until = time.monotonic() + _AHEAD_SECONDS
        return True

    async def _cancel(self) -> dict:
        if self._awake_until is not None and self._server.state == "standby":
            await self._sleep()
            self._awake_until = None
        return {}

    async def _sleep_if_forgotten(self) -> None:
        """Release the memory that an owner wanted awake and did not come for."""
        if not self._is_forgotten():
            return
        try:
            async with self._server.operation:
                if self._is_forgotten():  # no owner has come since
                    await self._cancel()
        except Exception as problem:  # the owner is followed whatever the engine does
            self._server.tasks.failed("following the owner", problem)
            self._awake_until = time.monotonic() + _LOOK_SECONDS  # for another try

    def _is_forgotten(self) -> bool:
        return self._awake_until is not None and time.monotonic() >= self._awake_until

    async def _commit(self, owner: dict) -> dict:
        server, parts = self._server, Parts(advance=self._advance)
        self.tried = True
        self._ahead.stop()  # the take-over reads from the same disk
        server.enter("taking over")
        try:
            await self._own(parts)
        except Exception as problem:
            if isinstance(problem, Busy) and not server.holds_directory():  # it was not released
                self.tried = False
                self._ahead = self._new_ahead()
                server.enter("standby")
                raise
            failed = await self._failed(problem)
            raise errors.make(failed.code, failed.what, failed.next_step, state_changed=True) from None
        if server.state != "awake":  # it ends, and the owner serves on
            raise WrongState(f"this server is {server.state}", "start another standby", state_changed=True)
        served_at = time.monotonic()
        self._took_over(owner | {"why": "it handed over"}, parts)
        return {"served_at": served_at, "parts": parts.ended} | ({"kv": parts.kv} if parts.kv else {})

    def _took_over(self, owner: dict, parts: Parts) -> None:
        server = self._server
        self.failover = {
            "process": owner["pid"], "why": owner["why"], "time": time.time(), "noticed_at": parts.began,
            "seconds": parts.seconds(), "parts": parts.ended, "phases": parts.phases,
        }  # fmt: skip
        server.metrics.failovers.labels("ok").inc()
        server.metrics.failover_seconds.observe(parts.seconds())
        logger.info(
            "torpor: taken over in %.3f s (%s)", parts.seconds(),
            ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.ended.items()),
        )  # fmt: skip

    async def _wake(self) -> Report | None:
        """Wake the engine. Return the report; None: it was awake ahead of a hand-over."""
        if self._awake_until is not None:  # ahead
            self._awake_until = None
            return None
        return await self._wake_now()

    async def _wake_now(self) -> Report:
        """Wake the engine, as soon as there is room: a driver may release the owner's memory a moment after its end."""
        deadline = time.monotonic() + _ROOM_SECONDS
        while True:
            try:
                report = await self._server.engine.wake_up(progress=self._advance.watch)
                break
            except NotEnoughRoom:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_ROOM_RETRY_SECONDS)
        self._server.metrics.record("wake", "host", report)
        return report


class Advance:
    """A number that grows as long as a standby gets on with what it was asked for."""

    def __init__(self) -> None:
        self.done = 0
        self._last: tuple[str, int] | None = None

    def watch(self, progress: Progress) -> None:
        """Take note of how far a wake of the engine is."""
        if (now := (progress.phase, progress.bytes_done)) != self._last:
            self._last = now
            self.done += 1


class Parts:
    """How long each part of a take-over took, in its order. `advance`: of the standby; None: nobody asks for it."""

    def __init__(self, began: float | None = None, advance: Advance | None = None) -> None:
        self.began = self._last = time.monotonic() if began is None else began
        self.advance = advance
        self.ended: dict[str, float] = {}
        self.kv = ""  # what became of the KV of running requests, once the server serves
        self.phases: dict[str, dict[str, float]] = {}  # seconds of the engine's phases, of the parts that have any

    def end(self, part: str, wake: Report | None = None) -> None:
        """End a part now. `wake`: the report of the wake that the part consisted of."""
        now = time.monotonic()
        self.ended[part], self._last = now - self._last, now
        if self.advance is not None:
            self.advance.done += 1
        if wake is not None:
            self.phases[part] = {phase["name"]: phase["seconds"] for phase in wake.phases}

    def seconds(self) -> float:
        return self._last - self.began
