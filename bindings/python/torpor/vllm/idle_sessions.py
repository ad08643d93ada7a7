# SPDX-License-Identifier: Apache-2.0
"""Sessions that are demoted by themselves (kvcache/residency.h), in an engine that has nothing else to do.

The scheduler's side of the connector begins a demotion in a step. An engine core in a process of its own takes no step
while it waits for requests, so a thread wakes it. One in the process of its front end takes the step that its caller
takes next.
"""

from __future__ import annotations

import threading
import time
import weakref

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from torpor.vllm import connector_sleep

_LEAST_SECONDS, _MOST_SECONDS = 0.05, 1.0  # between looks whether a session is due


def watch(core) -> None:
    """Have this engine core take steps while sessions are due, if it has the option session_idle_seconds. Doing it
    again changes nothing."""
    if not isinstance(core, EngineCoreProc) or hasattr(core, "torpor_idle_sessions"):
        return
    side = connector_sleep.side_of(core.scheduler)
    if side is None or side.options.session_idle_seconds <= 0:
        return
    seconds = min(max(side.options.session_idle_seconds, _LEAST_SECONDS), _MOST_SECONDS)
    thread = threading.Thread(target=_look, args=(weakref.ref(core), seconds), name="torpor-idle", daemon=True)
    core.torpor_idle_sessions = thread
    thread.start()


def _look(known: weakref.ref, seconds: float) -> None:
    while (core := known()) is not None:
        side = connector_sleep.side_of(core.scheduler)
        due = side is not None and side.core is not None and side.core.sessions_are_due
        if due and core.input_queue.empty():  # what is in the queue wakes it, too
            core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))  # it asks has_work() again
        del core, side
        time.sleep(seconds)
