# SPDX-License-Identifier: Apache-2.0
"""Types of the benches' options: argparse names an option whose value these refuse."""

from __future__ import annotations

from argparse import ArgumentTypeError


def count(text: str) -> int:
    """Return the whole number of 1 or more that `text` is."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def counts(text: str) -> list[int]:
    """Return the whole numbers of 1 or more that `text` has between commas, as 64,256,1024."""
    return [count(each) for each in text.split(",")]
