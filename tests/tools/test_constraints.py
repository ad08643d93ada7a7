# SPDX-License-Identifier: Apache-2.0
"""The constraints files of the trainers' pages: what they pin can be installed together, and is what the tests have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from devtool import setup

PAGES = ROOT / "docs/trainers"
TRAINERS = ("trl", "verl")


def pinned(path: Path) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def constraints(trainer: str) -> dict[str, str]:
    return pinned(PAGES / f"{trainer}-constraints.txt")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_they_pin_what_the_tests_of_the_trainer_have(trainer):
    tested = pinned(ROOT / f"tools/requirements/{trainer}.txt")
    given = constraints(trainer)
    assert {name: given.get(name) for name in tested} == tested
    assert given["vllm"] == setup.VLLM_WHEEL.rpartition("=")[2]
    page = (PAGES / f"{trainer}.md").read_text()
    assert f"-c docs/trainers/{trainer}-constraints.txt" in page


def resolved(tmp_path: Path, trainer: str, *wanted: str) -> dict[str, str]:
    """What pip would install into an empty environment, by its own resolver; nothing is installed."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "environment"], check=True)
    report = tmp_path / "report.json"
    pip = [tmp_path / "environment/bin/pip", "--disable-pip-version-check", "install", "--dry-run", "-q"]
    # Of antlr 4.9.3 there are sources alone; nothing else is built to be asked for its requirements.
    pip += ["--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime", "--report", report]
    command = [*pip, "-c", PAGES / f"{trainer}-constraints.txt", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = (each["metadata"] for each in json.loads(report.read_text())["install"])
    return {plain(each["name"]): each["version"].partition("+")[0] for each in found}


@pytest.mark.long  # pip reads what two hundred packages need
@pytest.mark.parametrize("trainer", TRAINERS)
def test_pip_finds_all_of_it_beside_vllm(trainer, tmp_path):
    given = constraints(trainer)
    # verl's own requirements exclude those of vLLM: its page installs it, and it alone, with --no-deps.
    wanted = [name for name in given if name != "verl"] if trainer == "verl" else ["vllm", "trl"]
    found = resolved(tmp_path, trainer, *wanted)
    assert {plain(name): found.get(plain(name)) for name in given if name in wanted or trainer == "trl"} == {
        plain(name): version for name, version in given.items() if name in wanted or trainer == "trl"
    }
    if trainer == "verl":
        assert "verl" not in found


@pytest.mark.long
def test_what_does_not_go_together_is_found(tmp_path):
    other = tmp_path / "docs/trainers"
    other.mkdir(parents=True)
    text = (PAGES / "trl-constraints.txt").read_text().replace("transformers==5.19.0", "transformers==4.0.0")
    (other / "trl-constraints.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="conflicting dependencies"):
        patch.setattr(sys.modules[__name__], "PAGES", other)
        resolved(tmp_path, "trl", "vllm", "trl")
