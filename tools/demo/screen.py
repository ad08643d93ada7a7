# SPDX-License-Identifier: Apache-2.0
"""What the demo shows to people: stages, the chats as they grow, the table at the end. Plain text when piped."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from devtool.heartbeat import Heartbeat

MARK = "⏸"  # in an answer: the engine slept here


class Screen:
    """While it is entered, no five seconds pass without a line: what is being done, and for how long.

    `quiet`: standard output is for one JSON object, and progress goes to standard error.
    """

    def __init__(self, quiet: bool, clock: Callable[[], float] = time.monotonic):
        self._quiet = quiet
        self._out = sys.stderr if quiet else sys.stdout
        self._live = not quiet and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self._live and "NO_COLOR" not in os.environ
        self._painted = 0
        self._lock = threading.RLock()
        self._clock, self._began = clock, clock()
        self._step, self._progress = "", ""
        self.heartbeat = Heartbeat(self._still_works, clock)

    def __enter__(self) -> Screen:
        self.heartbeat.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.heartbeat.__exit__(*error)

    def stage(self, text: str) -> None:
        with self._lock:
            self._painted = 0
            self._step, self._progress = text.split(" ")[0], ""
            since = f"  [{self._clock() - self._began:.0f} s]"
            self._print((f"\n{self._bold(text)}" if not self._quiet else text) + since)
            self.heartbeat.begins()

    def say(self, text: str) -> None:
        """Print a line, also where standard output is not for it."""
        self._print(text)

    def line(self, text: str) -> None:
        if not self._quiet:
            self._print("  " + text)

    def _still_works(self, seconds: float) -> None:
        with self._lock:
            self._painted = 0  # what is painted anew goes below this line
            self._print(f"  … step {self._step.rstrip('.') or 0}, {seconds:.0f} s{self._progress}")

    def _print(self, text: str) -> None:
        with self._lock:
            print(text, file=self._out, flush=True)
            self.heartbeat.printed()

    def chats(self, texts: dict[str, str], slept_at: dict[str, int] | None = None, final: bool = False) -> None:
        """Repaints the chats, one line each with their latest words; without a terminal only when `final`."""
        with self._lock:
            words = sum(len(text.split()) for text in texts.values())
            self._progress = f": {words} words of {len(texts)} answers"
            if not self._quiet and (self._live or final):
                self._paint(texts, slept_at or {})

    def _paint(self, texts: dict[str, str], slept_at: dict[str, int]) -> None:
        width = shutil.get_terminal_size((100, 24)).columns - 8
        if self._painted:
            sys.stdout.write(f"\x1b[{self._painted}A")
        for number in sorted(texts, key=int):
            text = self._marked(texts[number], slept_at.get(number))
            clear = "\x1b[2K" if self._live else ""
            print(f"{clear}  {int(number) + 1:>3}  {text[-width:]}")
        self._painted = len(texts)
        sys.stdout.flush()
        self.heartbeat.printed()

    def answers(self, texts: dict[str, str], slept_at: dict[str, int], kinds: list[str] | None = None) -> None:
        """`kinds`: what is special about each, to be shown before it."""
        for number in sorted(texts, key=int):
            kind = f"{kinds[int(number)]}: " if kinds else ""
            self.line(f"{int(number) + 1:>3}  {kind}{self._marked(texts[number], slept_at.get(number))}")

    def table(self, rows: list[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.line(f"{name:<{width}}  {value}")

    @staticmethod
    def _marked(text: str, at: int | None) -> str:
        if at is not None:
            text = f"{text[:at]} {MARK} {text[at:]}"
        return " ".join(text.split())

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._colour else text


def size(count: int) -> str:
    return (
        f"{count / 1e9:.2f} GB"
        if count >= 1e9
        else f"{count / 1e6:.1f} MB"
        if count >= 1e6
        else f"{count / 1e3:.1f} kB"
    )
