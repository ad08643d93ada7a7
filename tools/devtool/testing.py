"""tools/dev test: compiles and runs everything, and says how long each part took."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from devtool import setup
from devtool.setup import ROOT, cmake_build

CORES = os.cpu_count() or 2


class Parts:
    """The parts of a run: what each is called, whether it passed, how long it took."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._done: list[tuple[str, bool, float]] = []

    def install(self, python: Path) -> None:
        began = time.monotonic()
        setup.install_torpor(python)
        self.add("pip install .", True, time.monotonic() - began)

    def compile(self, preset: str, *targets: str) -> None:
        """Raises SetupError if something does not compile: there is nothing to run then."""
        began = time.monotonic()
        cmake_build(preset, targets)
        self.add(f"compile, {preset}", True, time.monotonic() - began)

    def run(self, title: str, command: list, **options) -> None:
        print(f"\n=== {title}", flush=True)
        began = time.monotonic()
        code = subprocess.run([str(c) for c in command], cwd=ROOT, stdin=subprocess.DEVNULL, **options).returncode
        self.add(title, code == 0, time.monotonic() - began)

    def add(self, title: str, passed: bool, seconds: float) -> None:
        self._done.append((title, passed, seconds))

    def ctest(self, preset: str, *arguments: str) -> None:
        self.run(f"C++ tests, {preset}", ["ctest", "--preset", preset, "-j", CORES, *arguments])

    def summary(self) -> int:
        """Prints what the proofs counted and the parts with their times; returns the exit code."""
        print("\n=== Proofs")
        for line in proof_lines(ROOT / "build/release/Testing/Temporary/LastTest.log"):
            print(line)
        print("\n=== Summary")
        for title, passed, seconds in self._done:
            print(f"{'passed' if passed else 'FAILED'}  {seconds:6.0f} s  {title}")
        print(f"        {time.monotonic() - self._began:6.0f} s  in all, after the downloads")
        return 0 if all(passed for _, passed, _ in self._done) else 1


def proof_lines(log: Path) -> list[str]:
    """What the long trials say of themselves, from CTest's log of its last run."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return sorted({line.strip() for line in text.splitlines() if line.lstrip().startswith("proof: ")})


def main(arguments: list[str]) -> int:
    quick = "--quick" in arguments
    python_path, model = setup.prerequisites()
    parts = Parts()
    parts.install(python_path)
    parts.compile("release", "unit_tests", "proof_tests", "tools")
    parts.run("Unguarded access, clang", ["cmake", "--build", ROOT / "build/release", "--target", "thread_safety"])
    parts.ctest("release", *(["-L", "unit"] if quick else []))
    for preset in () if quick else ("asan", "tsan"):
        parts.compile(preset)
        parts.ctest(preset)
    env = os.environ | {"TORPOR_TEST_MODEL": str(model), "HF_HUB_OFFLINE": "1"}
    pytest = [python_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "--durations-min=20"]
    # The gate first: vLLM keeps what the environment says of its routes once an engine has run in the process.
    names = ("test_server_gate.py", "test_server.py", "test_server_restarts.py")
    servers = [ROOT / "tests/python" / name for name in names]
    if quick:
        parts.run("Python tests", [*pytest, "tests/python", "-m", "not slow"], env=env)
        parts.run("Tools and documents", [*pytest, "tests/tools"], env=env)
        return parts.summary()
    # Two at a time: servers and the demo take about as long as all others together.
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log, ThreadPoolExecutor(1) as beside:
        options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "env": env}

        def in_turn(*commands: list) -> list[int]:
            return [subprocess.run([str(word) for word in command], **options).returncode for command in commands]

        others = beside.submit(in_turn, [*pytest, *servers], [*pytest, "tests/tools"])
        engines = ["tests/python", *(f"--ignore={path}" for path in servers)]
        parts.run("Python tests, engines", [*pytest, *engines], env=env)
        codes = others.result()
        log.seek(0)
        print("\n=== Python tests, servers; tools and documents\n" + log.read(), flush=True)
    beside_it = "Python tests, servers; tools and documents (beside the one before)"
    parts.add(beside_it, codes == [0, 0], time.monotonic() - began)
    return parts.summary()
