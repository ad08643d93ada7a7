# SPDX-License-Identifier: Apache-2.0
"""What the demo shows to people: stages, the chats as they grow, the table at the end. Plain text when piped."""

from __future__ import annotations

import os
import shutil
import sys

MARK = "⏸"  # in an answer: the engine slept here


class Screen:
    def __init__(self, quiet: bool):
        self._quiet = quiet
        self._live = not quiet and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self._live and "NO_COLOR" not in os.environ
        self._painted = 0

    def stage(self, text: str) -> None:
        self._painted = 0
        print(
            f"\n{self._bold(text)}" if not self._quiet else text,
            file=sys.stderr if self._quiet else sys.stdout,
            flush=True,
        )

    def line(self, text: str) -> None:
        if not self._quiet:
            print("  " + text, flush=True)

    def chats(self, texts: dict[str, str], slept_at: dict[str, int] | None = None, final: bool = False) -> None:
        """Repaints the chats, one line each with their latest words; without a terminal only when `final`."""
        if self._quiet or not (self._live or final):
            return
        width = shutil.get_terminal_size((100, 24)).columns - 8
        if self._painted:
            sys.stdout.write(f"\x1b[{self._painted}A")
        for number in sorted(texts, key=int):
            text = self._marked(texts[number], (slept_at or {}).get(number))
            clear = "\x1b[2K" if self._live else ""
            print(f"{clear}  {int(number) + 1:>3}  {text[-width:]}")
        self._painted = len(texts)
        sys.stdout.flush()

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
