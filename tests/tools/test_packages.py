"""What users install, made as they get it, put where nothing of this checkout is, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

# Of the C library and of the compiler's runtime, which every Linux has; nothing of Debian, torch or CUDA.
MAY_NEED = {"libc.so.6", "libpthread.so.0", "libdl.so.2", "libm.so.6", "ld-linux-x86-64.so.2", "libgcc_s.so.1"}
USE = """
import ctypes, torpor, torpor.torch_memory_saver
from torpor import _core, errors, memory
assert torpor.__file__.startswith({folder!r}), torpor.__file__
with memory.scope("weights"):
    address = memory.allocate(64 << 20)
ctypes.memset(address, 7, 64 << 20)
memory.sleep("weights")
memory.wake("weights")
assert ctypes.string_at(address, 64 << 20) == bytes([7]) * (64 << 20)
try:
    torpor.read_checkpoint("/nowhere")
except errors.NotFound as problem:  # C++ exceptions and errors work
    print(problem)
"""


def made(word: str, name: str) -> Path:
    done = subprocess.run([sys.executable, ROOT / "tools/dev", word], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (ROOT / "dist").glob(name)
    return path


@pytest.fixture(scope="module")
def wheel():
    return made("wheel", "torpor-*.whl")


def test_it_needs_nothing_that_a_linux_of_2018_lacks(wheel, tmp_path):
    assert wheel.name.endswith("-manylinux_2_28_x86_64.whl")  # auditwheel has looked at the symbols' versions
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (module,) = [name for name in names if name.endswith(".so")]
        archive.extract(module, tmp_path)
    assert {"torpor/py.typed", "torpor/vllm/plugin.py"} < set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    dynamic = output("readelf", "-dW", tmp_path / module)
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed and needed <= MAY_NEED
    exported = {line.split()[2] for line in output("nm", "-D", "--defined-only", tmp_path / module).splitlines()}
    assert "PyInit__core" in exported
    assert all(name.startswith(("PyInit__core", "torpor_", "tms_", "set_memory_margin_bytes")) for name in exported)


def test_it_works_where_nothing_of_the_checkout_is(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--target", tmp_path / "site", wheel], check=True, timeout=100)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "TORPOR_MEMORY_DEVICE": "host"}
    code = USE.format(folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "/nowhere" in done.stdout


def test_the_inspector_is_a_package_of_its_own(tmp_path, shown):
    package = made("deb", "torpor-tools_*.deb")
    fields = output("dpkg-deb", "--field", package)
    assert "Package: torpor-tools" in fields and "libzstd1" in fields and "python" not in fields
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path], check=True)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"usr/bin/torpor"}
    assert json.loads(output(tmp_path / "usr/bin/torpor", "verify", "--json", shown["checkpoint"]))["whole"] is True


def test_a_program_builds_against_the_installed_library(tmp_path):
    build = ["cmake", "--install", ROOT / "build/release", "--component", "development", "--prefix"]
    subprocess.run([*build, tmp_path / "prefix"], check=True, stdout=subprocess.DEVNULL)
    words = ["cmake", "-G", "Ninja", "-S", ROOT / "tests/install", "-B", tmp_path / "build"]
    output(*words, f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}")
    output("cmake", "--build", tmp_path / "build")
    assert output(tmp_path / "build/example") == "slept and woke, 7\n"


def output(*command) -> str:
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout
