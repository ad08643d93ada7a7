# SPDX-License-Identifier: Apache-2.0
"""tools/dev mutants: plants each fault of tests/mutants.toml in a copy of the tree; its test must catch it.

`caught_by` is a program of the C++ tests and a pattern of its cases, or, for faults of the adapter, `pytest` and a
node, or `gpu_path` and one that runs on vLLM's GPU path (tests/gpu_path).

Two lanes run beside each other, each with a copy of its own: one compiles and runs C++ tests, one starts engines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from devtool import setup, testing
from devtool.setup import ROOT, SetupError, cmake_build, say

COMPILED = ROOT / "build/mutants/compiled"  # a lane's copy of the source, and what is compiled of it
ENGINES = ROOT / "build/mutants/engines"
HANG_SECONDS = 60  # a fault that makes its test wait for ever is caught too
PYTHON_HANG_SECONDS = 120  # an engine starts first


def main(arguments: list[str]) -> int:
    """`arguments`: words; a fault is planted if its name or its file has one of them."""
    mutants = tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]
    if arguments:
        mutants = [m for m in mutants if any(word in m["name"] or word in m["file"] for word in arguments)]
        if not mutants:
            named = " or ".join(map(repr, arguments))
            raise SetupError(f"no mutant has {named} in its name or its file; tests/mutants.toml has both of each")
    python, model = setup.everything()  # once, before the lanes
    setup.use_cuda_headers(python)
    # Those of one file follow each other: taking one out and planting the next compiles the file once.
    mutants = sorted(mutants, key=lambda mutant: mutant["file"])
    kinds = [mutant["caught_by"].split()[0] for mutant in mutants]
    in_python = [m for m, kind in zip(mutants, kinds, strict=True) if kind == "pytest"]
    on_gpu_path = [m for m, kind in zip(mutants, kinds, strict=True) if kind == "gpu_path"]
    compiled = [m for m, kind in zip(mutants, kinds, strict=True) if kind not in ("pytest", "gpu_path")]

    def with_engines() -> int:
        missed = missed_by_pytest(in_python, {}, python, model)
        return missed + missed_by_pytest(on_gpu_path, gpu_path_environment(), python, model)

    with ThreadPoolExecutor(2) as lanes:
        counts = [lanes.submit(missed_compiled, compiled, python), lanes.submit(with_engines)]
        missed = sum(count.result() for count in counts)
    say(f"{len(mutants) - missed} of {len(mutants)} caught")
    return 1 if missed else 0


def compiled_tree(tree: Path, targets: list[str], python: Path) -> dict[str, str]:
    """Configured, and these without a fault; the environment to compile in."""
    env = dict(os.environ)
    where = [python, "-m", "pybind11", "--cmakedir"]
    pybind11 = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    words = [
        "cmake", "-S", tree / "source", "-B", tree / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        "-DTORPOR_UNITY=OFF", "-DTORPOR_BUILD_TOOLS=OFF", "-DTORPOR_SIMULATION_SEEDS=200", "-DTORPOR_BUILD_PYTHON=ON",
        f"-DPython_EXECUTABLE={python}", f"-Dpybind11_DIR={pybind11}",
    ]  # fmt: skip
    setup.run(f"Configure {tree.name}", words, env=env, log_name=f"configure-{tree.name}")
    compile_ = ["cmake", "--build", tree / "build", "--target", *targets]
    setup.run(f"Compile {tree.name} without a fault", compile_, env=env, log_name=f"compile-{tree.name}")
    return env


def compile_mutant(mutant: dict, tree: Path, target: str, env: dict[str, str]) -> None:
    build = ["cmake", "--build", tree / "build", "--target", target]
    built = subprocess.run(build, env=env, capture_output=True, text=True)
    if built.returncode != 0:
        raise SetupError(f"the mutant {mutant['name']!r} does not compile:\n{built.stdout[-3000:]}")


def missed_compiled(mutants: list[dict], python: Path) -> int:
    if not mutants:
        return 0
    copy_tree(COMPILED)
    env = compiled_tree(COMPILED, sorted({m["caught_by"].split()[0] for m in mutants}), python)

    def caught_by(mutant: dict) -> str:
        program, pattern = mutant["caught_by"].split()
        compile_mutant(mutant, COMPILED, program, env)
        return run(next((COMPILED / "build/tests").rglob(program)), pattern)

    return sum(not caught(m, COMPILED, caught_by) for m in mutants)


def gpu_path_environment() -> dict[str, str]:
    sys.path.insert(0, str(ROOT / "tests/gpu_path"))
    import gpu_path

    return gpu_path.environment()


def in_adapter(mutant: dict) -> bool:
    return mutant["file"].endswith(".py")


def missed_by_pytest(mutants: list[dict], more: dict[str, str], python: Path, model: Path) -> int:
    """Each in a process that is forked from one with vLLM, and imports the adapter from the copy."""
    if not mutants:
        return 0
    copy_tree(ENGINES)
    source = ENGINES / "source"
    where = [python, "-c", "from torpor import _core; print(_core.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    module = source / "bindings/python/torpor" / Path(found).name
    shutil.copy2(found, module)
    compiling = {} if all(in_adapter(m) for m in mutants) else compiled_tree(ENGINES, ["_core"], python)
    sys.path.insert(0, str(ROOT / "tests/python"))
    from zygote import ENVIRONMENT, Zygote

    env = os.environ | ENVIRONMENT | more | {"TORPOR_TEST_MODEL": str(model), "PYTHONDONTWRITEBYTECODE": "1"}
    # The copy's code comes before the installed one, which vLLM finds torpor's entry point with.
    env["PYTHONPATH"] = os.pathsep.join(
        [str(source / "bindings/python"), str(source / "tests/gpu_path"), str(setup.SITE)]
    )
    # The inspector and what is installed beside vLLM are without a fault.
    setup.install_console(python)
    cmake_build("release", ("torpor",))
    if not (source / "build").exists():
        (source / "build").symlink_to(ROOT / "build")
    zygote = Zygote(python, env)

    def pytest(*nodes: str, seconds: float = PYTHON_HANG_SECONDS) -> subprocess.CompletedProcess:
        words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *nodes]
        return zygote.run(words, env=env, cwd=source, timeout=seconds)

    def caught_by(mutant: dict) -> str:
        if not in_adapter(mutant):
            compile_mutant(mutant, ENGINES, "_core", compiling)
        shutil.copy2(found if in_adapter(mutant) else ENGINES / "build/bindings" / module.name, module)
        try:
            done = pytest(mutant["caught_by"].split()[1])
        except subprocess.TimeoutExpired:
            return "hangs"
        if done.returncode > 1:  # no such test, or nothing that pytest could run
            raise SetupError(f"the mutant {mutant['name']!r} cannot be tried:\n{done.stdout[-3000:]}")
        return {0: "", 1: "fails"}.get(done.returncode, "crashes")

    try:
        for nodes in of_one_process({m["caught_by"].split()[1] for m in mutants}):
            without = pytest(*nodes, seconds=PYTHON_HANG_SECONDS * len(nodes))
            if without.returncode != 0:
                said = without.stdout[-3000:] + without.stderr[-1000:]
                raise SetupError(f"the tests of mutants fail without a fault:\n{said}")
        return sum(not caught(m, ENGINES, caught_by) for m in mutants)
    finally:
        zygote.close()


def of_one_process(nodes: set[str]) -> list[list[str]]:
    """These tests of pytest, those together that `test` runs in one process, too: their engines share it."""
    apart = (testing.SESSIONS, testing.FEW_BLOCKS, testing.SERVERS)
    found: dict[int, list[str]] = {}
    for node in sorted(nodes):
        place = next((at for at, files in enumerate(apart) if node.split("::")[0] in files), len(apart))
        found.setdefault(place, []).append(node)
    return list(found.values())


def copy_tree(tree: Path) -> None:
    """The tracked and new files as they are; times are kept, so that little is compiled again."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    names = [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        target = tree / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
            shutil.copy2(ROOT / name, target)


