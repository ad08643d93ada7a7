# SPDX-License-Identifier: Apache-2.0
"""Types of the benches' options: argparse names an option whose value these refuse."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence


def count(text: str) -> int:
    """Return the whole number of 1 or more that `text` is."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def count_or_0(text: str) -> int:
    """Return the whole number of 0 or more that `text` is."""
    if not text.strip().isdecimal():
        raise ArgumentTypeError(f"'{text}' is not a whole number of 0 or more")
    return int(text)


def counts(text: str) -> list[int]:
    """Return the whole numbers of 1 or more that `text` has between commas, as 64,256,1024."""
    return [count(each) for each in text.split(",")]


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a type of words between commas, each of `known`."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(known)):
            raise ArgumentTypeError(f"there is no {', '.join(unknown)}; choose of {', '.join(known)}")
        return names

    return chosen
