# SPDX-License-Identifier: Apache-2.0
"""What verl_bench.py counts in the process of vLLM's scheduler, written to the files of TORPOR_BENCH_FOLDER."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(os.environ["TORPOR_BENCH_FOLDER"])


def replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)
