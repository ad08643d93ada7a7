# SPDX-License-Identifier: Apache-2.0
"""Mooncake's client: one a process for the same master, until the process ends, since its end takes seconds where the
master is gone. remote/mooncake_store.h is what asks it."""

from __future__ import annotations

import socket
import threading

from torpor.errors import Busy, Unsupported

_REACHED_WITHIN = 1.0  # seconds: Mooncake's own way to find out that nobody is there takes minutes

_clients: dict[tuple, object] = {}
_lock = threading.Lock()


def store_class() -> type:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise Unsupported(
            f"Mooncake's client does not load: {error}",
            "pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda), and Debian's "
            "libibverbs1 and libnuma1",
        ) from error
    return MooncakeDistributedStore


def connect(
    host: str, port: int, local: str, metadata: str, segment: int, buffer: int, protocol: str, devices: str
) -> object:
    given = (host, port, local, metadata, segment, buffer, protocol, devices)
    try:
        with socket.create_connection((host, port), _REACHED_WITHIN) as reached:
            local = local or reached.getsockname()[0]
    except OSError as error:
        raise Busy(f"Mooncake's master {host}:{port} cannot be reached: {error}", "it is tried again") from error
    with _lock:
        if given in _clients:
            return _clients[given]
        client = store_class()()
        answer = client.setup(local, metadata, segment, buffer, protocol, devices, f"{host}:{port}")
        if answer != 0:
            raise Busy(f"Mooncake's client does not come up: {answer}", "see its own messages on stderr")
        _clients[given] = client
        return client
