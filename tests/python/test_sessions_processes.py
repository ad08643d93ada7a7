# SPDX-License-Identifier: Apache-2.0
"""Requests leave and come back where the engine core, and its ranks, are other processes than the front end."""

import json
from pathlib import Path

import pytest
from conftest import result_of
from test_sessions import same

SCRIPT = Path(__file__).parent / "sessions_process.py"
REFUSED = Path(__file__).parent / "sessions_refused_process.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_readers_of_an_async_engine_wait_and_get_every_token(zygote, tiny_model, ranks):
    result = result_of(zygote.run([SCRIPT, tiny_model, ranks], timeout=300))
    same(result["away"], result["plain"])
    assert result["cancelled"] == {"error": "not_found", "used": 0}


@pytest.mark.slow
def test_an_engine_that_steps_by_itself_gives_every_token(zygote, tiny_model):
    result = result_of(zygote.run([SCRIPT, tiny_model, 0], timeout=300))
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
    result = result_of(zygote.run([REFUSED, tiny_model, json.dumps(options)], timeout=100))
    assert named in result["error"]
    assert result["images"] == [] and result["used"] == 0
    same(result["answers"], result["expected"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options", "named"),
    [
        ({}, {"offload": "eager", "host_bytes": "1MiB"}, "sessions beside the KV connector TorporConnector"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}, {},
         "sessions with speculation"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_have_sessions_does_not_start(zygote, tiny_model, engine, options, named):
    done = zygote.run([REFUSED, tiny_model, json.dumps({"sessions": True} | options), json.dumps(engine)], timeout=100)
    assert done.returncode != 0 and named in done.stderr + done.stdout
