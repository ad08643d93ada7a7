"""An environment with RL trainers beside vLLM, for the tests of what torpor offers them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from devtool import other_vllm
from devtool.setup import read_list, run


def environment() -> Path:
    """The one that all tests run with, and tools/requirements/trainers.txt; returns its python."""
    wanted = read_list("trainers.txt")
    folder, python, of_base = other_vllm.folder_of(
        "trainers", hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    )
    if (folder / "complete").exists():
        return python
    other_vllm.begin(folder, of_base)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run("Trainers", [*pip, "install", "--no-compile", *wanted], log_name="trainers")
    (folder / "complete").touch()
    return python
