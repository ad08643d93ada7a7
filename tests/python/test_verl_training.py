# SPDX-License-Identifier: Apache-2.0
"""verl's own trainer, whole, over torpor.verl: real training steps with rollouts half-done, beside abort and resend.

What is run is `tools/dev bench verl`, in verl's environment (tools/devtool/trainers.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.slow]
STEPS, TOKENS = 6, 240


def trained(model: Path, arms: str, *words: str) -> dict[str, dict]:
    command = [ROOT / "tools/bench/verl_bench.py", "--json", f"--model={model}", f"--steps={STEPS}", f"--arms={arms}"]
    command += [f"--tokens={TOKENS}", *words]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=6 * 3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert all(row["steps"] == STEPS and any(norm > 0 for norm in row["gradients"]) for row in rows)
    return {row["arm"]: row for row in rows}


@pytest.fixture(scope="module")
def rows(tiny_model):
    return trained(tiny_model, "recompute,keep,resend")


def test_rollouts_stay_half_done_over_training_steps(rows):
    for row in rows.values():
        assert row["rollouts"] >= 4 * STEPS and row["half_done"] > 0 and row["of_several_steps"] > 0


@pytest.mark.parametrize("arm", ["recompute", "keep"])
def test_they_are_what_they_had_been_in_one_go(rows, arm):
    assert rows[arm]["differing"] == 0 < rows[arm]["tokens"]


def test_what_is_kept_is_not_computed_again_and_what_is_sent_again_is(rows):
    assert rows["keep"]["computed_twice"] == 0
    assert rows["recompute"]["computed_twice"] > 0 and rows["resend"]["computed_twice"] > 0


def test_steps_that_change_the_weights_change_the_rollouts(tiny_model):
    row = trained(tiny_model, "recompute", "--learning-rate=0.01")["recompute"]
    assert row["half_done"] > 0 and 0 < row["differing"] < row["tokens"]  # the first are drawn by the first weights
