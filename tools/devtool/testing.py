# SPDX-License-Identifier: Apache-2.0
"""tools/dev test: compiles and runs everything, and says how long each part took."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from devtool import other_vllm, setup
from devtool.setup import ROOT, cmake_build

sys.path += [str(ROOT / "tests/python"), str(ROOT / "tests/gpu_path")]

import gpu_path
from zygote import ENVIRONMENT, Zygote

CORES = os.cpu_count() or 2
PYTEST_OPTIONS = ("-q", "--tb=short", "-p", "no:cacheprovider", "--durations=5", "--durations-min=20")
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
    "sessions",
    "sessions_disk",
    "forks",
    "gpu_path",
)
GPU_PATH_ALONE = (
    "gpu_path and not core and not cpu"  # marks of tests of engines that `test` runs on the GPU's path alone
)
ON_GPU_PATH = "gpu_path and not long"  # and of all that it runs there
SANITIZERS = {"asan": 2, "tsan": 1}  # how many compilers at a time: what takes longest, so that it does not end last
# The gate first: vLLM keeps what the environment says of its routes once an engine has run in the process.
SERVERS = [
    f"tests/python/test_server{name}.py"
    for name in ("_gate", "_access", "_operations", "_console", "_automatic", "", "_restarts")
]
# In a process of their own: they have an engine beside that of other tests, whose random numbers it would share.
SESSIONS = ["tests/python/test_sessions.py", "tests/python/test_sessions_disk.py", "tests/python/test_forks.py"]
# In another: on a GPU there is one engine a process.
FEW_BLOCKS = ["tests/python/test_forks_few_blocks.py"]
BUT_SESSIONS = ["tests/python", *(f"--ignore={path}" for path in (*SESSIONS, *FEW_BLOCKS))]
BUT_SERVERS = [*BUT_SESSIONS, *(f"--ignore={path}" for path in SERVERS)]
# Files of tests/python with tests that are marked as the core, for every known vLLM; test_gpu_path.py has some too.
CORE = (
    "server_gate", "records", "identity", "new_process", "features", "server", "golden_contracts", "refusals",
    "other_connectors", "sessions", "sessions_disk", "sessions_beside", "preemptions", "forks", "offloading_tier",
)  # fmt: skip


@dataclass
class Job:
    """A part of the tests. With a zygote, of which it is forked, `command` has the words after "python"."""

    command: list
    env: dict[str, str]
    zygote: Zygote | None = None


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

    def run(self, title: str, job: Job) -> None:
        print(f"\n=== {title}", flush=True)
        began = time.monotonic()
        code, busy = ended(job)
        self.add(title, code == 0, time.monotonic() - began, busy)

    def beside_each_other(self, jobs: dict[str, Job]) -> None:
        """The longest first; the output of each is shown when it has ended.

        Two more at a time than there are cores: engines, disks and clients are waited for.
        """

        def run(title: str, job: Job) -> None:
            began = time.monotonic()
            with tempfile.TemporaryFile() as out:
                code, busy = ended(job, out)
                out.seek(0)
                said = out.read().decode(errors="replace")
            with self._printing:
                print(f"\n=== {title}\n{said}", flush=True)
                self.add(title, code == 0, time.monotonic() - began, busy)

        with ThreadPoolExecutor(CORES + 2) as pool:
            for job in [pool.submit(run, title, job) for title, job in jobs.items()]:
                job.result()

    def add(self, title: str, passed: bool, seconds: float, busy: float = 0) -> None:
        """`busy`: seconds of cores that it took, of all its processes; 0: not measured."""
        self._done.append((title, passed, seconds, busy))

    def summary(self) -> int:
        """Prints what the proofs counted and the parts with their times; returns the exit code."""
        print("\n=== Proofs")
        logs = (ROOT / f"build/{preset}/Testing/Temporary/LastTest.log" for preset in ("release", "asan"))
        for line in sorted({line for log in logs for line in proof_lines(log)}):
            print(line)
        print("\n=== Summary")
        for title, passed, seconds, busy in self._done:
            of_cores = f", {busy:.0f} s of cores" if busy else ""
            print(f"{'passed' if passed else 'FAILED'}  {seconds:6.0f} s  {title}{of_cores}")
        print(f"        {time.monotonic() - self._began:6.0f} s  in all, after the downloads")
        return 0 if all(passed for _, passed, _, _ in self._done) else 1


def ended(job: Job, out=None) -> tuple[int, float]:
    """Runs a job to its end: its exit code, and the seconds of cores it took."""
    words = [str(word) for word in job.command]
    if job.zygote is not None:
        process = job.zygote.popen(words, env=job.env, cwd=ROOT, stdout=out, stderr=out)
    else:
        process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, env=job.env, stdout=out, stderr=out)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def proof_lines(log: Path) -> list[str]:
    """What the long trials say of themselves, from CTest's log of its last run."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return sorted(line.strip() for line in text.splitlines() if line.lstrip().startswith("proof: "))


