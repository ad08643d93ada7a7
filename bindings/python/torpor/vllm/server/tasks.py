# SPDX-License-Identifier: Apache-2.0
"""What a server does beside its requests: tasks that nobody waits for, whose failures are seen and end nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from vllm.logger import init_logger

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

# What the tasks are called in the log and, with _ for blanks, in torpor_task_failures_total.
TASKS = (
    "taking signals", "syncing the log", "periodic checkpoints", "watching for idleness", "waking for a request",
    "looking for deferred blocks", "keeping ownership", "answering a console", "ending", "giving heartbeats",
    "following the owner", "listening for clients",
)  # fmt: skip
_RESTART_SECONDS = 1.0  # so that a loop that fails at once does not take the event loop for itself


class Tasks:
    """Of one life.Server, in its event loop. `count_failure` is called with the name of a task that failed."""

    def __init__(self, count_failure: Callable[[str], None]):
        self._count_failure = count_failure
        self.running: set[asyncio.Task] = set()

    def run(self, coroutine: Coroutine, name: str | None = None) -> asyncio.Task:
        """Without a name, somebody waits for the task and sees its exception."""
        return self._started(coroutine if name is None else self._seen(coroutine, name))

    def keep(self, loop: Callable[[], Awaitable[None]], name: str) -> asyncio.Task:
        """Runs loop() until it returns, again after each exception."""
        return self._started(self._kept(loop, name))

    def failed(self, name: str, problem: BaseException) -> None:
        """Count and log a failure that the task `name` has survived."""
        self._count_failure(name)
        logger.error("torpor: %s failed and goes on: %s: %s", name, type(problem).__name__, problem, exc_info=problem)

    def _started(self, coroutine: Coroutine) -> asyncio.Task:
        task = asyncio.create_task(coroutine)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    async def _seen(self, coroutine: Coroutine, name: str):
        try:
            return await coroutine
        except Exception as problem:
            self.failed(name, problem)

    async def _kept(self, loop: Callable[[], Awaitable[None]], name: str) -> None:
        while True:
            try:
                return await loop()
            except Exception as problem:
                self.failed(name, problem)
            await asyncio.sleep(_RESTART_SECONDS)
