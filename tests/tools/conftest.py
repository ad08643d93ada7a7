"""One run of the demo, whose checkpoint the other tests look into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


def pytest_configure(config):
    config.addinivalue_line("markers", "long: only in tools/dev proof")


def demo(*arguments) -> subprocess.CompletedProcess:
    model = os.environ["TORPOR_TEST_MODEL"]
    return subprocess.run(
        [sys.executable, ROOT / "tools/demo/demo.py", "--model", model, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=400,
    )


def inspector(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ROOT / "build/release/tools/torpor/torpor", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="session")
def shown(tmp_path_factory) -> dict:
    """The demo's JSON, to disk."""
    done = demo("--json", "--dir", tmp_path_factory.mktemp("demo"), "--max-tokens", 40, "--freeze-after", 16)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