def pytest_on_gpu_path(python: Path, *words: str) -> list:
    return [python, "-m", "gpu_path", "-m", "pytest", *PYTEST_OPTIONS, *words]


def gpu_path_environment() -> dict[str, str]:
    """Where the package of tests/gpu_path is found, besides what is found already."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/gpu_path"), *filter(None, [os.environ.get("PYTHONPATH")])])
    }


def ctest(preset: str, at_once: int, *arguments: str) -> list:
    return ["ctest", "--preset", preset, "-j", at_once, *arguments]


def compiled_and_run(preset: str) -> list:
    """Compilers keep cores busy that engines leave idle. The tests of this lane end last: two run at a time."""
    build = ["cmake", "--build", "--preset", preset, "--target", "all_tests"]
    words = ["cmake", "--preset", preset], build, ctest(preset, 2)
    return ["sh", "-c", " && ".join(shlex.join(map(str, command)) for command in words)]


PYTEST = ["-m", "pytest", *PYTEST_OPTIONS]
# The core of the Python tests, on the CPU's path.
CORE_TESTS = [*PYTEST, *(f"tests/python/test_{name}.py" for name in CORE), "-m", "core"]


def other_versions() -> int:
    """The core of the Python tests with each other vLLM that is known, on the GPU's path too."""
    _, model = setup.everything()
    parts = Parts()
    for version in other_vllm.ENVIRONMENTS:
        python, more = other_vllm.environment(version)
        env = environment(model) | more
        on_gpu_path = pytest_on_gpu_path(python, "tests/python/test_gpu_path.py", "-m", "core")
        parts.beside_each_other(
            {
                f"Python tests, core, vLLM {version}": Job([python, *CORE_TESTS], env),
                f"Python tests, core, vLLM {version}, GPU path": Job(on_gpu_path, env | gpu_path_environment()),
            }
        )
    return parts.summary()


def whole_gpu_path() -> int:
    """Run all tests of engines on the GPU path, on the CPU's path what `test` runs on the GPU path alone, on both what
    takes too long for `test`, and tests of tools with nothing forked."""
    python, model = setup.everything()
    setup.install_stores(python)
    parts = Parts()
    parts.compile("release")  # tests of tools run all benches
    env = environment(model)
    on_gpu_path = env | gpu_path_environment()
    longer = {"TORPOR_PROOF": "long"}
    engines = [path for name in ENGINES if (path := f"tests/python/test_{name}.py") not in SESSIONS]
    alone = {*engines, *SESSIONS, *FEW_BLOCKS}
    others = sorted({str(path.relative_to(ROOT)) for path in ROOT.glob("tests/python/test_*.py")} - alone)
    parts.beside_each_other(
        {
            "Tools and documents": Job([python, *PYTEST, "tests/tools"], env | longer),
            "Too long for `test`": Job([python, *PYTEST, *BUT_SESSIONS, "-m", "long or longer"], on_gpu_path | longer),
            "Engines, vLLM's GPU path": Job(pytest_on_gpu_path(python, *engines), on_gpu_path),
            "Sessions, vLLM's GPU path": Job(pytest_on_gpu_path(python, *SESSIONS), on_gpu_path),
            "Few blocks, vLLM's GPU path": Job(pytest_on_gpu_path(python, *FEW_BLOCKS), on_gpu_path),
            "All else on vLLM's GPU path, long": Job(
                pytest_on_gpu_path(python, *others, "-m", "gpu_path and long"), on_gpu_path
            ),
            "What `test` runs on the GPU path alone": Job(
                [python, *PYTEST, *BUT_SERVERS, "-m", f"not long and {GPU_PATH_ALONE}"], env
            ),
        }
    )
    return parts.summary()


