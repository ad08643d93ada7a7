# SPDX-License-Identifier: Apache-2.0
"""tools/dev reference: docs/reference from the code, by tools/reference, which runs where vLLM is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from devtool import setup
from devtool.setup import ROOT, SITE, SetupError, say

_WRITE = "tools/reference/write.py"


def main(arguments: list[str]) -> int:
    """Write the pages, of the code as it is now."""
    if arguments:
        raise SetupError(f"tools/dev reference takes no {arguments[0]!r}")
    python, _ = setup.everything()
    done = _run(python, ROOT)
    print(done.stdout, end="")
    if done.returncode == 0:
        say("docs/reference is written")
    elif not done.stdout:
        raise SetupError(f"{_WRITE} failed:\n{done.stderr[-3000:]}")
    return done.returncode


def problems(root: Path) -> list[str]:
    """Return which pages differ from the code, and what lacks a text. Asked if vLLM and torpor are installed.

    The pages of the program are compared only if it was compiled of the sources that are here.
    """
    python = setup.environment_folder() / "bin/python"
    if not (root / _WRITE).exists() or not python.exists() or next(SITE.glob("torpor/_core*.so"), None) is None:
        return []
    done = _run(python, root, "--check", *(() if setup.has_present_program() else ("--without-program",)))
    if done.returncode not in (0, 1) or (done.returncode == 1 and not done.stdout):
        return [f"{_WRITE} failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}"]
    return done.stdout.splitlines()


def _run(python: Path, root: Path, *words: str) -> subprocess.CompletedProcess:
    """Without variables that change what vLLM or torpor do."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TORPOR_", "VLLM_"))}
    env |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, root / _WRITE, "--site", SITE, *words]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
