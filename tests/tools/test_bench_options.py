# SPDX-License-Identifier: Apache-2.0
"""Values that a bench's options refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools/bench"


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["within_step", "--tokens=64,x"], "argument --tokens: 'x' is not a whole number of 1 or more"),
        (["within_step", "--rounds=0"], "argument --rounds: '0' is not a whole number of 1 or more"),
        (["trl", "--arms=keep,other"], "argument --arms: there is no other; choose of recompute, keep, resend"),
        (
            ["peers", "--work=agents,all"],
            "argument --work: there is no all; choose of return, restart, streams, agents",
        ),
        (["verl", "--prompt-tokens=-1"], "argument --prompt-tokens: '-1' is not a whole number of 1 or more"),
    ],
)
def test_a_value_that_cannot_be_measured_is_refused_by_its_option(arguments, refused):
    name, *options = arguments
    done = subprocess.run([sys.executable, BENCH / f"{name}_bench.py", *options], capture_output=True, text=True)
    assert done.returncode == 2 and refused in done.stderr and "Traceback" not in done.stderr, done.stderr
