# SPDX-License-Identifier: Apache-2.0
"""Guess which name a caller meant who typed one that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SIMILAR = 0.6  # of 1: a name that is less so is not what the caller meant


def meant(given: str, known: Iterable[str]) -> str:
    """Return "did you mean NAME? " for the name of `known` that is most like `given`, or "" where none is like it."""
    nearest = get_close_matches(given.lower(), list(known), 1, _SIMILAR)
    return f"did you mean {nearest[0]}? " if nearest else ""
