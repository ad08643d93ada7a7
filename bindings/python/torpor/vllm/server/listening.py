# SPDX-License-Identifier: Apache-2.0
"""A socket that listens already (--torpor-listen-fd), and a pipe for the server's states (--torpor-state-fd), from the
process that started the server.

Two servers that share the socket never both accept: a standby begins when it serves, which is after the owner's end. A
client that connects while neither accepts waits in the socket's queue. The next server answers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from os import dup, fstat, write

from torpor.errors import InvalidArgument

_LOOK_SECONDS = 0.02


def publish(fd: int, state: str) -> None:
    """Write a state of the server into the pipe; 0: there is none. A reader that has ended is no error."""
    if fd > 0:
        with contextlib.suppress(OSError):
            write(fd, f"{state}\n".encode())


def check_pipe(fd: int) -> None:
    """InvalidArgument: the file descriptor is not of a pipe: a state would be written into whatever it is."""
    try:
        is_pipe = stat.S_ISFIFO(fstat(fd).st_mode)
    except OSError as problem:
        raise InvalidArgument(f"state_fd is {fd}: {problem.strerror}", "give a pipe") from None
    if not is_pipe:
        raise InvalidArgument(f"state_fd is {fd}, which is no pipe", "give a pipe")


def socket_of(fd: int) -> socket.socket:
    """InvalidArgument: the file descriptor is not of a socket that listens."""
    try:
        if not stat.S_ISSOCK(fstat(fd).st_mode):
            raise InvalidArgument(f"listen_fd is {fd}, which is no socket", "give a socket that listens")
        found = socket.socket(fileno=fd)
    except OSError as problem:
        raise InvalidArgument(f"listen_fd is {fd}: {problem.strerror}", "give a socket that listens") from None
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.detach()
        raise InvalidArgument(f"listen_fd is {fd}, a socket that does not listen", "call listen() first")
    return found


def _may_accept(server) -> bool:
    """A standby that failed before it took over leaves clients to the server that it was to follow."""
    if server.state == "failed" and server.settings.standby_of:
        return server.standby is not None and server.standby.tried
    return server.state not in ("starting", "standby", "taking over", "handing over")


async def http_server(server):
    """Return vLLM's HTTP server, of uvicorn, once it has started."""
    while not getattr(getattr(server.app_state, "server", None), "started", False):
        await asyncio.sleep(_LOOK_SECONDS)
    return server.app_state.server


def stop(server) -> None:
    """Accept no clients on the socket from now on: who connects waits for a server that accepts."""
    listener, server.listener = server.listener, None
    listener.close()
    with contextlib.suppress(ValueError):
        server.app_state.server.servers.remove(listener)


async def when_awake(server) -> None:
    """Accept clients on the socket from the moment on when the server serves, or has failed to."""
    while not _may_accept(server):
        await server.changed()
    if server.state == "ending":
        return
    http = await http_server(server)

    def connection(_loop=None):
        return http.config.http_protocol_class(
            config=http.config, server_state=http.server_state, app_state=http.lifespan.state, _loop=_loop
        )

    loop = asyncio.get_running_loop()
    listening = socket_of(dup(server.settings.listen_fd))  # if this fails the socket is there for another try
    server.listener = await loop.create_server(
        connection, sock=listening, ssl=http.config.ssl, backlog=http.config.backlog
    )
    http.servers.append(server.listener)  # closed with the others
    if server.state == "ending":  # since a moment ago
        server.listener.close()
