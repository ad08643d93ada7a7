# SPDX-License-Identifier: Apache-2.0
"""Whatever the order in which groups become complete, none is taken later than its bound."""

import random
from dataclasses import dataclass

import pytest
from torpor.staleness import least_bound, taken_in_time


@dataclass(eq=False)
class Group:
    begun: int


def ages(needed: int, extra: int, bound: int | None, pick, generations: int = 60) -> list[int]:
    """Return the ages of all groups that are taken. `pick` says which of the unfinished ones is complete next."""
    unfinished = [Group(0) for _ in range(extra)]
    complete: list[Group] = []
    taken_ages = []
    for generation in range(generations):
        unfinished += [Group(generation) for _ in range(needed)]
        while (taken := taken_in_time(complete, unfinished, needed, generation, bound)) is None:
            complete.append(unfinished.pop(pick(unfinished)))
        assert len(taken) == needed and len(set(map(id, taken))) == needed
        complete = [group for group in complete if group not in taken]
        assert len(complete) + len(unfinished) == extra
        taken_ages += [generation - group.begun for group in taken]
    return taken_ages


def newest(unfinished) -> int:
    return len(unfinished) - 1


@pytest.mark.parametrize("needed", [1, 2, 3, 8])
@pytest.mark.parametrize("extra", [1, 2, 3, 5, 8, 13])
def test_no_group_is_taken_later_than_its_bound(needed, extra):
    least = least_bound(extra, needed)
    for bound in (least, least + 1, least + 3):
        assert max(ages(needed, extra, bound, newest)) == bound  # the newest first: the worst that can happen
        for seed in range(20):
            chance = random.Random(seed)
            assert max(ages(needed, extra, bound, lambda groups, chance=chance: chance.randrange(len(groups)))) <= bound


def test_without_a_bound_a_long_group_is_overtaken_for_ever():
    assert max(ages(1, 1, None, newest)) == 0
    late = Group(0)
    assert taken_in_time([Group(9)], [late], 1, 9, None) is not None
    assert taken_in_time([Group(9)], [late], 1, 9, 9) is None


def test_a_generation_waits_no_longer_than_the_bound_asks_for():
    old, new = Group(0), Group(2)
    assert taken_in_time([new], [old], 1, 2, 3) == [new]  # the old one can be taken in the next generation
    assert taken_in_time([new], [old], 1, 2, 2) is None
    assert taken_in_time([new, old], [], 1, 2, 2) == [old]
