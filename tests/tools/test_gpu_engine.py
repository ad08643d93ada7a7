# SPDX-License-Identifier: Apache-2.0
"""The bundle with vLLM for a machine with a GPU: what is left of compiled kernels, and its program."""

from __future__ import annotations

import os
import struct
import subprocess

import pytest
from conftest import ROOT
from devtool.gpu_engine import for_one_architecture
from devtool.setup import SetupError

PTX, MACHINE_CODE = 1, 2


def entry(kind: int, arch: int, content: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(content)) + bytes(12) + struct.pack("<I", arch)
    return header.ljust(64, b"\0") + content


def fat_binary(*entries: bytes, version: int = 1) -> bytes:
    inside = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, version, 16, len(inside)) + inside


def test_the_code_of_one_architecture_is_left_and_nothing_moves():
    kept, other, text = (bytes([number]) * 24 for number in (1, 2, 3))
    library = (
        b"before"
        + fat_binary(entry(MACHINE_CODE, 80, other), entry(MACHINE_CODE, 90, kept), entry(PTX, 90, text))
        + b"between"
        + fat_binary(entry(MACHINE_CODE, 90, kept))
        + b"behind"
    )
    left = for_one_architecture(library, 90)
    assert len(left) == len(library)
    assert left == library.replace(other, bytes(24)).replace(text, bytes(24))


def test_bytes_that_only_look_like_a_fat_binary_stay():
    library = fat_binary(entry(MACHINE_CODE, 80, b"other"), version=2) + fat_binary()[:8]
    assert for_one_architecture(library, 90) == library


def test_a_fat_binary_of_another_layout_is_refused():
    wrong = bytearray(fat_binary(entry(MACHINE_CODE, 80, b"other")))
    struct.pack_into("<Q", wrong, 16 + 8, 10_000)  # its content ends behind it
    with pytest.raises(SetupError, match="not laid out as expected"):
        for_one_architecture(bytes(wrong), 90)


def test_the_bundles_program_finds_what_lies_beside_it(tmp_path):
    for name in ("checks", "torpor", "packages", "vllm", "lib", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "checks/engine_checks.py").write_text(
        "import os, sys; print(sys.argv[1:], os.environ['PYTHONPATH'], os.environ['LD_LIBRARY_PATH'], sep='|')"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    (tmp_path / "run").write_bytes((ROOT / "tools/gpu_check/run_engine.sh").read_bytes())
    done = subprocess.run(["sh", tmp_path / "run", "--only", "3"], env=environment, capture_output=True, text=True)
    words, paths, libraries = done.stdout.strip().split("|")
    assert words == str(["--model", f"{tmp_path}/model", "--only", "3"])
    assert paths == ":".join(f"{tmp_path}/{name}" for name in ("torpor", "packages", "vllm"))
    assert libraries == f"{tmp_path}/lib"
