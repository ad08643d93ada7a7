# SPDX-License-Identifier: Apache-2.0
"""A bound on the age of rollouts: which groups a generation takes, so that none is trained on too late."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar


class Begun(Protocol):
    begun: int  # the generation in which the group was begun


G = TypeVar("G", bound=Begun)


def least_bound(extra: int, needed: int) -> int:
    """Return the smallest bound that can be kept where `extra` groups are always left and a generation takes `needed`:
    the age of groups that are taken in the order in which they were begun."""
    return -(-extra // needed)


def taken_in_time(
    complete: Sequence[G], unfinished: Collection[G], needed: int, generation: int, bound: int | None
) -> list[G] | None:
    """Return the `needed` groups that this generation takes, or None while more have to be complete first.

    Without a bound these are the first complete ones. With one they are the oldest complete ones, and None is returned
    where a group that is left would then be older than `bound` generations, even if from the next generation on the
    groups were taken in the order in which they were begun.
    """
    if len(complete) < needed:
        return None
    if bound is None:
        return list(complete[:needed])
    by_age = sorted(complete, key=lambda group: group.begun)
    left = sorted([*by_age[needed:], *unfinished], key=lambda group: group.begun)
    in_time = all(generation + 1 + index // needed <= group.begun + bound for index, group in enumerate(left))
    return by_age[:needed] if in_time else None
