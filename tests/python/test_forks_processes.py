# SPDX-License-Identifier: Apache-2.0
"""Requests are forked where the engine core, and its ranks, are other processes than the front end."""

from pathlib import Path

import pytest
from conftest import result_of
from test_sessions import alike, same

SCRIPT = Path(__file__).parent / "forks_process.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_each_child_of_an_async_engine_has_a_stream(zygote, tiny_model, ranks):
    result = result_of(zygote.run([SCRIPT, tiny_model, ranks]))
    same(result["forked"], result["plain"])
    assert len(result["children"]) == 3 and result["shared"][2] > 0
    for parent, children in result["children"].items():
        assert len(children) == 3 and all(alike(child, result["plain"][parent]) for child in children)
    gone = result["gone"]
    assert gone["left"] == ["greedy"] and gone["error"] == "not_found" and gone["freed"]
    assert alike(gone["last"], result["plain"]["greedy"])


@pytest.mark.slow
def test_children_of_an_engine_that_steps_by_itself_lose_no_token(zygote, tiny_model):
    result = result_of(zygote.run([SCRIPT, tiny_model, 0]))
    same(result["forked"], result["plain"])
    assert result["children"]
    for parent, children in result["children"].items():
        assert len(children) == 3 and all(alike(child, result["plain"][parent]) for child in children)
