# SPDX-License-Identifier: Apache-2.0
"""How long each step takes: what it took here the last time, or else what it took where it was measured."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Seconds by the name of a step's log file, on two cores of a virtual machine that did nothing else. Together they are
# the seven minutes that README.md has for a first run, with system packages and the demo. Nothing is said of a step
# that is not here.
TYPICAL = {
    "apt-update": 10, "apt-install": 60, "venv": 8, "torch": 30, "vllm-download": 4, "vllm-requirements": 80,
    "vllm": 10, "python-tools": 15, "bytecode": 30, "model-download": 5, "model": 20, "torpor-build": 120,
    "torpor-install": 3, "demo": 40,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """What is to be done, for a reader. `parts`: names of the commands; none: it is done already."""

    text: str
    parts: tuple[str, ...] = ()


class Durations:
    """Seconds by name, in one file, which is of no use to anybody if it is damaged: then all is forgotten."""

    def __init__(self, path: Path):
        self._path = path

    def known(self) -> dict[str, float]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        numbers = found.items() if isinstance(found, dict) else ()
        return {name: took for name, took in numbers if isinstance(took, int | float) and 0 <= took < math.inf}

    def remember(self, name: str, seconds: float) -> None:
        """Note what a step took. Another process may do so, too: the file is whole at each moment."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
            json.dump(self.known() | {name: round(seconds, 1)}, file)
        os.replace(file.name, self._path)

    def expected(self, names: Iterable[str]) -> float | None:
        """Return the seconds of steps together; None where one of them is not known."""
        seconds = TYPICAL | self.known()
        found = [seconds.get(name) for name in names]
        return None if None in found else sum(number for number in found if number is not None)

    def plan(self, steps: list[Step]) -> list[str]:
        """Return a line for each step, with what it will take, and one for all of them."""
        width = max(len(step.text) for step in steps)
        lines = [f"  {step.text:<{width}}  {self._estimate(step)}" for step in steps]
        whole = [self.expected(step.parts) for step in steps]
        known = [seconds for seconds in whole if seconds is not None]
        more = " and what is not known yet" if len(known) < len(whole) else ""
        here = self.known()
        measured = all(part in here for step in steps for part in step.parts)
        where = "as the last time" if measured else "as on two idle cores, for what has not run here yet"
        return [*lines, f"  in all {about(sum(known))}{more}, {where}; a line at least every five seconds"]

    def _estimate(self, step: Step) -> str:
        if not step.parts:
            return "there"
        seconds = self.expected(step.parts)
        return "not known yet" if seconds is None else about(seconds)


def about(seconds: float) -> str:
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 90:
        return f"about {round(seconds, -1):.0f} s"
    return f"about {round(seconds / 60) or 1} min"
