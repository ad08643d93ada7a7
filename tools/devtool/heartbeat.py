# SPDX-License-Identifier: Apache-2.0
"""A line for the reader whenever nothing was printed for a while: what is being done, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SILENCE_SECONDS = 4.0  # after which it says that it still works; a reader is to wait for 5 at most


class Heartbeat:
    """Calls `say(seconds)` when for SILENCE_SECONDS nothing was printed, from a thread of its own.

    `seconds`: since the present step began. Who prints something calls printed(), and begins() for a new step. `clock`
    and `wait` are those of the thread: time.monotonic, and an event's wait, which returns whether it was set.
    """

    def __init__(
        self,
        say: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ):
        self._say, self._clock = say, clock
        self._ended = threading.Event()
        self._wait = wait or self._ended.wait
        self._began = self._last = clock()
        self._thread: threading.Thread | None = None

    def begins(self) -> None:
        """A step begins, and that was printed."""
        self._began = self._last = self._clock()

    def printed(self) -> None:
        self._last = self._clock()

    def run(self) -> None:
        """Until `wait` says that it has ended: the thread's work."""
        while not self._wait(max(self._last + SILENCE_SECONDS - self._clock(), 0.0)):
            if self._clock() - self._last >= SILENCE_SECONDS:
                self._say(self._clock() - self._began)
                self._last = self._clock()

    def __enter__(self) -> Heartbeat:
        self.begins()
        self._ended.clear()
        self._thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
