# SPDX-License-Identifier: Apache-2.0
"""How far a sleep, wake or checkpoint is, told to a function of the caller while the engine works in other processes.

They add up what they copy in a page of memory that this process reads (base/progress_file.h)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torpor import _core
from torpor.errors import InvalidArgument

logger = logging.getLogger("torpor")

_SECONDS = 0.1  # between two looks


@dataclass(frozen=True)
class Progress:
    """A moment of a sleep, wake or checkpoint.

    phase: "quiesce", "capture", "commit", "save", "verify", "detach", "open", "restore", "reconnect"; ""
        before the first.
    bytes_done, bytes_total: of copies, all ranks together. The total grows when a rank begins its own.
    seconds: since the first copy was begun.
    seconds_left: of the copies, at their rate so far; 0 when there is none yet.
    """

    phase: str
    bytes_done: int
    bytes_total: int
    seconds: float
    seconds_left: float


Watcher = Callable[[Progress], bool | None]


@contextmanager
def watched(watcher: Watcher | None, values: dict) -> Iterator[dict]:
    """Calls `watcher` before the block, and from a thread of its own until it ends: about ten times a second, and once
    at the end.

    Gives `values` with what the engine needs for that. Once the watcher returns False or raises, the operation is
    cancelled: it is undone and raises Aborted, unless it is past the point where that would change anything. Raises
    InvalidArgument for what is no function.
    """
    if watcher is None:
        yield values
        return
    if not callable(watcher):
        raise InvalidArgument(f"progress is {watcher!r}", "give a function that takes a Progress")
    folder = _core.SharedFolder()
    path = os.path.join(folder.path, "progress")
    page = _core.ProgressFile(path)
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(watcher, page, ended), name="torpor-progress", daemon=True)
    if _goes_on(watcher, page):
        thread.start()
    try:
        yield values | {"progress": path}
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
        folder.remove()


def _watch(watcher: Watcher, page: _core.ProgressFile, ended: threading.Event) -> None:
    last = False
    while not last:
        last = ended.wait(_SECONDS)
        if not _goes_on(watcher, page):
            return


def _goes_on(watcher: Watcher, page: _core.ProgressFile) -> bool:
    """Tells the watcher, and cancels if it says so or fails."""
    try:
        goes_on = watcher(Progress(**page.read())) is not False
    except Exception:
        logger.exception("the function that watches an operation failed: the operation is cancelled")
        goes_on = False
    if not goes_on:
        page.cancel()
    return goes_on
