# SPDX-License-Identifier: Apache-2.0
"""Requests leave and come back where the engine core, and its ranks, are other processes than the front end."""

import json
from pathlib import Path

import pytest
from conftest import result_of
from test_sessions import same

SCRIPT = Path(__file__).parent / "sessions_process.py"
REFUSED = Path(__file__).parent / "sessions_refused_process.py"
DISK = Path(__file__).parent / "sessions_disk_process.py"
MROPE = Path(__file__).parent / "mrope_process.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_readers_of_an_async_engine_wait_and_get_every_token(zygote, tiny_model, tmp_path, ranks):
    result = result_of(zygote.run([SCRIPT, tiny_model, ranks, tmp_path]))
    same(result["away"], result["plain"])
    same(result["on_disk"], result["plain"])
    assert result["images"] == []
    assert result["cancelled"] == {"error": "not_found", "used": 0}


@pytest.mark.slow
def test_an_engine_that_steps_by_itself_gives_every_token(zygote, tiny_model, tmp_path):
    result = result_of(zygote.run([SCRIPT, tiny_model, 0, tmp_path]))
    same(result["away"], result["plain"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "this engine was started without them (start it with the option sessions)"),
        ({"sessions": True, "arena_budget_bytes": 4096}, "arena"),
    ],
)
def test_what_cannot_leave_is_said_and_goes_on(zygote, tiny_model, options, named):
    result = result_of(zygote.run([REFUSED, tiny_model, json.dumps(options)]))
    assert named in result["error"]
    assert result["images"] == [] and result["used"] == 0
    same(result["answers"], result["expected"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options", "named"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}, {},
         "sessions with speculation"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_have_sessions_does_not_start(zygote, tiny_model, engine, options, named):
    done = zygote.run([REFUSED, tiny_model, json.dumps({"sessions": True} | options), json.dumps(engine)])
    assert done.returncode != 0 and named in done.stderr + done.stdout


@pytest.mark.slow
def test_a_new_process_takes_requests_of_a_killed_one_beside_its_own(zygote, tiny_model, tmp_path):
    written = result_of(zygote.run([DISK, "write", tiny_model, tmp_path]))
    result = result_of(zygote.run([DISK, "take", written["path"], tiny_model, tmp_path / "own"]))
    assert result["requests"] == list(written["given"]) and not result["left"]
    same(result["answers"], result["expected"])
    # Nothing of what they had was computed again: their KV was there before their first step.
    for name, answer in written["given"].items():
        tokens = sum(len(choice[1]) for choice in answer[1])
        assert name == "two" or result["loaded"][name] >= tokens > 0
    for name, answer in written["given"].items():
        for choice, ended in zip(answer[1], result["answers"][name][1], strict=True):
            assert ended[1][: len(choice[1])] == choice[1]


@pytest.mark.slow
def test_a_request_moves_to_another_live_engine_also_if_its_own_is_killed(zygote, tiny_model, tmp_path):
    result = result_of(zygote.run([DISK, "move", tiny_model, tmp_path]))
    moved = result["moved"]
    assert moved["requests"] == ["moved"] and moved["reader"] == "error" and moved["end"] == "length"
    assert moved["tokens"] == result["plain"] == result["beside"]
    assert result["plain"][: len(moved["given"])] == moved["given"] and 4 <= len(moved["given"]) < len(result["plain"])
    assert result["killed"] == {"tokens": result["plain"], "end": "length", "left": False}


@pytest.mark.slow
def test_requests_of_a_model_with_several_positions_a_token_come_back(zygote, tiny_model):
    result = result_of(zygote.run([MROPE, tiny_model]))
    assert result["uses_mrope"]
    assert result["resumed"] == result["plain"]
    assert result["forked"] == result["plain"]
    assert result["child"] == result["plain"]["greedy"]
    assert result["woken"] == result["plain"]
