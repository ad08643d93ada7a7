# SPDX-License-Identifier: Apache-2.0
"""Suspend processes, as a debugger or a full host does."""

import os
import signal
import time
from pathlib import Path

_PATIENCE_SECONDS = 300


def suspend(pid: int, *, group: bool = False) -> None:
    """Send SIGSTOP to a process, or to its group, and return when each of its threads stands still.

    The signal alone is no proof: on a busy machine a thread answers for some time after it was sent. A process that has
    ended stands still. `TimeoutError`: a thread runs on.
    """
    (os.killpg if group else os.kill)(pid, signal.SIGSTOP)
    members = _members(pid) if group else [pid]
    end = time.monotonic() + _PATIENCE_SECONDS
    while any(_runs(member) for member in members):
        if time.monotonic() > end:
            raise TimeoutError(f"process {pid} runs on after SIGSTOP")
        time.sleep(0.001)


def _members(group: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _fields(entry / "stat")[2:3] == [str(group)]:
            members.append(int(entry.name))
    return members


def _runs(pid: int) -> bool:
    states = [_fields(task / "stat")[:1] for task in _tasks(pid)]
    return any(state and state[0] not in "TtZX" for state in states)


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return []


def _fields(stat: Path) -> list[str]:
    """The fields behind the name, which may have any character: state, parent, group, …"""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
