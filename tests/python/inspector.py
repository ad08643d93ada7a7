# SPDX-License-Identifier: Apache-2.0
"""The inspector of the release build, in JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

BINARY = Path(__file__).parents[2] / "build/release/tools/torpor/torpor"


def look(*words, code: int = 0) -> dict:
    done = subprocess.run([BINARY, *map(str, words), "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)
