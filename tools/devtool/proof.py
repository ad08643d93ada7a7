# SPDX-License-Identifier: Apache-2.0
"""tools/dev proof: the long versions of all tests, in parts; and tools/dev fuzz, which is one of them."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from devtool import deploy, mutants, setup, site, testing, vllm_tests
from devtool.setup import ROOT, SetupError, cmake_build

FUZZ_RUNS_LONG = 10_000_000
REPLAYED_SEEDS = 1000
_LONG = {"TORPOR_PROOF": "long"}
# Without what only helps to explain a crash. An input that crashes is kept: run it alone, with the defaults.
_FAST_ASAN = "detect_stack_use_after_return=0:malloc_context_size=2:quarantine_size_mb=16"


def unit() -> int:
    """Unit tests and proofs in C++, as users have them built: every state after a power cut, every bit flipped."""
    cmake_build("release")
    code = _run(["ctest", "--preset", "release", "-j", testing.CORES], _LONG)
    for line in testing.proof_lines(ROOT / "build/release/Testing/Temporary/LastTest.log"):
        print(line)
    return code


def lives() -> int:
    """5,000 lives of an offload scheduler, and recorded simulations that are replayed event by event."""
    cmake_build("release", ("simulate", "kvcache_test"))
    code = _run([ROOT / "build/release/tests/kvcache/kvcache_test", "--gtest_filter=OffloadModel*"], _LONG)
    simulate = ROOT / "build/release/tests/simulation/simulate"
    return code | _run([simulate, "--replay", "--seeds", str(REPLAYED_SEEDS)])


def sanitizers() -> int:
    """What `test` does not run under sanitizers: the simulation, and libraries with threads."""
    setup.clang()
    code = 0
    for preset in ("asan-rest", "tsan-rest"):
        cmake_build(preset, ("all_tests",))
        code |= _run(["ctest", "--preset", preset, "-j", testing.CORES])
    return code


PARTS: dict[str, Callable[[], int]] = {
    "unit": unit,
    "lives": lives,
    "sanitizers": sanitizers,
    "engines": testing.whole_gpu_path,
    "releases": testing.other_versions,
    "vllm-tests": lambda: vllm_tests.main([]),
    "deploy": lambda: deploy.main([]),
    "docs": lambda: site.main([]),
    "fuzz": lambda: fuzz([]),
    "mutants": lambda: mutants.main([]),
}


def main(arguments: list[str]) -> int:
    """Run these parts, or all; say at the end how each ended."""
    if wrong := [word for word in arguments if word not in PARTS]:
        raise SetupError(f"tools/dev proof takes {', '.join(PARTS)}; not {wrong[0]!r}")
    setup.system_packages()
    ended = []
    for name in arguments or PARTS:
        began = time.monotonic()
        try:
            passed = PARTS[name]() == 0
        except SetupError as problem:  # the others run all the same
            print(f"{name}: {problem}", flush=True)
            passed = False
        ended.append((name, passed))
        minutes = (time.monotonic() - began) / 60
        print(f"proof: {name}: {'passed' if passed else 'FAILED'}, {minutes:.0f} minutes", flush=True)
    failed = [name for name, passed in ended if not passed]
    which = f"; failed: {', '.join(failed)}" if failed else ""
    print(f"proof: {len(ended) - len(failed)} of {len(ended)} parts passed{which}")
    return int(bool(failed))


def _run(words: list, more: dict[str, str] | None = None) -> int:
    env = os.environ | (more or {})
    return int(subprocess.run([str(word) for word in words], cwd=ROOT, env=env).returncode != 0)


def fuzz(arguments: list[str]) -> int:
    """Run fuzz targets over their corpus: RUNS executions each, as many targets at once as there are cores.

    `arguments`: a number of runs, and names of targets; without names all of them.
    """
    known = sorted(folder.name for folder in (ROOT / "tests/fuzz/corpus").iterdir())
    counts = [int(word) for word in arguments if word.isdigit() and int(word) > 0]
    targets = [word for word in arguments if word in known]
    if len(counts) > 1 or len(counts) + len(targets) < len(arguments):
        raise SetupError(f"tools/dev fuzz takes a number of runs, and targets: {', '.join(known)}")
    runs = counts[0] if counts else FUZZ_RUNS_LONG
    setup.system_packages()
    setup.clang()
    # All other parts are sections of the state.
    own = (
        "manifest",
        "refs",
        "archive",
        "answers",
        "delivery_log",
        "orders",
        "segment",
        "transfers",
        "bf16",
        "control",
        "resp",
        "recording",
    )
    cmake_build("fuzz", tuple(f"fuzz_{name}" for name in (*own, "section")))

    def one(target: str) -> tuple[str, bool, str]:
        seeds = ROOT / "tests/fuzz/corpus" / target
        longest = max(seed.stat().st_size for seed in seeds.iterdir())  # one that is longer than -max_len is cut off
        binary = ROOT / "build/fuzz/tests/fuzz" / (f"fuzz_{target}" if target in own else "fuzz_section")
        with tempfile.TemporaryDirectory() as found:  # new inputs go there, the corpus stays as it is
            command = [
                binary,
                f"-runs={runs}",
                f"-max_len={max(4096, longest)}",
                "-timeout=10",
                "-rss_limit_mb=2048",
                "-entropic=0",  # which input is varied next is drawn: to choose it takes longer than many a run
                f"-artifact_prefix={ROOT}/build/fuzz/",
                found,
                seeds,
            ]
            done = subprocess.run(
                [str(c) for c in command],
                env=os.environ | {"TORPOR_FUZZ_SECTION": target, "ASAN_OPTIONS": _FAST_ASAN},
                capture_output=True,
                text=True,
            )
        return target, done.returncode == 0 and f"Done {runs} runs" in done.stderr, done.stderr

    failed = 0
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        for target, passed, log in pool.map(one, targets or known):
            print(f"proof: fuzz {target}: {runs} runs, {'0 crashes' if passed else 'FAILED'}", flush=True)
            if not passed:
                failed += 1
                print(log[-4000:])
    return int(failed > 0)
