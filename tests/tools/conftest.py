# SPDX-License-Identifier: Apache-2.0
"""One run of the demo, whose checkpoint the other tests look into."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools/demo")]
sys.path += [str(ROOT / "tests/python"), str(ROOT / "tests/gpu_path")]

import gpu_path  # noqa: E402
from zygote import ENVIRONMENT, FORKED, Zygote, shared  # noqa: E402


# OpenMP's threads spin while they wait for one another, unless told otherwise: where other tests keep the cores busy,
# that takes three times the time of what they compute.
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def pytest_configure(config):
    config.addinivalue_line("markers", "long: only in tools/dev proof")


@functools.cache
def zygote(on_gpu_path: bool) -> Zygote:
    return Zygote(env=os.environ | ENVIRONMENT | gpu_path.environment()) if on_gpu_path else shared()


def started(program: Path, *arguments, forked: int = 0, on_gpu_path: bool = False) -> subprocess.CompletedProcess:
    """Runs it. So many of the processes that it starts, and it itself, have imported vLLM already
    (tests/python/zygote.py); in tools/dev proof none has."""
    words = [program, *map(str, arguments)]
    if forked and os.environ.get("TORPOR_PROOF") != "long":
        return zygote(on_gpu_path).run(words, env=os.environ | ENVIRONMENT | {FORKED: str(forked)})
    env = os.environ | PATIENT
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=600)


def demo(*arguments, model: Path | None = None, forked: int = 0) -> subprocess.CompletedProcess:
    """With the real model, as users have it, or with another one."""
    words = ["--model", model or os.environ["TORPOR_TEST_MODEL"], *arguments]
    return started(ROOT / "tools/demo/demo.py", *words, forked=forked, on_gpu_path="--gpu-path" in arguments)


@pytest.fixture(scope="session")
def real_model() -> Path:
    return Path(os.environ["TORPOR_TEST_MODEL"])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    from tiny_model import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), Path(os.environ["TORPOR_TEST_MODEL"]))


def inspector(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ROOT / "build/release/tools/torpor/torpor", *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="session")
def shown(tmp_path_factory) -> dict:
    """The demo's JSON, to disk. The engine that sleeps is forked; the one that wakes is a new interpreter."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["--json", "--dir", folder, "--svg", folder / "run.svg", "--max-tokens", 40, "--freeze-after", 16]
    done = demo(*words, forked=1)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
