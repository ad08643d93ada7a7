# SPDX-License-Identifier: Apache-2.0
"""Rows of the checks of memory: how a check reports, and how rows are printed and kept as they come.

A row is {"check", "expected", "seen", "verdict", "figures"}. A verdict is "passed", "failed" or "not here"; "not here"
is never counted as passed. Owner: the process that runs a part. Failure: a row that is written stays, whatever follows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple, TextIO

PASSED, FAILED, NOT_HERE = "passed", "failed", "not here"


class NotHere(Exception):
    """The machine lacks something that a check needs; the text names it."""


class Seen(NamedTuple):
    """One observation of a check. A check may yield several."""

    text: str
    passed: bool
    figures: dict
    name: str = ""  # added to the name of the check


def row(check: str, expected: str, seen: str, verdict: str, figures: dict | None = None) -> dict[str, Any]:
    return {"check": check, "expected": expected, "seen": seen, "verdict": verdict, "figures": figures or {}}


class Report:
    """Print each row when it comes and append it to a file of JSON lines."""

    def __init__(self, path: Path | None, as_json: bool, out: TextIO = sys.stdout):
        self.rows: list[dict] = []
        self._as_json, self._out = as_json, out
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w") if path is not None else None  # noqa: SIM115

    def add(self, each: dict) -> None:
        self.rows.append(each)
        self.note(each, f"{each['verdict']:8}  {each['check']}: {each['seen']}")

    def note(self, value: dict, text: str) -> None:
        """Write a line that is no row: what the machine is, and how the part ended."""
        line = json.dumps(value)
        print(line if self._as_json else text, file=self._out, flush=True)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()

    def count(self, verdict: str) -> int:
        return sum(each["verdict"] == verdict for each in self.rows)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
