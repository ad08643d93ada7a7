# SPDX-License-Identifier: Apache-2.0
"""The thread that has an engine take steps while sessions are due to be demoted by themselves."""

import queue
import threading
import weakref
from types import SimpleNamespace

from vllm.v1.engine import EngineCoreRequestType
from zygote import MOST_SECONDS

from torpor.vllm import idle_sessions


class Due:
    """The connector's side in C++; a session is due at each look."""

    def __init__(self, looks: int):
        self.looks, self.seen = looks, threading.Event()

    @property
    def sessions_are_due(self) -> bool:
        self.looks -= 1
        if self.looks == 0:
            self.seen.set()
        return True


class Core:
    def __init__(self, due: Due):
        side = SimpleNamespace(core=due)
        self.scheduler = SimpleNamespace(connector=type("TorporConnector", (), {"scheduler": side})())
        self.input_queue: queue.Queue = queue.Queue()


def test_an_engine_in_a_long_step_is_woken_once_and_the_thread_ends_with_it():
    due = Due(looks=5)
    core = Core(due)
    thread = threading.Thread(target=idle_sessions._look, args=(weakref.ref(core), 0.001), daemon=True)
    thread.start()
    assert due.seen.wait(MOST_SECONDS)
    assert core.input_queue.qsize() == 1
    assert core.input_queue.get() == (EngineCoreRequestType.WAKEUP, None)
    del core
    thread.join(MOST_SECONDS)
    assert not thread.is_alive()
