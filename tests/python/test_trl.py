# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO with a colocated vLLM that sleeps between its steps: as it is, and with half-done rollouts (torpor.trl).

TRL has an environment of its own beside that of the tests (tools/devtool/trainers.py), made when first needed.
"""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import result_of

HERE = Path(__file__).parent
pytestmark = [pytest.mark.long, pytest.mark.slow]


@pytest.fixture(scope="module")
def steps(tiny_model, tmp_path_factory):
    sys.path.append(str(HERE.parents[1] / "tools"))
    from devtool import trainers

    python = trainers.environment("trl")

    def run(mode: str) -> dict:
        words = [python, HERE / "trl_process.py", tiny_model, mode]
        folder = tmp_path_factory.mktemp(mode)
        return result_of(
            subprocess.run(
                [str(word) for word in words], cwd=folder, capture_output=True, text=True, timeout=600, env=os.environ
            )
        )

    return run


def test_grpo_trains_with_a_sleeping_engine_as_with_one_that_is_awake(steps):
    awake, asleep = steps("awake"), steps("asleep")
    assert awake["sleeps"] == [] and len(awake["steps"]) == 2
    assert [each["asked"] for each in asleep["sleeps"]] == [{"level": 2}] * 3
    assert all(each["freed"] > 1 << 30 for each in asleep["sleeps"])
    assert asleep["steps"] == awake["steps"]


def test_half_done_rollouts_stay_over_training_steps(steps):
    result = steps("partial")
    first, *later = result["phases"]
    assert len(result["phases"]) == 4 and result["open"] > 0
    assert first["kept"] == 0 and first["left"] > 0 and any(phase["kept"] > 0 for phase in later)
    assert all(before["left"] == after["kept"] for before, after in zip(result["phases"], later, strict=False))
    assert all(phase["freed_bytes"] > 1 << 30 > phase["saved_bytes"] for phase in result["phases"])
    assert result["tags"] == {"weights": "detached", "kv_cache": "detached"}
    for phase in result["phases"]:
        for spans in phase["versions"]:
            assert spans[-1][0] <= str(phase["step"]) and spans[0][1] == 0
            assert all(one[2] == next_one[1] and one[0] < next_one[0] for one, next_one in pairwise(spans))
    # Drawn by several versions: the newest part has the log probabilities of the trainer's model, the older has not.
    assert result["errors"]
    for error in result["errors"]:
        assert error["newest"] < 0.05 < 0.2 < error["older"]  # vLLM computes in bfloat16 there


def test_no_group_is_older_than_its_bound(steps):
    result = steps("bounded")
    of_phases = [max(phase["staleness"]) for phase in result["phases"]]
    assert len(of_phases) == 8 and max(of_phases) == 2, of_phases
    assert any(phase["left"] > 0 for phase in result["phases"])
    assert result["logged"] == of_phases
