"""tools/dev test: compiles and runs everything, and says how long each part took."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from devtool import other_vllm, setup
from devtool.setup import ROOT, cmake_build

CORES = os.cpu_count() or 2
PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider", "--durations=5", "--durations-min=20")
# Files of tests/python that put engines to sleep, whatever model runner they have.
ENGINES = (
    "identity",
    "levels",
    "weights",
    "new_process",
    "failures",
    "refusals",
    "variants",
    "other_processes",
    "gpu_path",
)
SANITIZERS = ("asan", "tsan")
ONE_COMPILER = {"CMAKE_BUILD_PARALLEL_LEVEL": "1"}
# The gate first: vLLM keeps what the environment says of its routes once an engine has run in the process.
SERVERS = [f"tests/python/{name}.py" for name in ("test_server_gate", "test_server_automatic", "test_server", "test_server_restarts")]
BUT_SERVERS = ["tests/python", *(f"--ignore={path}" for path in SERVERS)]
# Files of tests/python with tests that are marked as the core, for every vLLM that is known; test_gpu_path.py has some too.
CORE = ("identity", "new_process", "features", "server")


class Parts:
    """The parts of a run: what each is called, whether it passed, how long it took."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._done: list[tuple[str, bool, float, float]] = []
        self._printing = threading.Lock()

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
        code, _, busy = ended(command, **options)
        self.add(title, code == 0, time.monotonic() - began, busy)

    def beside_each_other(self, jobs: dict[str, tuple[list, dict]]) -> None:
        """Each is a command with its environment, the longest first; its output is shown when it has ended.

        One more at a time than there are cores: engines wait now and then.
        """

        def run(title: str, command: list, env: dict) -> None:
            began = time.monotonic()
            code, said, busy = ended(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            with self._printing:
                print(f"\n=== {title}\n{said}", flush=True)
                self.add(title, code == 0, time.monotonic() - began, busy)

        with ThreadPoolExecutor(CORES + 1) as pool:
            for job in [pool.submit(run, title, *job) for title, job in jobs.items()]:
                job.result()

    def add(self, title: str, passed: bool, seconds: float, busy: float = 0) -> None:
        """`busy`: seconds of cores that it took, of all its processes; 0: not measured."""
        self._done.append((title, passed, seconds, busy))

    def summary(self) -> int:
        """Prints what the proofs counted and the parts with their times; returns the exit code."""
        print("\n=== Proofs")
        for line in proof_lines(ROOT / "build/release/Testing/Temporary/LastTest.log"):
            print(line)
        print("\n=== Summary")
        for title, passed, seconds, busy in self._done:
            of_cores = f", {busy:.0f} s of cores" if busy else ""
            print(f"{'passed' if passed else 'FAILED'}  {seconds:6.0f} s  {title}{of_cores}")
        print(f"        {time.monotonic() - self._began:6.0f} s  in all, after the downloads")
        return 0 if all(passed for _, passed, _, _ in self._done) else 1


def ended(command: list, **options) -> tuple[int, str, float]:
    """Runs a command to its end: its exit code, what it said if stdout is a pipe, and the seconds of cores it took."""
    words = [str(word) for word in command]
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, **options)
    said = process.stdout.read().decode(errors="replace") if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, said, usage.ru_utime + usage.ru_stime


def proof_lines(log: Path) -> list[str]:
    """What the long trials say of themselves, from CTest's log of its last run."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return sorted({line.strip() for line in text.splitlines() if line.lstrip().startswith("proof: ")})


def pytest_on_rig(python: Path, *words: str) -> list:
    return [python, "-m", "rig", "-m", "pytest", *PYTEST_OPTIONS, *words]


def rig_environment() -> dict[str, str]:
    """Where the package of tests/rig is found, besides what is found already."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests/rig"), *filter(None, [os.environ.get("PYTHONPATH")])])}


def ctest(preset: str, at_once: int, *arguments: str) -> list:
    return ["ctest", "--preset", preset, "-j", at_once, *arguments]


def compiled_and_run(preset: str) -> list:
    """Compilers keep cores busy that engines leave idle."""
    words = ["cmake", "--preset", preset], ["cmake", "--build", "--preset", preset], ctest(preset, 1)
    return ["sh", "-c", " && ".join(shlex.join(map(str, command)) for command in words)]


