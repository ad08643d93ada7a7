# SPDX-License-Identifier: Apache-2.0
"""Engines that share KV blocks through a real Redis: what one computed, another finds; without it they compute."""

import contextlib
from pathlib import Path

import pytest
from conftest import result_of
from connector_shared import check_reset, check_shared, one_after_the_other
from torpor.errors import InvalidArgument
from torpor.vllm.connector_options import ConnectorOptions

from networks import FAR, inside, two_networks
from redis_server import PASSWORD, RedisServer

SLOW_STORE = Path(__file__).parent / "connector_slow_store_process.py"


@pytest.fixture(scope="module")
def shared(zygote, tiny_model, tmp_path_factory):
    """One engine after the other with the same server, over TLS; the third one sees the network between them slowed
    and cut, where the kernel allows it, and the server stopped, then killed."""
    folder = tmp_path_factory.mktemp("shared")
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(two_networks())
        place = {} if wire is None else {"inside": inside(wire.far), "host": FAR}
        server = stack.enter_context(RedisServer(folder / "redis", tls=True, **place))
        near, far = (0, 0) if wire is None else (wire.near, wire.far)
        options = {"kv_store": f"{server.url}/tests"} | server.options
        return one_after_the_other(zygote, tiny_model, folder, options, server.pid, PASSWORD, 1000, wire=(near, far))


@pytest.mark.slow
def test_what_one_engine_computed_another_finds(shared):
    check_shared(*(result["first"] for result in shared[:2]))


@pytest.mark.slow
def test_cached_tokens_are_counted_by_the_tier_that_had_them(shared):
    """Two blocks of one prompt come from each: together they are what vLLM says was cached."""
    result = shared[1]["from each tier"]
    two = {"device": 64, "host": 64, "disk": 64, "kv_store": 64}
    assert result["dropped"] == {"host": 4, "disk": 2} and result["loaded"] == 2
    assert result["counted"] == result["story"] == two | {"other": 0} and result["event"] == two
    assert result["cached"] == sum(two.values()) and result["tokens"][0] == result["tokens"][1]


@pytest.mark.slow
def test_after_a_reset_an_engine_finds_nothing_of_before(shared):
    for result in shared[:2]:
        check_reset(result)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["slowed", "cut", "stopped", "killed"])
def test_a_server_that_does_not_answer_costs_time_once_and_no_token(shared, how):
    if how not in shared[2]:
        pytest.skip("the kernel gives this process no network of its own")
    result = shared[2][how]
    stats = result["stats"]
    assert result["again"] == result["tokens"] and stats["kv_store_onboarded_blocks"] == 0
    assert how == "slowed" or stats.get("publish_transferred", 0) == 0
    assert stats.get("lookup_failed", 0) + stats.get("publish_degraded", 0) + stats.get("publish_failed", 0) > 0


@pytest.mark.slow
def test_when_the_network_is_mended_engines_share_again(shared):
    if "mended" not in shared[2]:
        pytest.skip("the kernel gives this process no network of its own")
    assert shared[2]["mended"]["stats"]["publish_transferred"] > 0


def test_no_checkpoint_or_sleep_waits_for_a_slow_store(zygote, tiny_model, tmp_path):
    """They wait for what moves from and to the device. Before a sleep to disk, after which the process may end, all
    that is on its way is stored, or the time is over."""
    one_block = 60  # seconds: more than a busy machine takes for all else
    found = result_of(zygote.run([SLOW_STORE, tiny_model, tmp_path, one_block]))
    assert found["checkpoint"]["report"] < one_block / 2
    assert found["sleep"]["report"] and found["sleep"]["seconds"] < one_block / 2
    assert (
        "KV blocks are still on their way" in found["to disk"]["error"] and found["to disk"]["seconds"] < one_block / 2
    )
    assert found["without requests"]["report"] and found["without requests"]["seconds"] < one_block / 2
    first, *others = found["tokens"]
    assert len(first) == 40 and others == [first] * 3


@pytest.mark.core
def test_none_inside_multi_connector_waits_for_a_slow_store(zygote, tiny_model, tmp_path):
    one_block = 60
    found = result_of(zygote.run([SLOW_STORE, tiny_model, tmp_path, one_block, "sessions"]))
    assert found["sleep"]["report"] and found["without requests"]["report"]
    assert all(found[name]["seconds"] < one_block / 2 for name in ("sleep", "pause", "without requests"))
    first, *others = found["tokens"]
    assert len(first) == 40 and others == [first] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_store": "redis://h", "disk_bytes": 1, "disk_dir": "/d"}, "host_bytes is 0"),
        ({"host_bytes": 1, "kv_store_ca": "x"}, "without kv_store"),
        ({"host_bytes": 1, "kv_store": 7}, "kv_store is 7"),
        ({"host_bytes": 1, "kv_store": "redis://h", "kv_store_blocks": 0}, "kv_store_blocks is 0"),
        ({"host_bytes": 1, "kv_store": "redis://h", "block_compression": "lz4"}, "'none' or 'bf16' or 'zstd'"),
    ],
)
def test_options_of_the_remote_store_are_checked(options, words):
    with pytest.raises(InvalidArgument, match=words) as refused:
        ConnectorOptions.of(options)
    assert "redis://h" not in str(refused.value)