def main(arguments: list[str]) -> int:
    if wrong := [word for word in arguments if word != "--quick"]:
        raise setup.SetupError(f"tools/dev test does not know {wrong[0]!r}; there is --quick")
    python, model = setup.prerequisites()
    if "--quick" not in arguments:
        setup.clang()
    setup.install_console(python)
    setup.install_stores(python)
    setup.install_lint(python)
    if "--quick" in arguments:
        return quick(python, model)
    return whole(python, model, {version: other_vllm.environment(version) for version in other_vllm.ENVIRONMENTS})


def environment(model: Path) -> dict[str, str]:
    """Return that of the tests, when torpor is installed. vLLM may unpickle nothing: torpor never needs that."""
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_ALLOW_INSECURE_SERIALIZATION"}
    return inherited | {"TORPOR_TEST_MODEL": str(model), "HF_HUB_OFFLINE": "1"}


def quick(python: Path, model: Path) -> int:
    parts = Parts()
    parts.install(python)
    parts.compile("release", "unit_tests", "proof_tests", "libraries", "tools")
    env = environment(model)
    parts.run("C++ tests", Job(ctest("release", CORES, "-L", "unit"), env))
    for title, words in {
        "Python tests, servers": [*SERVERS, "-m", "not slow and not long"],
        "Python tests, engines": [*BUT_SERVERS, "-m", "not slow and not long"],
        "Python tests, sessions": [*SESSIONS, *FEW_BLOCKS, "-m", "not slow and not long"],
        "Tools and documents": ["tests/tools", "-m", "not long"],
    }.items():
        parts.run(title, Job([python, *PYTEST, *words], env))
    return parts.summary()


def whole(python: Path, model: Path, others: dict[str, tuple[Path, dict[str, str]]]) -> int:
    """`others`: further versions of vLLM, each with its python and environment (other_vllm.py)."""
    parts = Parts()
    parts.install(python)
    env = environment(model)
    on_gpu_path = env | gpu_path.environment()

    # They import vLLM and torpor, once for all lanes of tests, while the compiler begins.
    def zygote_of(python: Path, variables: dict[str, str]) -> Zygote:
        return Zygote(python, variables | ENVIRONMENT, with_torpor=True)

    zygote, gpu_path_zygote = zygote_of(python, env), zygote_of(python, on_gpu_path)
    others = {version: (zygote_of(own, env | more), env | more) for version, (own, more) in others.items()}
    # C++ unit tests run where sanitizers watch them, the proofs as they are built for users; `quick` runs both so.
    parts.compile("release", "proof_tests", "libraries", "tools")
    sanitized = {
        f"C++ tests, {preset}, compiled": Job(
            compiled_and_run(preset), env | {"CMAKE_BUILD_PARALLEL_LEVEL": str(compilers)}
        )
        for preset, compilers in SANITIZERS.items()
    }
    parts.beside_each_other(
        {
            **sanitized,
            "Python tests, engines": Job(
                [*PYTEST, *BUT_SERVERS, "-m", f"not long and not ({GPU_PATH_ALONE})"], env, zygote
            ),
            "C++ tests, release": Job(ctest("release", 1, "-L", "proof"), env),
            "Python tests, sessions": Job([*PYTEST, *SESSIONS, *FEW_BLOCKS, "-m", "not long"], env, zygote),
            "Python tests, vLLM's GPU path": Job(
                [*PYTEST, *BUT_SESSIONS, "-m", ON_GPU_PATH], on_gpu_path, gpu_path_zygote
            ),
            "Python tests, sessions, vLLM's GPU path": Job(
                [*PYTEST, *SESSIONS, "-m", ON_GPU_PATH], on_gpu_path, gpu_path_zygote
            ),
            "Python tests, few blocks, vLLM's GPU path": Job(
                [*PYTEST, *FEW_BLOCKS, "-m", ON_GPU_PATH], on_gpu_path, gpu_path_zygote
            ),
            "Python tests, servers": Job([*PYTEST, *SERVERS, "-m", "not long"], env, zygote),
            "Tools and documents": Job([*PYTEST, "tests/tools", "-m", "not long"], env, zygote),
            **{
                f"Python tests, core, vLLM {version}": Job(CORE_TESTS, variables, own)
                for version, (own, variables) in others.items()
            },
        }
    )
    for each in (zygote, gpu_path_zygote, *(own for own, _ in others.values())):
        each.close()
    return parts.summary()
