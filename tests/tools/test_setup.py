# SPDX-License-Identifier: Apache-2.0
"""When torpor is compiled to be installed, and when a wheel that is there will do. Without pip and a compiler."""

from pathlib import Path

import pytest
from devtool import other_vllm, setup

from torpor.vllm import compat

PYTHON = Path("/environments/venv-1/bin/python")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """`install(...)` in a checkout by name; returns which of pip's words it took."""
    took: list[str] = []

    def run(title, command, **_):
        words = [str(word) for word in command]
        took.append(words[words.index("--disable-pip-version-check") + 1])
        if took[-1] == "wheel":
            folder = Path(words[words.index("-w") + 1])
            folder.mkdir(parents=True)
            (folder / "torpor-0.1.0-cp311-linux.whl").write_text("made here")
        else:
            Path(words[words.index("--target") + 1]).mkdir(parents=True)
            took[-1] += ": " + Path(words[-1]).read_text()

    monkeypatch.setattr(setup, "run", run)
    monkeypatch.setattr(setup, "BUILT", tmp_path / "built")
    monkeypatch.setattr(setup, "PORTABLE", tmp_path / "portable")
    monkeypatch.setenv("PYTHONPATH", "")

    def install(name: str, sources: str = "1", portable: bool = False, python: Path = PYTHON) -> list[str]:
        took.clear()
        monkeypatch.setattr(setup, "SITE", tmp_path / name)
        monkeypatch.setattr(setup, "sources_digest", lambda endings=("",): f"{sources}{''.join(endings)}")
        setup.install_torpor(python, portable)
        return list(took)

    return install


BUILD = ["wheel", "install: made here"]
INSTALL = ["install: made here"]


def test_what_was_built_of_the_same_sources_is_not_built_again(checkout):
    assert checkout("one") == BUILD
    assert checkout("one") == []
    assert checkout("another") == INSTALL
    assert checkout("one", sources="2") == BUILD
    assert checkout("one", sources="1") == INSTALL
    assert checkout("one", python=Path("/environments/venv-2/bin/python")) == BUILD


def test_a_portable_wheel_will_do_only_where_that_is_said(checkout, tmp_path):
    (tmp_path / "portable/1").mkdir(parents=True)
    (tmp_path / "portable/1/torpor-0.1.0-cp311-manylinux.whl").write_text("portable")
    assert checkout("one", portable=True) == ["install: portable"]
    assert checkout("one", portable=True) == []
    assert checkout("one") == BUILD  # tests want what this machine can do
    assert checkout("one", portable=True) == []
    assert checkout("two", portable=True) == INSTALL


def test_few_builds_are_kept(checkout, tmp_path):
    for number in range(8):
        checkout("one", sources=str(number))
    assert len(list((tmp_path / "built").iterdir())) == setup._BUILDS_KEPT


def test_another_vllm_is_asked_for_by_its_version():
    assert other_vllm.named(["--to", "host"]) == (None, ["--to", "host"])
    assert other_vllm.named(["--to", "host", "--vllm", "0.33", "--json"]) == ("0.33", ["--to", "host", "--json"])
    assert other_vllm.named(["--vllm", "0.31.0"]) == ("0.31", []) and other_vllm.named(["--vllm", "0.32"]) == (None, [])
    for wrong in (["--vllm"], ["--vllm", "0.30"]):
        with pytest.raises(setup.SetupError, match=r"0.31, 0.32, 0.33"):
            other_vllm.named(wrong)
    assert {*other_vllm.ENVIRONMENTS, other_vllm.ALL_TESTS} == set(compat.VERSIONS)
    assert setup.VLLM_WHEEL.rpartition("=")[2].startswith(other_vllm.ALL_TESTS)
