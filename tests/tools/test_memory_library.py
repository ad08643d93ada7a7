# SPDX-License-Identifier: Apache-2.0
"""libtorpor_memory.so by ctypes from the system's own Python, over the device without a GPU."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from devtool import gpu_bundle

SCRIPTS = ROOT / "tools/gpu_check"
BARE = ["-I", "-S"]  # nothing but the standard library
EVERYWHERE = {"PATH": "/usr/bin:/bin", "TORPOR_MEMORY_DEVICE": "host"}
ALLOCATE = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from memory_library import MemoryFailure, MemoryLibrary
from pathlib import Path
library = MemoryLibrary(Path(sys.argv[1]))
try:
    with library.region("weights"):
        library.allocate(1 << 20)
    library.sleep()
    print("slept")
except MemoryFailure as problem:
    print(problem)
"""


def pythons() -> list[str]:
    """Return the system's Python, and the oldest that is supported where it is installed."""
    found = [shutil.which("python3", path="/usr/bin") or sys.executable]
    oldest = sorted(Path.home().glob(".pyenv/versions/3.8.*/bin/python3"))
    return [*found, *map(str, oldest[-1:])]


def bare(*words, python: str = "", **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python or pythons()[0], *BARE, *map(str, words)],
        env=EVERYWHERE | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("python", pythons())
def test_memory_sleeps_and_wakes_from_a_python_without_torpor(tmp_path, python):
    rows = tmp_path / "rows.jsonl"
    done = bare(SCRIPTS / "memory_checks.py", "library", "--library", gpu_bundle.LIBRARY, "--gib", 0.02, "--out", rows,
                python=python)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [line.get("verdict") for line in lines[1:-1]] == ["passed"] * 4
    assert lines[0]["part"] == "library" and lines[-1]["ended"]


def test_the_library_needs_nothing_but_libc():
    output = subprocess.run(["readelf", "-d", gpu_bundle.LIBRARY], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split(".so")[0] for line in output.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc", "libm", "libgcc_s", "ld-linux-x86-64", "libpthread", "libdl"}, needed
    output = subprocess.run(["nm", "-D", "--defined-only", gpu_bundle.LIBRARY], capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in output.splitlines()}
    header = (ROOT / "bindings/memory_c_api.h").read_text()
    assert all(name in header for name in names), names
    assert {"torpor_torch_malloc", "torpor_sleep", "torpor_wake", "tms_pause"} <= names


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TORPOR_ARENA_PREFAULT_BYTES", "32k", 'TORPOR_ARENA_PREFAULT_BYTES is "32k"'),
        ("TORPOR_ARENA_PREFAULT_BYTES", "background", "slept"),
        ("TORPOR_ARENA_PREFAULT_BYTES", "8388608", "slept"),
        ("TORPOR_COPY_THREADS", "many", 'TORPOR_COPY_THREADS is "many"'),
        ("TORPOR_COPY_THREADS", "0", "TORPOR_COPY_THREADS is 0"),
        ("TORPOR_COPY_THREADS", "257", "TORPOR_COPY_THREADS is 257"),
        ("TORPOR_COPY_THREADS", "3", "slept"),
    ],
)
def test_settings_come_from_the_environment(name, value, said):
    done = bare("-c", ALLOCATE, gpu_bundle.LIBRARY, **{name: value})
    assert said in done.stdout, done.stdout + done.stderr


def test_as_many_threads_copy_as_are_asked_for():
    count = 'import os; print("threads", len(os.listdir("/proc/self/task")))'
    counted = {}
    for threads in (1, 6):
        done = bare("-c", ALLOCATE + count, gpu_bundle.LIBRARY, TORPOR_COPY_THREADS=str(threads))
        counted[threads] = int(done.stdout.split()[-1])
    assert counted[6] - counted[1] >= 5, counted


def test_the_scripts_of_the_bundle_are_those_of_an_old_python():
    for source in ("memory_library", "rows", "memory_checks", "library_checks", "torch_checks", "rivals"):
        text = Path(SCRIPTS / f"{source}.py").read_text()
        ast.parse(text, feature_version=(3, 8))
        assert "from __future__ import annotations" in text
        assert not any(word in text for word in ("removeprefix", "zip(", "match ", "strict=")), source


def test_no_library_is_named(tmp_path):
    done = bare(SCRIPTS / "memory_checks.py", "library", "--library", tmp_path / "none.so")
    assert done.returncode == 2 and "none.so" in done.stderr
    assert os.listdir(tmp_path) == []
