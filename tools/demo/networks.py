# SPDX-License-Identifier: Apache-2.0
"""Two networks of this machine's kernel with a wire between them, which can be slowed and cut: for tests of what
happens between an engine and a store."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NEAR, FAR = "10.111.0.1", "10.111.0.2"
WIRE = "wire"
MADE_WITHIN = 300  # seconds
_NEWNET, _NEWUSER = 0x40000000, 0x10000000


def inside(holder: int) -> list[str]:
    """Words before a command that is to run in the network of this process."""
    user = [] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]
    return ["nsenter", "-t", str(holder), *user, "-n", "--"]


def enter(holder: int) -> None:
    """This process, which has one thread, and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = [("net", _NEWNET)] if os.geteuid() == 0 else [("user", _NEWUSER), ("net", _NEWNET)]
    files = [(os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY), kind) for name, kind in kinds]
    for file, kind in files:
        if libc.setns(file, kind) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


class Wire:
    """Between the networks of the processes `near` and `far`. It slows and cuts both ways."""

    def __init__(self, near: int, far: int) -> None:
        self.near, self.far = near, far

    def _both(self, *words: str) -> None:
        for holder in (self.near, self.far):
            subprocess.run([*inside(holder), *words], check=True, capture_output=True)

    def slow(self, rate: str) -> None:
        """`rate` as tc knows it: 256kbit."""
        self._both("tc", "qdisc", "replace", "dev", WIRE, "root", "tbf", "rate", rate, "burst", "3000", "limit", "1m")

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        subprocess.run([*inside(self.far), "ip", "link", "set", WIRE, "down"], check=True, capture_output=True)

    def mend(self) -> None:
        subprocess.run([*inside(self.far), "ip", "link", "set", WIRE, "up"], check=True, capture_output=True)
        for holder in (self.near, self.far):  # which fails where it was not slowed
            subprocess.run([*inside(holder), "tc", "qdisc", "del", "dev", WIRE, "root"], capture_output=True)


def _held(before: list[str]) -> subprocess.Popen:
    """A process with a network of its own."""
    user = [] if before or os.geteuid() == 0 else ["-r"]
    process = subprocess.Popen(
        [*before, "unshare", *user, "-n", "sleep", "infinity"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + MADE_WITHIN
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == "sleep":
                return process
        time.sleep(0.01)
    process.kill()
    process.wait()
    raise OSError("the kernel gives no network of its own")


@contextlib.contextmanager
def two_networks() -> Iterator[Wire | None]:
    """None where the kernel does not allow it, or the programs for it are not there."""
    with contextlib.ExitStack() as stack:

        def held(before: list[str]) -> int:
            process = _held(before)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process.pid

        try:
            near = held([])
            far = held(inside(near))
            words = [("link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", str(far))]
            for holder, address in ((near, NEAR), (far, FAR)):
                words += [
                    ("link", "set", "lo", "up"), ("addr", "add", f"{address}/24", "dev", WIRE),
                    ("link", "set", WIRE, "up"),
                ]  # fmt: skip
                for each in words:
                    subprocess.run([*inside(holder), "ip", *each], check=True, capture_output=True)
                words = []
            wire = Wire(near, far)
            wire.slow("1gbit")  # whether tc can
            wire.mend()
        except (OSError, subprocess.CalledProcessError):
            wire = None
        yield wire
