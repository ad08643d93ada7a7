# SPDX-License-Identifier: Apache-2.0
"""Looks at engines that run, and stops them: the calls of `torpor live` for Python.

    with torpor.console.connect() as engine:
        stop = engine.pause(lease=10)["stop"]
        print(engine.slots()["slots"])
        engine.resume(stop=stop)

What a connection has stopped goes on when it ends, unless `stay=True` was given. The methods and their parameters stand
in docs/console.md, and in `engine.hello()["methods"]`. Needs no vLLM.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from torpor import errors

__all__ = ["Engine", "Transfer", "connect"]

# What a server does, not its engine; the table of docs/console.md has them as such.
FRONT_METHODS = frozenset(("plan", "sleep", "wake", "checkpoint"))
_MAX_LINE = 1 << 26


def default_directory() -> Path:
    """Where engines of this user tell their events, unless they were told otherwise."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "torpor"
    return Path(f"/dev/shm/torpor-{os.geteuid()}")


def connect(path: str | os.PathLike | None = None, timeout: float | None = 30, front: bool = False) -> Engine:
    """To the engine whose socket `path` is, or to the newest one that answers in that directory of events.

    timeout: seconds for each call; None: no bound. front: to the newest server there; who has an engine of one need not
    ask for it, its calls find their way. Raises NotFound if no engine answers.
    """
    path = Path(path) if path is not None else default_directory()
    for engine in _answering(_sockets(path, front) if path.is_dir() else [path], timeout):
        return engine
    raise errors.NotFound(
        f"no {'server' if front else 'engine'} in {path} has a socket",
        'start one with the option console="read" or console="control"',
    )


def _sockets(directory: Path, front: bool) -> list[Path]:
    """Return those of servers, or those of engines, the newest first."""
    sockets = sorted(directory.glob("*.sock"), key=lambda each: each.stat().st_mtime, reverse=True)
    return [each for each in sockets if ("-front-" in each.name) == front]


def _answering(sockets: list[Path], timeout: float | None) -> Iterator[Engine]:
    for each in sockets:
        try:
            engine = Engine(each, timeout)
        except (ConnectionRefusedError, FileNotFoundError):
            continue  # of a process that was killed
        yield engine


def _is_or_descends_from(process: int, ancestor: int) -> bool:
    """Return whether `ancestor` is this process, or started it, or started a process that did, and so on."""
    while process not in (ancestor, 0):
        try:
            stat = Path(f"/proc/{process}/stat").read_bytes()
        except OSError:
            return False  # it has ended
        process = int(stat.rpartition(b")")[2].split()[1])
    return process == ancestor


class Transfer:
    """Blocks that are on their way, or were: a candidate of the events, of any way."""

    def __init__(self, engine: Engine, candidate: int):
        self.engine, self.candidate = engine, candidate

    def wait(self, timeout: float = 30) -> dict:
        """Wait until each of its blocks has ended. Return its `state`, `blocks`, and `ended_blocks` by outcome.

        timeout: most seconds, up to 300. Raises TimedOut, after which the transfer goes on; NotFound if the engine's
        events do not have it any more.
        """
        result = self.engine.call_within(timeout, "transfer.wait", candidate=self.candidate, timeout=timeout)
        if not result["done"]:
            raise errors.TimedOut(
                f"candidate {self.candidate} is {result['state']} after {timeout:g} s", "wait again, or cancel it"
            )
        return result

    def cancel(self) -> dict:
        """Cancel the transfer. Return the result of "transfer.cancel", in docs/console.md.

        Raises NotFound if the transfer has ended.
        """
        return self.engine.call("transfer.cancel", candidate=self.candidate)


class Engine:
    """One connection. Each method of the engine is a method here; its keywords are the parameters."""

    def __init__(self, path: Path, timeout: float | None = 30):
        self.path = path = Path(path)
        self._last = 0
        self._front: Engine | None = None  # its server, once that was asked
        # A socket's address is short: it is reached through the directory's descriptor.
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(timeout)
            self._socket.connect(f"/proc/self/fd/{directory}/{path.name}")
        except BaseException:
            self._socket.close()
            raise
        finally:
            os.close(directory)
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """What was stopped by this connection goes on, unless it was to stay."""
        if self._front is not None:
            self._front.close()
        self._lines.close()
        self._socket.close()

    def call(self, method: str, /, **params) -> dict:
        """The result of one of the engine's methods; raises the error of torpor.errors that it answers.

        method: one of hello()["methods"]. params: that method's, in docs/console.md.
        """
        if method in FRONT_METHODS and "-front-" not in self.path.name:
            self._front = self._front or self._server()
            if self._front is not None:  # else the engine says who does it
                return self._front.call(method, **params)
        self._last += 1
        self._socket.sendall(json.dumps({"id": self._last, "method": method, "params": params}).encode() + b"\n")
        while True:
            answer = self._line()
            if answer.get("id") != self._last:
                continue  # an event of a subscription
            if (error := answer.get("error")) is not None:
                raise errors.make(
                    error["code"],
                    error["what"],
                    error["next_step"],
                    error["origin"],
                    state_changed=error["state_changed"],
                )
            return answer["result"]

    def call_within(self, seconds: float, method: str, /, **params) -> dict:
        """Call `method` with `params`, as call() does. The answer may take `seconds` more than usual."""
        usual = self._socket.gettimeout()
        self._socket.settimeout(None if usual is None else usual + seconds)
        try:
            return self.call(method, **params)
        finally:
            self._socket.settimeout(usual)

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda **params: self.call(name, **params)

    def add_breakpoint(self, **params) -> int:
        """Its number."""
        return self.call("breakpoint.add", **params)["breakpoint"]

    def demote_blocks(self, **params) -> Transfer | None:
        """Have blocks in host memory copied on to disk. None: there are none that are not there already.

        keys, request: as "block.demote" has them, in docs/console.md.
        """
        candidate = self.call("block.demote", **params)["candidate"]
        return Transfer(self, candidate) if candidate else None

    def transfer(self, candidate: int) -> Transfer:
        """`candidate`: as events have it."""
        return Transfer(self, candidate)

    def remove_breakpoint(self, breakpoint: int) -> None:
        """`breakpoint`: its number, from add_breakpoint(). Raises NotFound for another."""
        self.call("breakpoint.remove", breakpoint=breakpoint)

    def start_recording(self, directory: str, **params) -> Path:
        """Where it is: `directory` is a name below the engine's option recordings_dir."""
        return Path(self.call("record.start", directory=directory, **params)["directory"])

    def stop_recording(self) -> dict:
        """Ends it, and says what it has: the result of "record.stop", in docs/console.md."""
        return self.call("record.stop")

    def events_from_now_on(self, **params) -> Iterator[dict]:
        """Events as they are told, until the connection ends. Other calls need a connection of their own meanwhile."""
        self.call("subscribe", **params)
        self._socket.settimeout(None)
        while True:
            yield self._line()["event"]

    @property
    def _pid(self) -> int:
        """Return the process that made the socket."""
        return struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

    def _server(self) -> Engine | None:
        """Connect to the server that started this engine. Other servers may use the same directory of events."""
        for server in _answering(_sockets(self.path.parent, True), None):
            if _is_or_descends_from(self._pid, server._pid):
                return server
            server.close()
        return None

    def _line(self) -> dict:
        line = self._lines.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            raise errors.Busy(f"{self.path} has ended the connection", "look whether its process is there")
        return json.loads(line)
