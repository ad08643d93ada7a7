# SPDX-License-Identifier: Apache-2.0
"""The records by which an owner and its standby know each other: their processes, addresses and heartbeats."""

from __future__ import annotations

import asyncio
import time

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Error

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_BEATS_PER_TERM = 10
_ANY_HOST = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
_HEARTBEATS = "giving heartbeats"


async def begin(server) -> None:
    """Record this server as the owner of its directory, and begin its heartbeats.

    Precondition: the server holds the lock of its response log. After a failure, which the log names, it serves on.
    """
    try:
        await _begin(server, "owner")
    except Error as problem:
        logger.error("torpor: no standby can take over from this server: %s", problem)


async def begin_standby(server) -> None:
    """Record this server as the standby of the owner of its directory, and begin its heartbeats."""
    try:
        await _begin(server, "standby")
    except Error as problem:
        logger.error("torpor: the owner cannot hand over to this server: %s", problem)


async def why_refused(server) -> str:
    """Return why the directory refuses the heartbeats of this standby, or has refused one within a term: then the
    owner had no time yet to give one again. Empty: it takes them."""
    try:
        if server.record is None:  # it was refused at the begin
            await _begin(server, "standby")
        server.record.beat()
    except Error as problem:
        server.beat_refused_at = time.monotonic()
        return f"a heartbeat cannot be written there: {problem}"
    term = server.settings.ownership_term_seconds
    if server.beat_refused_at is not None and time.monotonic() - server.beat_refused_at < term:
        return f"heartbeats can be written there again, but not for {term:g} s yet"
    return ""


def end(server) -> None:
    """Give no heartbeat from now on: the record is another server's, or nobody's."""
    server.record = None


async def _begin(server, role: str) -> None:
    term, address = server.settings.ownership_term_seconds, address_of(server.app_state.args)
    began = server.record is not None
    server.record = await asyncio.to_thread(_core.OwnerRecord, server.options.checkpoint_dir, term, address, role)
    if not began:
        server.tasks.keep(lambda: _beat(server), _HEARTBEATS)


async def _beat(server) -> None:
    """Give heartbeats in the event loop: a loop that hangs gives none. A server that only a restart can help gives none
    either: its standby is that restart."""
    while server.record is not None:
        if not (server.state == "failed" and server.restart_may_help()):
            try:
                server.record.beat()
            except Error:
                server.beat_refused_at = time.monotonic()
                raise
        await asyncio.sleep(server.settings.ownership_term_seconds / _BEATS_PER_TERM)


def address_of(args) -> str:
    """Return the URL at which this server is asked on its own host; empty: it has none."""
    if getattr(args, "uds", None):
        return ""
    host = _ANY_HOST.get(args.host or "", args.host)
    scheme = "https" if getattr(args, "ssl_keyfile", None) or getattr(args, "ssl_certfile", None) else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}"
