# SPDX-License-Identifier: Apache-2.0
"""What `tools/dev test` leaves out on one path of vLLM it runs on the other."""

import os
import subprocess
import sys

import pytest
import gpu_path
from conftest import ROOT
from devtool.testing import ON_GPU_PATH, GPU_PATH_ALONE


def collected(marks: str, more: dict[str, str]) -> set[str]:
    words = ["-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests/python", "-m", marks]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.long
def test_each_test_runs_on_one_of_the_paths():
    left_out = collected(f"not long and {GPU_PATH_ALONE}", {})
    assert left_out and left_out - collected(ON_GPU_PATH, gpu_path.environment()) == set()