def core_with(python: Path) -> list:
    """The core of the Python tests with another vLLM, on the CPU's path."""
    files = [f"tests/python/test_{name}.py" for name in CORE]
    return [python, "-m", "pytest", *PYTEST_OPTIONS, *files, "-m", "core"]


def other_versions() -> int:
    """The core of the Python tests with each other vLLM that is known, on the GPU's path too."""
    _, model = setup.everything()
    env = os.environ | {"TORPOR_TEST_MODEL": str(model), "HF_HUB_OFFLINE": "1"}
    parts = Parts()
    others = {"0.31": other_vllm.older_environment(), "0.33, compiled parts of 0.32": other_vllm.newer_environment()}
    for version, python in others.items():
        on_rig = pytest_on_rig(python, "tests/python/test_gpu_path.py", "-m", "core")
        parts.beside_each_other(
            {
                f"Python tests, core, vLLM {version}": (core_with(python), env),
                f"Python tests, core, vLLM {version}, GPU path": (on_rig, env | rig_environment()),
            }
        )
    return parts.summary()


def whole_gpu_path() -> int:
    """All tests of engines on the rig, and all that are too long for `test`, on both paths."""
    python, model = setup.everything()
    env = os.environ | {"TORPOR_TEST_MODEL": str(model), "HF_HUB_OFFLINE": "1"} | rig_environment()
    engines = pytest_on_rig(python, *(f"tests/python/test_{name}.py" for name in ENGINES))
    too_long = [python, "-m", "pytest", *PYTEST_OPTIONS, "-m", "long"]
    others = ("features", "groups", "data_parallel", "pipeline")
    seldom = pytest_on_rig(python, *(f"tests/python/test_{name}.py" for name in others), "-m", "rig and long")
    commands = engines, seldom, [*too_long, "tests/python"], [*too_long, "tests/tools"]
    return max(subprocess.run([str(word) for word in words], cwd=ROOT, env=env).returncode for words in commands)


def main(arguments: list[str]) -> int:
    if wrong := [word for word in arguments if word != "--quick"]:
        raise setup.SetupError(f"tools/dev test does not know {wrong[0]!r}; there is --quick")
    quick = "--quick" in arguments
    python_path, model = setup.prerequisites()
    parts = Parts()
    parts.install(python_path)
    parts.compile("release", "unit_tests", "proof_tests", "tools")
    env = os.environ | {"TORPOR_TEST_MODEL": str(model), "HF_HUB_OFFLINE": "1"}
    pytest = [python_path, "-m", "pytest", *PYTEST_OPTIONS]
    thread_safety = ["cmake", "--build", ROOT / "build/release", "--target", "thread_safety"]
    if quick:
        parts.run("Unguarded access, clang", thread_safety)
        parts.run("C++ tests", ctest("release", CORES, "-L", "unit"))
        quick_ones = ("-m", "not slow and not long")
        parts.run("Python tests, servers", [*pytest, *SERVERS, *quick_ones], env=env)
        parts.run("Python tests, engines", [*pytest, *BUT_SERVERS, *quick_ones], env=env)
        parts.run("Tools and documents", [*pytest, "tests/tools", "-m", "not long"], env=env)
        return parts.summary()
    parts.beside_each_other(
        {f"C++ tests, {preset}, compiled": (compiled_and_run(preset), env | ONE_COMPILER) for preset in SANITIZERS}
        | {
            "Python tests, vLLM's GPU path": (
                pytest_on_rig(python_path, "tests/python", "-m", "rig and not long"),
                env | rig_environment(),
            ),
            "Python tests, engines": ([*pytest, *BUT_SERVERS, "-m", "not long"], env),
            "C++ tests, release": (ctest("release", 1), env),
            "Tools and documents": ([*pytest, "tests/tools", "-m", "not long"], env),
            "Python tests, servers": ([*pytest, *SERVERS], env),
            "Python tests, core, vLLM 0.31": (core_with(other_vllm.older_environment()), env),
            "Unguarded access, clang": (thread_safety, env | ONE_COMPILER),
        }
    )
    return parts.summary()
