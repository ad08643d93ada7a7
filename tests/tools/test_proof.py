# SPDX-License-Identifier: Apache-2.0
"""tools/dev proof runs the parts that are named, and says how each ended."""

import pytest
from devtool import proof
from devtool.setup import SetupError


@pytest.fixture
def ran(monkeypatch):
    """Parts that note that they ran: the first fails, the second cannot be set up."""
    names: list[str] = []

    def part(name: str):
        def run() -> int:
            names.append(name)
            if name == "lives":
                raise SetupError("no compiler")
            return int(name == "unit")

        return run

    monkeypatch.setattr(proof, "PARTS", {name: part(name) for name in proof.PARTS})
    monkeypatch.setattr(proof.setup, "system_packages", lambda: None)
    return names


def test_all_parts_run_although_some_fail(ran, capsys):
    assert proof.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert ran == list(proof.PARTS)
    assert "lives: no compiler" in lines and "proof: fuzz: passed, 0 minutes" in lines
    assert lines[-1] == f"proof: {len(ran) - 2} of {len(ran)} parts passed; failed: unit, lives"


def test_named_parts_run_alone(ran, capsys):
    assert proof.main(["docs", "deploy"]) == 0 and ran == ["docs", "deploy"]
    assert capsys.readouterr().out.splitlines()[-1] == "proof: 2 of 2 parts passed"


def test_a_part_that_does_not_exist_is_named(ran):
    with pytest.raises(SetupError, match=r"takes unit, lives, .*; not 'units'"):
        proof.main(["units"])
    assert ran == []
