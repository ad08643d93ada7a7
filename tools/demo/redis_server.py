# SPDX-License-Identifier: Apache-2.0
"""A Redis server on this machine, for the demo, the benchmark and the tests of what engines share."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ports import free_port
from suspend import suspend

STARTED_WITHIN = 300  # seconds; a tenth was seen
# Debian's redis-tools have the server's program under the name of one of its tools, and start no service.
PROGRAMS = ("redis-server", "redis-check-rdb")
PASSWORD = "of-this-machine-alone"


class RedisServer:
    """Started when it is made. It keeps nothing on disk, and forgets what it has no room for. With `tls`, `url` is that
    over TLS, with a certificate of its own, and it wants a password; `options` are then what a client needs. `inside`:
    words before its command, by which it is in another network; `host` is its address there."""

    def __init__(
        self, folder: Path, memory: str = "256mb", tls: bool = False, policy: str = "allkeys-lru",
        inside: Sequence[str] = (), host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self._inside, self._host = list(inside), host
        self.folder, self._settings = folder, ["--maxmemory", memory, "--maxmemory-policy", policy]
        self.port = free_port()
        self.url, self.options = f"redis://{host}:{self.port}", {}
        ports = ["--port", str(self.port)]
        if tls:
            from s3_server import make_certificate

            make_certificate(folder / "redis", host)
            secret = folder / "redis.password"
            secret.touch(mode=0o600)
            secret.write_text(PASSWORD + "\n")
            settings = folder / "redis.conf"  # not on the command line, where others could read it
            settings.touch(mode=0o600)
            settings.write_text(f"requirepass {PASSWORD}\n")
            ports = [str(settings), "--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no",
                     "--tls-cert-file", f"{folder}/redis.crt", "--tls-key-file", f"{folder}/redis.key"]  # fmt: skip
            self.url = self.url.replace("redis:", "rediss:")
            self.options = {"kv_store_credentials": str(secret), "kv_store_ca": f"{folder}/redis.crt"}
        self._settings = [*ports, *self._settings]
        self.start()

    def start(self) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise RuntimeError("there is no Redis: install redis-tools")
        with open(self.folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen(
                [*self._inside, "bash", "-c", 'exec -a redis-server "$0" "$@"', program, *self._settings,
                 "--bind", self._host, "--save", "", "--appendonly", "no"],
                stdout=log, stderr=log, cwd=self.folder,
            )  # fmt: skip
        end = time.monotonic() + STARTED_WITHIN
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"the Redis server did not start: {self.folder}/redis.log says why")
            time.sleep(0.02)

    def _listens(self) -> bool:
        connects = f"exec 3<>/dev/tcp/{self._host}/{self.port}"
        words = [*self._inside, "timeout", "5", "bash", "-c", connects]
        return subprocess.run(words, capture_output=True).returncode == 0

    def ask(self, *words: str) -> str:
        """The first line of its answer; without TLS and password only."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(
                b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(w), w.encode()) for w in words)])
            )
            return connection.makefile("rb").readline().decode().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        suspend(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_) -> None:
        self.kill()
