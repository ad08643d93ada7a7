# SPDX-License-Identifier: Apache-2.0
"""Engines that share KV blocks through a real S3 server: what one computed, another finds, also when the first has
ended; with a server that does not answer, or is gone, they compute."""

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import result_of
from connector_told import check_shared

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/demo"))

from s3_server import BUCKET, S3Server

PROCESS = Path(__file__).parent / "connector_remote_process.py"


@pytest.fixture(scope="module")
def shared(zygote, tiny_model, tmp_path_factory):
    """One engine after the other with the same bucket, over TLS; the second sees the server stopped, then killed."""
    folder = tmp_path_factory.mktemp("shared")
    results = []
    with S3Server(folder / "s3", tls=True) as server:
        options = {
            "kv_store": f"s3://{BUCKET}/kv",
            "kv_store_timeout_ms": 1000,
            "kv_store_wait_ms": 2000,
        }
        for pid in (0, server.pid):  # the first may compress; the other reads what it has put there
            how = options | {"block_compression": "none" if pid else "zstd"}
            words = [PROCESS, tiny_model, folder, json.dumps(how), pid, 0, 0]
            done = zygote.run(words, timeout=200, env=os.environ | server.encrypted)
            assert "of-this-machine-alone" not in done.stdout + done.stderr
            results.append(result_of(done))
    return results


@pytest.mark.slow
def test_what_one_engine_computed_another_finds_in_the_bucket(shared):
    check_shared(*(result["first"] for result in shared))


@pytest.mark.slow
def test_after_a_reset_an_engine_finds_nothing_of_before(shared):
    for result in shared:
        after = result["after a reset"]
        assert after["tokens"] == result["first"]["tokens"]
        assert after["stats"]["kv_store_onboarded_blocks"] == 0 and after["stats"].get("lookup_transferred", 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_server_that_does_not_answer_costs_no_token(shared, how):
    result = shared[1][how]
    stats = result["stats"]
    assert result["again"] == result["tokens"] and stats["kv_store_onboarded_blocks"] == 0
    assert stats.get("publish_transferred", 0) == 0
    assert stats.get("publish_degraded", 0) + stats.get("publish_failed", 0) > 0
