# SPDX-License-Identifier: Apache-2.0
"""Where the screens have it from: the inspector's JSON, of engines that run and of recordings alike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import threading
from pathlib import Path

from torpor import errors


def inspector() -> str:
    """Return the program `torpor`: $TORPOR_BINARY, the one that came with this package, or one on the path."""
    if named := os.environ.get("TORPOR_BINARY"):
        return named
    package = Path(__file__).parents[2]  # where `pip install --target` puts packages, bin/ is beside them
    for folder in (sysconfig.get_path("scripts"), str(package / "bin"), None):
        if found := shutil.which("torpor", path=folder):
            return found
    raise errors.NotFound("there is no program torpor", "install this package anew, or set TORPOR_BINARY")


def ask(*words: str) -> str:
    done = subprocess.run([inspector(), *words], capture_output=True, text=True)
    if done.returncode not in (0, 1, 6):
        raise errors.NotFound(done.stderr.strip().removeprefix("torpor: "), "start an engine with events_dir")
    return done.stdout


def lines_of(*words: str) -> list[str]:
    """Return what the inspector says, by lines: names in it may have characters at which str.splitlines() splits."""
    return [line for line in ask(*words).split("\n") if line]


def printable(text: str) -> str:
    """Return `text` with escapes in place of what a terminal would obey."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class Live:
    """Engines that run: the newest snapshot, as often as the inspector prints one."""

    def __init__(self, path: str):
        self.path = path
        self.snapshot: dict = {"processes": []}
        self.ended: str | None = None
        self._process = subprocess.Popen(
            [inspector(), "console", path, "--json", "--follow"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, name="torpor-console", daemon=True).start()

    def _read(self) -> None:
        output, errors = self._process.stdout, self._process.stderr
        assert output is not None and errors is not None  # pipes
        for line in output:
            if line.startswith('{"processes"'):  # else it is about to say why it ends
                self.snapshot = json.loads(line)
        self.ended = errors.read().strip() or "the inspector has ended"

    def at(self, moment: float | None) -> dict:
        """As it is now, or was so many seconds after the first event that is there."""
        return self.snapshot if moment is None else json.loads(ask("console", self.path, "--json", "--at", str(moment)))

    def events(self, *words: str) -> list[dict]:
        return [json.loads(line) for line in lines_of("events", self.path, "--json", *words)]

    def lint_moments(self) -> list[list[dict]]:
        """Of each process, when each lint began."""
        return [
            process["lint_moments"]
            for process in json.loads(ask("console", self.path, "--json", "--lint"))["processes"]
        ]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class Recording(Live):
    """What lies in files, or is left of processes that were killed."""

    def __init__(self, path: str):
        self.path = path
        self.ended = None
        self.snapshot = json.loads(ask("console", path, "--json"))

    def close(self) -> None:
        pass
