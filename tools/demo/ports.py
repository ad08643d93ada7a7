# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that the demo, the benches and the tests start on this machine."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

# Below 32,768, where Linux begins to give ports to connections and to who binds port 0 (net.ipv4.ip_local_port_range):
# a port from there could be taken again before our server listens. The ports 10,000 above these are for SeaweedFS.
_FIRST, _END, _SECOND = 11_000, 22_000, 10_000


def free_ports(count: int) -> list[int]:
    """Return `count` ports of 127.0.0.1 that are free, each with the port 10,000 above it. No other process of this
    user gets one of them before 11,000 more were asked for. `OSError`: there are no more."""
    file = Path(tempfile.gettempdir()) / f"torpor-ports-{os.getuid()}"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "r+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        begun = int(counter.read() or 0)
        found: list[int] = []
        tried = 0
        while len(found) < count:
            if tried == _END - _FIRST:
                raise OSError(f"of the ports {_FIRST} to {_END - 1} fewer than {count} are free")
            port = _FIRST + (begun + tried) % (_END - _FIRST)
            tried += 1
            if _is_free(port) and _is_free(port + _SECOND):
                found.append(port)
        counter.seek(0)
        counter.truncate()
        counter.write(str(begun + tried))
    return found


def free_port() -> int:
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
