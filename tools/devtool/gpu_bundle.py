# SPDX-License-Identifier: Apache-2.0
"""tools/dev gpu_check: a bundle for a machine with an NVIDIA GPU, which needs neither vLLM nor a network there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from devtool import gpu_engine, setup
from devtool.setup import ROOT, SetupError, cmake_build

SOURCES = ROOT / "tools/gpu_check"
RELEASE = ROOT / "build/release"
PROGRAMS = (RELEASE / "tools/gpu_check/gpu_check", RELEASE / "tests/allocator/cuda_device_test")
LIBRARY = RELEASE / "bindings/memory_library/libtorpor_memory.so"
TARGETS = ("gpu_check", "cuda_device_test", "torpor_memory")
MOST_BYTES = 64 << 20  # one carry of a borrowed machine
HELP = """usage: tools/dev gpu_check             make build/gpu_check.tar.gz for a machine with an NVIDIA GPU
       tools/dev gpu_check --engine …  make build/gpu_engine.tar.xz, with vLLM's CUDA build and torpor (--engine --help)
       tools/dev gpu_check --gpu-path …     run its checks of an engine here, without a GPU (--gpu-path --help)

On the target:  tar xf gpu_check.tar.gz && gpu_check/run --help
It needs there: an NVIDIA driver, glibc 2.36; for the parts torch and speed a Python 3.8 or newer with torch.
Not needed: vLLM, torpor, this Python, a network. tools/gpu_check/on_the_target.md says what to run in which order."""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--engine"]:
        return gpu_engine.main(arguments[1:])
    if "--gpu-path" in arguments:
        python_path, _ = setup.everything()
        return subprocess.run([python_path, SOURCES / "engine_checks.py", *arguments]).returncode
    if arguments in (["--help"], ["-h"]):
        print(HELP)
        return 0
    if arguments:
        raise SetupError(
            f"{arguments[0]!r} is no word of tools/dev gpu_check: use none, --engine or --gpu-path (see --help)"
        )
    setup.system_packages()
    python_path = setup.python_environment()
    setup.use_cuda_headers(python_path)
    setup.cuda_compiler(python_path)
    cmake_build("release", TARGETS)
    bundle = ROOT / "build/gpu_check"
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    add_programs(bundle)
    add_scripts(bundle)
    archive = Path(shutil.make_archive(str(bundle), "gztar", bundle.parent, bundle.name))
    size = archive.stat().st_size
    print(f"{archive}: {size / 2**20:.0f} MiB; on the target: tar xf {archive.name} && {bundle.name}/run --help")
    if size > MOST_BYTES:
        raise SetupError(f"{archive} is larger than {MOST_BYTES >> 20} MiB: see what it carries")
    return 0


def add_programs(bundle: Path, programs: tuple[Path, ...] = PROGRAMS) -> None:
    """Add the programs with their libraries, but for those of libc, which are the target's own."""
    for program in programs:
        subprocess.run(["strip", "-o", bundle / program.name, program], check=True)
        gpu_engine.copy_libraries(program, bundle / "lib", but=("libc.", "libm."))
    subprocess.run(["strip", "-o", bundle / LIBRARY.name, LIBRARY], check=True)


def add_scripts(bundle: Path) -> None:
    """Add the checks in Python, the program that runs each part, and what tells how."""
    for source in SOURCES.glob("*.py"):
        shutil.copy(source, bundle / source.name)
    shutil.copy(SOURCES / "on_the_target.md", bundle / "README.md")
    run = bundle / "run"
    shutil.copy(SOURCES / "run.sh", run)
    run.chmod(0o755)