def caught(mutant: dict, tree: Path, caught_by: Callable[[dict], str]) -> bool:
    """Plants it, asks `caught_by` how it was noticed, and takes it out. One that cannot be tried is not caught."""
    path = tree / "source" / mutant["file"]
    original = path.read_text()
    began = time.monotonic()
    try:
        if (count := original.count(mutant["replace"])) != 1:
            raise SetupError(f"{mutant['file']} has the text of this fault {count} times; mend tests/mutants.toml")
        path.write_text(original.replace(mutant["replace"], mutant["by"]))
        found = caught_by(mutant)
    except SetupError as problem:
        say(str(problem))
        found = ""
    finally:
        path.write_text(original)
    where = mutant["caught_by"].split()[1]
    say(f"{found if found else 'MISSED':<8} {time.monotonic() - began:4.0f} s  {mutant['name']}  ({where})")
    return found != ""


def run(binary, pattern: str) -> str:
    """How the test noticed, or nothing."""
    try:
        done = subprocess.run(
            [binary, f"--gtest_filter={pattern}", "--gtest_brief=1"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=HANG_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if "0 tests from 0 test suites ran" in done.stdout:
        raise SetupError(f"no test matches {pattern}")
    if done.returncode == 0:
        return ""
    return "fails" if done.returncode > 0 else "crashes"
