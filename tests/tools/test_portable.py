# SPDX-License-Identifier: Apache-2.0
"""Requests of a checkpoint that one release of vLLM wrote come into an engine of another one, with their KV."""

import json
import os
import subprocess
import sys

import pytest
from conftest import PATIENT, ROOT
from devtool import other_vllm

PROCESS = ROOT / "tests/python/portable_process.py"
IMAGES = ROOT / "tests/python/sessions_disk_process.py"


def result_of(version: str, *words, process=PROCESS) -> dict:
    """Of a process with this release; its other prefix hashes show that nothing is found by them."""
    python, more = (sys.executable, {}) if version == "0.32" else other_vllm.environment(version)
    env = os.environ | PATIENT | {"PYTHONHASHSEED": version[-1]} | more
    done = subprocess.run([python, process, *map(str, words)], env=env, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.long
@pytest.mark.parametrize(("writes", "wakes"), [("0.31", "0.32"), ("0.33", "0.32"), ("0.32", "0.33"), ("0.32", "0.31")])
def test_requests_of_another_release_go_on_with_their_kv(tiny, tmp_path, writes, wakes):
    old = result_of(writes, "write", tiny, tmp_path / "old")
    new = result_of(wakes, old["path"], tiny, tmp_path / "new")
    assert old["version"].startswith(writes) and new["version"].startswith(wakes)
    assert new["failed"] == [] and new["bytes"] > 0
    # No request begins again: their KV came along, as far as they had any.
    assert set(new["begun"].values()) == {0} and sum(new["loaded"].values()) > 100
    # In float32 both releases compute the same tokens.
    assert new["ended"] == {name: new["alone"][name] for name in new["ended"]}
    for name, tokens in old["given"].items():
        assert name not in new["ended"] or new["ended"][name][: len(tokens)] == tokens
    assert len(new["ended"]) >= 3


@pytest.mark.long
@pytest.mark.parametrize(("writes", "takes"), [("0.33", "0.32"), ("0.32", "0.33")])
def test_an_image_of_another_release_comes_beside_requests_that_run(tiny, tmp_path, writes, takes):
    old = result_of(writes, "write", tiny, tmp_path / "old", process=IMAGES)
    new = result_of(takes, "take", old["path"], tiny, tmp_path / "new", process=IMAGES)
    assert new["requests"] == list(old["given"]) and not new["left"]
    for name, value in new["expected"].items():  # tokens of each choice; log probabilities have other last digits
        assert [choice[1] for choice in new["answers"][name][1]] == [choice[1] for choice in value[1]], name
