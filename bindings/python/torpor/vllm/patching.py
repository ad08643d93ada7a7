# SPDX-License-Identifier: Apache-2.0
"""Attributes that are set on classes and modules of vLLM: all of them, or none."""

from __future__ import annotations

_ABSENT = object()


class Patches:
    """What was set, and what stood there before. Not safe for several threads."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def set(self, owner, name: str, value) -> None:
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """As if nothing had been set; the newest goes first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
