# SPDX-License-Identifier: Apache-2.0
"""What a server does without being asked: checkpoints while it serves, sleep when it is idle, wake for a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.logger import init_logger

from torpor.errors import Error, InvalidArgument, NotEnoughRoom

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_LOOKS_PER_TERM = 10
_MOST_SECONDS_BETWEEN_LOOKS = 1.0
_RETRY_SECONDS = 1.0  # of a wake without room: another server on the device may fall asleep any moment
_RETRY_AFTER_ERROR_SECONDS = 5.0


def pause_between(interval: float, took: float) -> float:
    """Return the seconds from the end of a checkpoint that took so many seconds to the begin of the next one."""
    return max(interval - took, min(interval, took))


class Automatic:
    """For one life.Server, in its event loop.

    Idle: no request runs, arrives or waits. After `sleep_after_seconds` of that the engine sleeps to host memory, after
    `sleep_to_disk_after_seconds` more to disk. A sleep that somebody asked for stays as it is.
    """

    def __init__(self, server):
        self._server = server
        self._settings = server.settings
        self.checkpointing = False  # the operation in progress is a checkpoint of its own
        self._used = time.monotonic()  # when a request was last seen
        self._slept: float | None = None  # when it fell asleep to host memory by itself
        self._wanted = 0  # requests that wait for a wake
        self._waking: asyncio.Task | None = None

    def check(self) -> None:
        """InvalidArgument: settings that do not go together."""
        if self._settings.sleep_to_disk_after_seconds > 0 and self._settings.sleep_after_seconds == 0:
            raise InvalidArgument(
                "sleep_to_disk_after_seconds without sleep_after_seconds", "say after how many seconds to sleep"
            )
        if self._settings.sleep_to_disk_after_seconds > 0 and not self._server.options.checkpoint_dir:
            raise InvalidArgument(
                "sleep_to_disk_after_seconds without a directory", "name one with --torpor-checkpoint-dir"
            )
        if self._settings.sleep_after_seconds > 0 and not self._settings.wake_on_request:
            logger.warning("torpor: idle, it falls asleep, and no request wakes it: --torpor-wake-on-request is off")

    def used(self) -> None:
        self._used = time.monotonic()

    def entered(self, state: str) -> None:
        self._slept = None  # _look() sets it again after a sleep of its own
        if state == "awake":
            self.used()
        elif state == "asleep":
            self._wake_if_wanted()

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Around a request's waiting: the engine is woken for it, where the operator wants that."""
        self._wanted += 1
        try:
            self._wake_if_wanted()
            yield
        finally:
            self._wanted -= 1

    def _said(self, task: str, what: str, problem: Exception) -> None:
        """Log a failure after which `task` goes on as usual. Other errors than torpor's own are counted, too."""
        if isinstance(problem, Error):
            logger.error("torpor: %s: %s", what, problem)
        else:
            self._server.tasks.failed(task, problem)

    # --- wake ---

    def _wake_if_wanted(self) -> None:
        due = self._wanted > 0 and self._settings.wake_on_request and self._server.state == "asleep"
        if due and (self._waking is None or self._waking.done()):
            self._waking = self._server.tasks.keep(self._wake, "waking for a request")

    async def _wake(self) -> None:
        said = ""
        while self._wanted > 0 and self._server.state == "asleep":
            try:
                report = await self._server.wake_up()
                self._server.metrics.automatic.labels("wake").inc()
                logger.info("torpor: woken in %.2f s for %d requests that waited", report.seconds, self._wanted)
                return
            except Exception as problem:
                if self._server.state != "asleep":  # the operator wakes it, or it is lost
                    return
                if str(problem) != said:
                    said = str(problem)
                    self._said(
                        "waking for a request", "a request could not wake the engine, it is tried again", problem
                    )
                no_room = isinstance(problem, NotEnoughRoom)
                await asyncio.sleep(_RETRY_SECONDS if no_room else _RETRY_AFTER_ERROR_SECONDS)

    # --- sleep ---

    async def watch(self) -> None:
        terms = [
            term
            for term in (self._settings.sleep_after_seconds, self._settings.sleep_to_disk_after_seconds)
            if term > 0
        ]
        pause = min(_MOST_SECONDS_BETWEEN_LOOKS, min(terms) / _LOOKS_PER_TERM)
        while True:
            await asyncio.sleep(pause)
            try:
                await self._look()
            except Exception as problem:
                self._said("watching for idleness", "idle, it could not fall asleep", problem)
                self.used()  # a term from now on, it is tried again

    async def _look(self) -> None:
        """Nothing is awaited between the look and the sleep's first change of state, so no request slips in between."""
        server, now = self._server, time.monotonic()
        to_disk_after = self._settings.sleep_to_disk_after_seconds
        if server.busy():
            self.used()
        elif server.state == "awake" and now - self._used >= self._settings.sleep_after_seconds:
            report = await server.sleep()
            self._slept = time.monotonic()
            server.metrics.automatic.labels("sleep").inc()
            logger.info("torpor: idle, asleep in host memory; %.1f MB given back", report.freed_bytes / 1e6)
        elif self._slept is not None and server.state == "asleep" and 0 < to_disk_after <= now - self._slept:
            try:
                report = await server.sleep_deeper()
            except BaseException:
                self._slept = now  # a term later it is tried again
                raise
            self._slept = None
            server.metrics.automatic.labels("sleep_to_disk").inc()
            logger.info("torpor: idle, asleep on disk: %s", report.checkpoint)

    # --- checkpoints ---

    async def checkpoints(self) -> None:
        """Begin one every so many seconds, unless nothing has changed since the last.

        After a kill the engine computes again what is younger than the last checkpoint, so the time that a checkpoint
        takes does not add to the interval. But the pause after a checkpoint is at least as long as that took, or as the
        interval where that is shorter.
        """
        server, known, logged = self._server, None, False
        interval, took = self._settings.checkpoint_interval_seconds, 0.0
        while True:
            await asyncio.sleep(pause_between(interval, took))
            took = 0.0
            now = server.progress()
            if server.state != "awake" or now == known:
                server.metrics.checkpoint_not_due_time.set(time.time())
                continue
            if server.operating() or server.waits_for_deferred():
                continue
            if away := server.sessions.away():
                if not logged:
                    logger.warning("torpor: no checkpoint is written while %d requests are hibernated", len(away))
                logged = True
                continue
            logged = False
            self.checkpointing = True
            began = time.monotonic()
            try:
                report = await server.checkpoint()
            except Exception as problem:
                self._said("periodic checkpoints", "no checkpoint was written", problem)
                continue
            finally:
                self.checkpointing = False
                took = time.monotonic() - began
            known = now
            logger.info(
                "torpor: checkpoint of %d requests, %.1f MB; the engine stood still for %.3f s",
                report.requests,
                report.checkpoint_bytes / 1e6,
                report.seconds,
            )
