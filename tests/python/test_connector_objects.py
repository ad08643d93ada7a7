# SPDX-License-Identifier: Apache-2.0
"""Engines that share KV blocks through a real S3 server: what one computed, another finds, also when the first has
ended; with a server that does not answer, or is gone, they compute."""

import os

import pytest
from connector_shared import check_reset, check_shared, one_after_the_other

from s3_server import BUCKET, S3Server


@pytest.fixture(scope="module")
def shared(zygote, tiny_model, tmp_path_factory):
    """One engine after the other with the same bucket, over TLS; the third sees the server stopped, then killed."""
    folder = tmp_path_factory.mktemp("shared")
    with S3Server(folder / "s3", tls=True) as server:
        options = {"kv_store": f"s3://{BUCKET}/kv"}
        of_server = (server.pid, "of-this-machine-alone", 1000)
        return one_after_the_other(zygote, tiny_model, folder, options, *of_server, env=os.environ | server.encrypted)


@pytest.mark.slow
def test_what_one_engine_computed_another_finds_in_the_bucket(shared):
    check_shared(*(result["first"] for result in shared[:2]))


@pytest.mark.slow
def test_after_a_reset_an_engine_finds_nothing_of_before(shared):
    for result in shared[:2]:
        check_reset(result)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_server_that_does_not_answer_costs_no_token(shared, how):
    result = shared[2][how]
    stats = result["stats"]
    assert result["again"] == result["tokens"] and stats["kv_store_onboarded_blocks"] == 0
    assert stats.get("publish_transferred", 0) == 0
    assert stats.get("publish_degraded", 0) + stats.get("publish_failed", 0) > 0
