# SPDX-License-Identifier: Apache-2.0
"""What a server that owns its directory does for a standby: it names its processes, and gives a heartbeat."""

from __future__ import annotations

import asyncio

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Error

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_BEATS_PER_TERM = 10


async def begin(server) -> None:
    """Precondition: the server holds the lock of its response log. A failure is logged, and the server serves on."""
    term = server.settings.ownership_term_seconds
    try:
        record = await asyncio.to_thread(_core.OwnerRecord, server.options.checkpoint_dir, term)
    except Error as problem:
        logger.error("torpor: no standby can take over from this server: %s", problem)
        return
    server.tasks.keep(lambda: _beat(server, record), "giving heartbeats")


async def _beat(server, record: _core.OwnerRecord) -> None:
    """In the event loop, so that a loop that hangs gives none. Nor does a server that only a restart can help: its
    standby is that restart."""
    while True:
        if not (server.state == "failed" and server.restart_may_help()):
            record.beat()
        await asyncio.sleep(server.settings.ownership_term_seconds / _BEATS_PER_TERM)
