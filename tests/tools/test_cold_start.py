# SPDX-License-Identifier: Apache-2.0
"""What `tools/dev bench cold_start` makes of its rounds, without an engine."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))
from cold_start_bench import CONTESTANTS, STAGES, show, summary


def rounds(*whole: float) -> list[dict]:
    """Rounds whose stages take these seconds altogether, each the same; half of that is a core's."""
    return [{stage: (each / len(STAGES), each / len(STAGES) / 2) for stage in STAGES} for each in whole]


def test_what_torpor_adds_is_the_median_of_what_each_round_says(capsys):
    """The second round is slow for all of them: no contestant is compared with another round's baseline."""
    found = dict(zip(CONTESTANTS, (rounds(10, 100, 20), rounds(11, 105, 21), rounds(9, 90, 16)), strict=True))
    result = summary(found)
    for unit, share in (("seconds", 1), ("cpu_seconds", 0.5)):
        own = result[unit]
        assert own["all"] == pytest.approx(dict(zip(CONTESTANTS, (20 * share, 21 * share, 16 * share), strict=True)))
        assert own["added"] == pytest.approx({"torpor": 0.05, "torpor, wakes": -0.1})
        assert own["stages"]["torpor"]["imports"] == pytest.approx(21 * share / len(STAGES))
    show(result | {"rounds": 3})
    assert "5.0%" in capsys.readouterr().out
