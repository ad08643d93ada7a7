# SPDX-License-Identifier: Apache-2.0
"""An owner's part of a take-over by its standby: a record that names its processes, and heartbeats."""

from __future__ import annotations

import asyncio

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Error

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_BEATS_PER_TERM = 10


async def begin(server) -> None:
    """Record this server as the owner of its directory, and begin its heartbeats.

    Precondition: the server holds the lock of its response log. After a failure, which the log names, it serves on.
    """
    term = server.settings.ownership_term_seconds
    try:
        record = await asyncio.to_thread(_core.OwnerRecord, server.options.checkpoint_dir, term)
    except Error as problem:
        logger.error("torpor: no standby can take over from this server: %s", problem)
        return
    server.tasks.keep(lambda: _beat(server, record), "giving heartbeats")


async def _beat(server, record: _core.OwnerRecord) -> None:
    """Give heartbeats in the event loop: a loop that hangs gives none. A server that only a restart can help gives none
    either: its standby is that restart."""
    while True:
        if not (server.state == "failed" and server.restart_may_help()):
            record.beat()
        await asyncio.sleep(server.settings.ownership_term_seconds / _BEATS_PER_TERM)
