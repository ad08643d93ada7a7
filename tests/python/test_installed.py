# SPDX-License-Identifier: Apache-2.0
"""`python -m torpor` says what is installed, and whether torpor fits the vLLM beside it."""

import sys

import pytest
import vllm

from torpor import __main__ as installed
from torpor.vllm import plugin


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torpor"])


def test_it_takes_no_arguments(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torpor", "ls"])
    assert installed.main() == 2
    assert "takes no arguments" in capsys.readouterr().err


def test_it_lists_the_tiers_of_a_vllm_that_fits(capsys):
    assert installed.main() == 0
    first, second, *tiers = capsys.readouterr().out.splitlines()
    assert first.startswith("torpor ") and second.startswith(f"vllm {vllm.__version__} fits")
    assert {tier.split()[0]: tier.split()[1] for tier in tiers} == dict.fromkeys(plugin.tiers(), "yes")


def test_it_says_why_a_vllm_does_not_fit(capsys, monkeypatch):
    monkeypatch.setattr(plugin, "_reason", "vLLM 9.9 is not as expected")
    assert installed.main() == 1
    assert capsys.readouterr().out.endswith(
        f"vllm {vllm.__version__} runs without torpor: vLLM 9.9 is not as expected\n"
    )


def test_it_says_that_there_is_no_vllm(capsys, monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    assert installed.main() == 1
    assert "vllm is not installed" in capsys.readouterr().out
