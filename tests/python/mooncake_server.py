# SPDX-License-Identifier: Apache-2.0
"""A real Mooncake store on this machine: its master and a node with memory. The programs are those of the wheel:
pip install --no-deps --target DIR mooncake-transfer-engine-non-cuda, with Debian's libibverbs1 and libnuma1; DIR is
TORPOR_MOONCAKE in the environment. Where they are not, missing() says so."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from ports import free_ports

STARTED_WITHIN = 300  # seconds; two were seen
NODE_BYTES = 256 << 20


def site() -> Path:
    return Path(os.environ.get("TORPOR_MOONCAKE", "/none"))


def missing() -> str | None:
    if not (site() / "mooncake/mooncake_master").exists():
        return "TORPOR_MOONCAKE names no folder with Mooncake's wheel"
    done = subprocess.run([site() / "mooncake/mooncake_master", "--version"], capture_output=True, check=False)
    return None if done.returncode == 0 else f"Mooncake's master does not start: {done.stderr.decode()[-200:]}"


class MooncakeServer:
    def __init__(self, folder: Path, node_bytes: int = NODE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._running = folder, []
        self.port, metrics, self._node_port, service = free_ports(4)
        self.url = f"mooncake://127.0.0.1:{self.port}"
        self._master = self._began(
            "mooncake_master", "-rpc_address=127.0.0.1", f"-rpc_port={self.port}", "-metrics_host=127.0.0.1",
            f"-metrics_port={metrics}",
        )  # fmt: skip
        self._wait_for(self.port)
        self._began(
            "mooncake_client", f"-host=127.0.0.1:{self._node_port}", f"-port={service}",
            f"-master_server_address=127.0.0.1:{self.port}", "-metadata_server=P2PHANDSHAKE", "-protocol=tcp",
            f"-global_segment_size={node_bytes}",
        )  # fmt: skip
        self._wait_for(service)

    @property
    def pid(self) -> int:
        return self._master.pid

    def _began(self, program: str, *words: str) -> subprocess.Popen:
        with open(self._folder / f"{program}.log", "wb") as log:
            command = [str(site() / "mooncake" / program), *words]
            process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=subprocess.STDOUT)
        self._running.append(process)
        return process

    def _wait_for(self, port: int) -> None:
        end = time.monotonic() + STARTED_WITHIN
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                ended = [each.args[0] for each in self._running if each.poll() is not None]
                if ended or time.monotonic() > end:
                    self.close()
                    raise RuntimeError(f"Mooncake does not come up, see {self._folder}; ended: {ended}") from None
                time.sleep(0.05)

    def close(self) -> None:
        for process in reversed(self._running):
            process.kill()  # a stopped one, too
            process.wait()
        self._running.clear()

    def __enter__(self) -> MooncakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
