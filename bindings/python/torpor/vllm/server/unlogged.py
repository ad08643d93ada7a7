# SPDX-License-Identifier: Apache-2.0
"""A server without a response log (--torpor-response-log off): its directory, and its wake from a checkpoint.

Requests go on over sleeps and from checkpoints. Nobody can resume an answer. After a kill only a checkpoint is left.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from pathlib import Path

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Busy, Error, FileError, Incompatible, InvalidArgument
from torpor.vllm.frontend import Report
from torpor.vllm.server.recorder import Nobody
from torpor.vllm.server.start import has_checkpoint, warn_if_paused

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name


class Directory:
    """Holds the folder `answers` of a server's directory, as an open response log does: one server at a time."""

    def __init__(self, path: str, engine: dict, key_file: str | None):
        """Raises InvalidArgument where an earlier server left answers that still run: this one would lose them."""
        self._file = -1
        folder = Path(path)
        log = {"directory": path, "engine": engine, "key_file": key_file, "other_engine": "refuse"}
        if any(folder.glob("answers-*")):
            refuse_to_lose(_core.DeliveryLog.count_running(log), path)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            # The lock that the log takes (base/linux_file_system.cpp), over the whole file.
            request = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError) as problem:
            if self._file < 0:
                raise FileError(f"{folder}: {problem.strerror}", "see its owner and mode") from None
            self.close()
            raise Busy(f"another server uses {folder}", "end it, or give this one another directory") from None
        except OSError as problem:
            self.close()
            raise FileError(f"{folder}: {problem.strerror}", "see the directory", native=problem.errno or 0) from None

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close


def refuse_to_lose(running: int, path: str) -> None:
    """Raise InvalidArgument if the response log in `path` has answers that still run."""
    if running > 0:
        raise InvalidArgument(
            f"the response log in {path} has {running} answers that still run, and --torpor-response-log is off",
            "start the server with --torpor-response-log on until they have ended, or give it another directory",
        )


async def wake(server, named: str) -> Report | None:
    """Wake `named`: a checkpoint, or a directory of them; empty: the newest of the server's own.

    Return the report of the wake; None if there was nothing to wake, or it was discarded.
    """
    where = named or server.options.checkpoint_dir
    if not named and not await asyncio.to_thread(has_checkpoint, server):
        return None
    try:
        report = await server.engine.wake_up(from_checkpoint=where)
    except Error as problem:
        if isinstance(problem, Incompatible) and await asyncio.to_thread(_has_no_request, server, where):
            server.leave_checkpoint(where, problem)
        elif server.settings.on_wake_error == "discard":
            logger.error("torpor: serving without the checkpoint in %s: %s", where, problem)
        else:
            raise
        return None
    for state in server.engine.output_processor.request_states.values():
        state.queue = Nobody()  # their clients are gone with the server that they asked
    server.engine.torpor_collectors = {}
    await _count(server, report)
    logger.info(
        "torpor: woken from %s in %.2f s: %d requests go on, without clients (--torpor-response-log off)",
        report.checkpoint, report.seconds, report.requests,
    )  # fmt: skip
    warn_if_paused(report)
    return report


async def _count(server, report: Report) -> None:
    server.metrics.record("wake", "disk", report)
    server.metrics.started(report.requests, report.replayed, {})
    server.metrics.start_requests.labels("failed").inc(len(report.failed_requests))
    for failed in report.failed_requests:
        logger.error("torpor: request %s cannot go on: %s", failed["id"], failed["error"])
    await server.remember_woken(report)


def _has_no_request(server, where: str) -> bool:
    try:
        state = _core.read_checkpoint(where, server.options.key_file).to_dict()
    except Error:
        return False
    return not state["scheduler"]["requests"]
