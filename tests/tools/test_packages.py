# SPDX-License-Identifier: Apache-2.0
"""What users install, made as they get it, put where nothing of this checkout is, and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from devtool import other_vllm, setup
from zygote import ENVIRONMENT

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


@pytest.mark.long  # the library is compiled once more for it
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


@pytest.mark.long
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
    inspector = tmp_path / "site/bin/torpor"
    golden = shutil.copytree(ROOT / "tests/golden/v4-unsealed/g-000001", tmp_path / "g-000001")
    assert json.loads(output(inspector, "verify", "--json", golden))["whole"] is True
    refused = subprocess.run([inspector, "push", golden, "s3://bucket/prefix"], capture_output=True, text=True)
    assert refused.returncode != 0 and "without libcurl" in refused.stderr


README = """
import os, sys
from types import SimpleNamespace
from vllm import LLM
import torpor

def main():
    model, report = {model!r}, SimpleNamespace(checkpoint=sys.argv[-1])
{lines}
    print("RESULT", torpor.__file__, report.checkpoint, llm.is_sleeping(), flush=True)
    os._exit(0)

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
def test_the_lines_of_the_readme_run_where_the_wheel_lies_beside_vllm(wheel, tiny, tmp_path):
    base = setup.python_environment()
    other_vllm.begin(tmp_path / "environment", next(base.parents[1].glob("lib/python*/site-packages")))
    python = tmp_path / "environment/bin/python"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
    pip = [base, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "-q", "--no-deps", wheel]
    subprocess.run(pip, check=True, env=bare)
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    made, *slept, woken = block.replace("/var/lib/torpor", str(tmp_path / "torpor")).splitlines()
    assert len(slept) == 3 and 'to="disk"' in slept[-1] and "from_checkpoint" in woken

    def run(*lines: str, checkpoint: str = "") -> list[str]:
        script = tmp_path / "script.py"
        script.write_text(README.format(model=str(tiny), lines="\n".join(f"    {line}" for line in lines)))
        command = [python, script, checkpoint]
        done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).split()[1:]

    module, checkpoint, asleep = run(made, *slept)
    assert module.startswith(str(tmp_path)) and Path(checkpoint).is_dir() and asleep == "True"
    assert run(made, woken, checkpoint=checkpoint) == [module, checkpoint, "False"]


@pytest.mark.long
def test_the_sources_build_where_nothing_of_the_checkout_is(wheel, tmp_path):
    (sources,) = (ROOT / "dist").glob("torpor-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    build = [*pip, "--no-deps", "--no-build-isolation", "-w", tmp_path, sources]
    subprocess.run(build, check=True, timeout=900, cwd=tmp_path)
    built, portable = python_of(next(tmp_path.glob("torpor-*.whl"))), python_of(wheel)
    assert built == portable and "torpor/verl/server.py" in built


def python_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.endswith((".py", ".pyi", "py.typed"))}


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
